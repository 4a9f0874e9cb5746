"""One application on real engines for this folder: prefill and decode on differently labelled Ray nodes."""

import asyncio
import copy
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from deployments.wire.messages import DecodeRequest, Frame
from serve_app.local.cluster import NodeSpec


@pytest.fixture(scope="package")
def app(make_document: Any) -> Iterator[Any]:
    """Two services: ``tiny`` on prefill and decode, ``offline`` on one replica for both. Their counts are fixed."""
    from serve_app.sdk import deploy

    nodes = [
        NodeSpec(cpus=2),
        NodeSpec(cpus=2, labels={"tandem.io/s1": "a", "tandem.io/s0": "left"}),
        NodeSpec(cpus=3, labels={"tandem.io/s1": "a", "tandem.io/s0": "right"}),
    ]
    document = make_document(prefill="left", decode="right")
    application = document["applications"][0]
    application["autoscaling_policy"] = {"policy_function": "autoscale.ray_policy:JointPolicy"}
    args = application["args"]
    args["engine_kwargs"] |= {
        "reasoning_config": {"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"},
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
        "tool_parser_plugin": str(Path(__file__).with_name("own_parser.py")),
        "tool_call_parser": "own_hermes",
    }
    tiny = {key: args.pop(key) for key in ("model", "engine_kwargs", "groups")}
    for pool in (tiny["groups"][0]["prefill"], tiny["groups"][0]["decode"]):
        pool["max_replicas"] = 1
    tiny["groups"][0]["decode"]["env"] = {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}  # of both services
    offline = copy.deepcopy(tiny)
    tiny["autoscale"] = {"policy": {"kind": "static", "prefill": 1, "decode": 1}}
    offline["model"]["id"] = "offline"
    offline["groups"][0] |= {"name": "offline", "prefill": None}
    offline["autoscale"] = {"pd_ratio": "0:1", "policy": {"kind": "wva"}}
    args["services"] = [tiny, offline]
    with deploy(document, nodes=nodes) as running:
        yield running
        started = running.processes()
    _, alive = psutil.wait_procs(started, timeout=120)
    assert [process.cmdline() for process in alive] == []


@pytest.fixture(name="ask", scope="package")  # Serve keeps the loop of the first caller
def _ask(app: Any) -> Iterator[Any]:
    """Sends one request to the decode pool without the ingress; ``sent``: what its client has from another replica."""
    from ray import serve

    loop = asyncio.new_event_loop()

    async def stream(request: DecodeRequest) -> list[Frame]:
        handle = serve.get_deployment_handle("decode:g0", "tandem").options(method_name="respond", stream=True)
        return [frame async for frame in handle.remote(request)]

    def ask(endpoint: str, body: dict[str, Any], sent: Any = None, **fields: Any) -> list[Frame]:
        raw, now_s = json.dumps(body).encode(), time.time()
        request = DecodeRequest(
            endpoint=endpoint, body=raw, request_id="r-1", id_seed="s", arrived_at_s=now_s, sent=sent, **fields
        )
        return loop.run_until_complete(stream(request))

    yield ask
    loop.close()
