"""The autoscaler on a Prometheus page."""

from dataclasses import replace

from autoscale.decide.config import AutoscaleConfig
from autoscale.decide.status import PlanRecord, ServiceStatus, Status
from autoscale.decide.tuning import Pools
from autoscale.load_forecast import Accuracy, LoadForecast, SeriesForecast
from autoscale.types import ControllerState, Decision, Latency, Plan, PoolKey, PoolLimits, Refused, Shown, Traffic
from deployments.actors.scaling_metrics import scaling_metrics, serving_replicas
from deployments.metrics import render
from kvtransfer.topology import Role

P, D = PoolKey("g0", Role.PREFILL), PoolKey("g0", Role.DECODE)
POOLS = Pools({key: PoolLimits(lowest_replicas=1, highest_replicas=9) for key in (P, D)})
CONFIG = AutoscaleConfig.model_validate(
    {"pd_ratio": "1:3", "policy": {"kind": "static", "prefill": 1, "decode": 3}, "is_paused": True}
)
LAST = PlanRecord(
    plan=Plan(
        counts={P: 2, D: 5},
        admitted=("p0", "d0", "d1"),
        withdrawn=("d2",),
        reinstated=(),
        victims=("d3", "p9"),
        pending={Role.PREFILL: 1, Role.DECODE: 3},
        decision=Decision(wanted=None, reason="", shown=(Shown(name="decode_tps", value=70.0, target=100.0),)),
        held_back=(),
        state=ControllerState(
            desired={P: 2, D: 4}, missing_since_s={P: (90.0, 1)}, capped={P: (130.0, 1)}, ticked_s=98.0
        ),
    ),
    running={P: ("p0",), D: ("d0", "d1", "d2", "d3", "d4")},
    draining={P: ("p9",), D: ()},
    latency=Latency(ttft_s=0.5),
    traffic=Traffic(
        requests_per_s=6.0,
        waiting_requests=2.0,
        refused=(Refused(reason="late", priority="low", requests_per_s=4.0),),
    ),
)


def status(last: PlanRecord | None) -> Status:
    service = ServiceStatus(config=CONFIG, tuned={}, pools=POOLS, last=last)
    return Status(log_path="", cordoned=(), topology=None, services={"m": service}, is_hooked=True)


def test_every_state_of_a_replica_has_its_number() -> None:
    page = render([scaling_metrics(status(LAST), 100.0)]).decode()
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
        'tandem_autoscale_requests_per_second{model="m",of="offered"} 6.0',
        'tandem_autoscale_requests_per_second{model="m",of="refused"} 4.0',
        'tandem_autoscale_waiting_requests{model="m"} 2.0',
        'tandem_autoscale_mode{mode="paused",model="m"} 1.0',
        'tandem_autoscale_mode{mode="override",model="m"} 0.0',
        'tandem_autoscale_decision_age_seconds{model="m"} 2.0',
        'tandem_replicas_pending{model="m",role="decode"} 3.0',
        "tandem_autoscale_hooked 1.0",
    ):
        assert line in page.splitlines()
    assert 'latency="tpot",model="m",of="seen"' not in page
    assert 'of="served"' not in page  # not observed


def test_a_forecast_is_shown_with_its_errors_and_what_is_not_known_has_no_sample() -> None:
    accuracy = Accuracy(
        forecasts=12,
        mape_frac=0.1,
        last_mape_frac=0.2,
        error_ratio=0.5,
        near_frac=0.9,
        last_near_frac=0.8,
        coverage_frac=None,
    )
    rate = SeriesForecast(value=7.0, low=6.0, high=8.0, last=5.0, model="ARIMA(0, 1, 1)", accuracy=accuracy)
    length = SeriesForecast(value=90.0, last=90.0, model="last value", fallback="the series is constant")
    forecast = LoadForecast(
        issued_s=60.0, horizon_s=120.0, requests_per_s=rate, input_tokens=length, output_tokens=length
    )
    page = render([scaling_metrics(status(replace(LAST, forecast=forecast)), 100.0)]).decode()
    for line in (
        'tandem_forecast{model="m",of="value",series="requests_per_s"} 7.0',
        'tandem_forecast{model="m",of="low",series="requests_per_s"} 6.0',
        'tandem_forecast{model="m",of="high",series="requests_per_s"} 8.0',
        'tandem_forecast{model="m",of="last",series="requests_per_s"} 5.0',
        'tandem_forecast_horizon_seconds{model="m"} 120.0',
        'tandem_forecast_mape_ratio{model="m",of="forecast",series="requests_per_s"} 0.1',
        'tandem_forecast_mape_ratio{model="m",of="last_value",series="requests_per_s"} 0.2',
        'tandem_forecast_near_ratio{model="m",of="forecast",series="requests_per_s"} 0.9',
        'tandem_forecast_near_ratio{model="m",of="last_value",series="requests_per_s"} 0.8',
        'tandem_forecast_fallback{model="m",series="requests_per_s"} 0.0',
        'tandem_forecast_fallback{model="m",series="input_tokens"} 1.0',
    ):
        assert line in page.splitlines()
    assert "tandem_forecast_coverage_ratio{" not in page
    assert 'of="low",series="input_tokens"' not in page


def test_before_the_first_decision_the_page_has_no_sample() -> None:
    assert scaling_metrics(status(None), 100.0) == []


def test_the_serving_ratio_counts_replicas_as_what_they_are_worth() -> None:
    limits = {P: POOLS.root[P], D: replace(POOLS.root[D], capacity=0.5)}
    service = ServiceStatus(config=CONFIG, tuned={}, pools=Pools(limits), last=LAST)
    whole = ServiceStatus(config=CONFIG, tuned={}, pools=POOLS, last=LAST)
    assert serving_replicas(service)[Role.DECODE] == serving_replicas(whole)[Role.DECODE] / 2
    assert serving_replicas(service)[Role.PREFILL] == serving_replicas(whole)[Role.PREFILL]
