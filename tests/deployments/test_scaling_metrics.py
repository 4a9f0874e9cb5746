"""The autoscaler on a Prometheus page."""

from typing import Any

from deployments.metrics import render
from deployments.scaling_metrics import scaling_metrics

SERVICE: dict[str, Any] = {
    "config": {
        "pd_ratio": "1:3",
        "slo": {"ttft_s": 1.0, "tpot_s": 0.05},
        "is_paused": True,
        "is_observing": False,
        "override": None,
    },
    "plan": {
        "counts": {"prefill:g0": 2, "decode:g0": 5},
        "admitted": ["p0", "d0", "d1"],
        "withdrawn": ["d2"],
        "victims": ["d3", "p9"],
        "pending": {"prefill": 1, "decode": 3},
        "decision": {"ratio": None, "shown": [{"name": "decode_tps", "value": 70.0, "target": 100.0}]},
        "state": {
            "desired": {"prefill:g0": 2, "decode:g0": 4},
            "missing_since_s": {"prefill:g0": [90.0, 1]},
            "capped": {"prefill:g0": [130.0, 1]},
            "ticked_s": 98.0,
        },
    },
    "running": {"prefill:g0": ["p0"], "decode:g0": ["d0", "d1", "d2", "d3", "d4"]},
    "draining": {"prefill:g0": ["p9"], "decode:g0": []},
    "latency": {"ttft_s": 0.5, "tpot_s": None},
}
STATUS = {"services": {"m": SERVICE}, "is_hooked": True}


def test_every_state_of_a_replica_has_its_number() -> None:
    page = render([scaling_metrics(STATUS, 100.0)]).decode()
    for line in (
        'tandem_replicas{group="g0",role="decode",state="wanted"} 4.0',
        'tandem_replicas{group="g0",role="decode",state="target"} 5.0',
        'tandem_replicas{group="g0",role="decode",state="ready"} 5.0',
        'tandem_replicas{group="g0",role="decode",state="serving"} 2.0',
        'tandem_replicas{group="g0",role="decode",state="held"} 1.0',
        'tandem_replicas{group="g0",role="decode",state="withdrawn"} 1.0',
        'tandem_replicas{group="g0",role="decode",state="draining"} 1.0',
        'tandem_replicas{group="g0",role="prefill",state="draining"} 1.0',
        'tandem_replicas_missing_seconds{group="g0",role="prefill"} 10.0',
        'tandem_autoscale_signal{model="m",of="seen",signal="decode_tps"} 70.0',
        'tandem_autoscale_signal{model="m",of="target",signal="decode_tps"} 100.0',
        'tandem_replicas_missing_seconds{group="g0",role="decode"} 0.0',
        'tandem_replicas_no_room_retry_seconds{group="g0",role="prefill"} 30.0',
        'tandem_replicas_no_room_retry_seconds{group="g0",role="decode"} 0.0',
        'tandem_pd_ratio{model="m",of="serving"} 0.5',
        'tandem_autoscale_latency_seconds{latency="ttft",model="m",of="seen"} 0.5',
        'tandem_autoscale_latency_seconds{latency="tpot",model="m",of="objective"} 0.05',
        'tandem_autoscale_mode{mode="paused",model="m"} 1.0',
        'tandem_autoscale_mode{mode="override",model="m"} 0.0',
        'tandem_autoscale_decision_age_seconds{model="m"} 2.0',
        'tandem_replicas_pending{model="m",role="decode"} 3.0',
        "tandem_autoscale_hooked 1.0",
    ):
        assert line in page.splitlines()
    assert 'latency="tpot",model="m",of="seen"' not in page


def test_before_the_first_decision_there_is_nothing() -> None:
    assert scaling_metrics({"services": {"m": {"config": {}}}}, 100.0) == []
