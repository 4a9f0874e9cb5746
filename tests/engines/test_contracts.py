"""Behaviour of vLLM and NIXL that Tandem needs and no public interface promises; each script is its own process."""

import json
import os
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm]

# Logs go to standard error: standard output is for the answer.
_QUIET = {"VLLM_LOGGING_STREAM": "ext://sys.stderr", "VLLM_PLUGINS": "tandem", "NIXL_LOG_LEVEL": "WARN"}

# One child for each engine, so that no engine finds state of the one before. A child of multiprocessing would be taken
# for an engine core.
_FRONT_END = """
import json, os, sys
from vllm.engine.arg_utils import EngineArgs

answers = []
for binding, workers in json.loads(sys.argv[2]):
    reads, writes = os.pipe()
    if os.fork():
        os.close(writes)
        answers.append(json.loads(os.read(reads, 4096)))
        continue
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = binding
    before = sorted(os.sched_getaffinity(0))
    config = EngineArgs(model=sys.argv[1], enforce_eager=True, tensor_parallel_size=workers).create_engine_config()
    executor = str(config.parallel_config.distributed_executor_backend)
    os.write(writes, json.dumps([executor, sorted(os.sched_getaffinity(0)) != before]).encode())
    os._exit(0)
print(json.dumps(answers))
"""

_ENGINE_CORE = """
import json, multiprocessing, os, threading

def report():
    from deployments.vllm_seam.plugin import register
    register()
    import torch
    from nixl import _api
    from vllm.platforms.cpu import CpuPlatform
    config = _api.nixlBind.nixlAgentConfig()
    config.pthrDelay = 0
    _api.nixl_agent("probe", _api.nixl_agent_config(backends=["UCX"]))
    print(json.dumps({
        "cores": sorted(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "topology": CpuPlatform.discover_numa_topology(),
        "poll_us": config.pthrDelay,
        "watched": "tandem-parent-watch" in [thread.name for thread in threading.enumerate()],
    }), flush=True)

child = multiprocessing.get_context("fork").Process(target=report)
child.start()
child.join()
"""


_PROMPT_STATS = """
import json
from dataclasses import asdict
from types import SimpleNamespace
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats
from vllm.v1.metrics.stats import IterationStats, PrefillStats, SchedulerStats
from deployments.vllm_seam.engine_stats import EngineStatsLogger
one_worker = SimpleNamespace(world_size=1)
logger = EngineStatsLogger(
    SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=8), cache_config=None, parallel_config=one_worker)
)
pulls = NixlKVConnectorStats()
pulls.record_transfer(SimpleNamespace(xferDuration=500, postDuration=1, totalBytes=4096, descCount=1))
logger.record(SchedulerStats(kv_connector_stats=pulls.data), None)
for local, external in ((48, 0), (0, 63), (16, 32)):
    iteration = IterationStats()
    prompt = PrefillStats()
    prompt.set(num_prompt_tokens=64, num_local_cached_tokens=local, num_external_cached_tokens=external)
    iteration.prompt_token_stats.update_from_output(prompt)
    logger.record(None, iteration)
print(json.dumps(asdict(logger.load)))
"""


_SIDE_CHANNEL = """
import json, multiprocessing, os, socket, threading

def start():
    from deployments.vllm_seam.plugin import register
    register()
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler import NixlBaseConnectorScheduler
    scheduler = object.__new__(NixlBaseConnectorScheduler)
    scheduler._nixl_handshake_listener_t, scheduler._stop_event = None, threading.Event()
    scheduler.side_channel_host = "127.0.0.1"
    scheduler.side_channel_port = int(os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"])
    scheduler.set_xfer_handshake_metadata({})

with socket.create_server(("127.0.0.1", 0)) as other:
    os.environ["VLLM_NIXL_SIDE_CHANNEL_HOST"] = "127.0.0.1"
    os.environ["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(other.getsockname()[1])
    child = multiprocessing.get_context("fork").Process(target=start)
    child.start()
    child.join(60)
    print(json.dumps(child.exitcode))
    child.kill()
"""


@pytest.fixture(name="core")
def _core() -> str:
    return str(max(os.sched_getaffinity(0)))


def test_a_cpu_engine_with_one_worker_and_given_cores_is_one_process(
    run_python: Callable[..., Any], tiny_model: Any, core: str
) -> None:
    engines = {(core, 1): "UniProcExecutor", ("auto", 1): "mp", (core, 2): "mp"}
    seen = run_python(_FRONT_END, str(tiny_model), json.dumps(list(engines)), env={**os.environ, **_QUIET})
    assert [executor.rpartition(".")[2] for executor, _ in seen] == list(engines.values())
    assert [is_bound for _, is_bound in seen] == [False] * 3


def test_an_engine_core_is_bound_to_its_cores_and_watched_and_sleeps_between_polls_of_nixl(
    run_python: Callable[..., Any], core: str
) -> None:
    seen = run_python(_ENGINE_CORE, env={**os.environ, **_QUIET, "VLLM_CPU_OMP_THREADS_BIND": core})
    assert seen == {
        "cores": [int(core)],
        "threads": 1,
        "topology": [],
        "poll_us": 1,
        "watched": True,
    }


def test_prompt_tokens_are_counted_by_their_source(run_python: Callable[..., Any]) -> None:
    """Of 64 tokens of each prompt 48, 0 and 16 are in the cache; 0, 63 and 32 come as KV from another engine."""
    report = run_python(_PROMPT_STATS, env={**os.environ, **_QUIET})
    assert report["prefill_tokens"] == 16 + 1 + 16
    assert report["cached_prefill_tokens"] == 48
    assert (report["pulled_bytes"], report["pull_s"]) == (4096.0, pytest.approx(500e-6))  # NIXL counts microseconds


def test_an_engine_whose_side_channel_port_is_taken_ends(run_python: Callable[..., Any]) -> None:
    """Without our plugin vLLM would wait for ever."""
    assert run_python(_SIDE_CHANNEL, env={**os.environ, **_QUIET}) == 1
