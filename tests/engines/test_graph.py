"""The arguments that the deployment graph gives to its deployments."""

import json
import os
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.vllm]

_GRAPH = """
import json, ray
from serve_app.app import build
from serve_app.local.cluster import LocalCluster, NodeSpec
with LocalCluster([NodeSpec(cpus=1)]) as cluster, ray.init(address=cluster.address, log_to_driver=False):
    ingress = build(json.loads({args!r}))._bound_deployment  # Ray's builder asks for the runtime environment
(service,) = ingress.init_kwargs["services"]
decode = service.decodes["g0"]._bound_deployment
print(json.dumps(decode.init_kwargs["slo"].model_dump(mode="json")))
"""


def test_replicas_count_latencies_by_the_objectives_of_the_autoscaler(
    run_python: Callable[..., Any], tiny_model: Any, make_app_args: Callable[..., dict[str, Any]]
) -> None:
    slo = {"ttft_s": 0.25, "ttft_s_per_input_token": 0.002, "tpot_s": 0.04, "quantile_frac": 0.9}
    pool = {"max_replicas": 2}
    args = make_app_args(
        model={"id": "tiny", "source": str(tiny_model)},
        groups=[{"name": "g0", "prefill": pool, "decode": pool}],
        autoscale={"policy": {"kind": "heteroscale", "target": 500}, "slo": slo},
    )
    quiet = {"VLLM_LOGGING_STREAM": "ext://sys.stderr"}
    assert run_python(_GRAPH.format(args=json.dumps(args)), env={**os.environ, **quiet}) == slo


def test_groups_for_very_long_prompts_have_a_prefill_queue_too() -> None:
    from deployments.config import ServiceConfig
    from deployments.graph import _prefill_queues

    fields = {
        "model": {"id": "m", "source": "org/m"},
        "groups": [{"name": "a"}],
        "long_prompts": {"least_tokens": 1000, "groups": [{"name": "b"}]},
        "router": {"prefill_queue": {"strategy": "edf"}},
    }
    queues = _prefill_queues([ServiceConfig.model_validate(fields)])
    assert [queue.name for queue in queues] == ["prefill_queue_prefill:a", "prefill_queue_prefill:b"]
