"""The load of the engine in this process."""

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.vllm
# Each of them reports its part of a pull.
WORKERS = 2


def make_logger(**cache: Any) -> Any:
    from deployments.vllm_seam.engine_stats import EngineStatsLogger

    config = {"block_size": 32, "num_gpu_blocks": 100, "enable_prefix_caching": True, **cache}
    return EngineStatsLogger(
        SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=8),
            cache_config=SimpleNamespace(**config),
            parallel_config=SimpleNamespace(world_size=WORKERS),
        )
    )


def scheduler(**fields: Any) -> SimpleNamespace:
    shown = {"num_running_reqs": 0, "num_waiting_reqs": 0, "num_skipped_waiting_reqs": 0, "kv_cache_usage": 0.0}
    shown["kv_connector_stats"] = None
    return SimpleNamespace(**{**shown, **fields})


def iteration(
    output: int, computed: int, cached: int = 0, pulled: int = 0, gaps_s: tuple[float, ...] = ()
) -> SimpleNamespace:
    prompts = SimpleNamespace(computed=computed, local_cache_hit=cached, external_kv_transfer=pulled)
    return SimpleNamespace(
        num_generation_tokens=output, prompt_token_stats=prompts, inter_token_latencies_iter=list(gaps_s)
    )


def test_an_engine_is_empty_before_its_first_step_and_then_as_the_last_one_left_it() -> None:
    stats = make_logger()
    # 0, not unknown: a prefill engine without requests makes no step, and the autoscaler needs its report.
    assert set(asdict(stats.load).values()) == {0.0}
    assert {"waiting_requests", "running_requests", "kv_usage_frac"} <= asdict(stats.load).keys()
    for running, usage in ((3, 0.25), (0, 0.0)):
        stats.record(scheduler(num_running_reqs=running, kv_cache_usage=usage), None)
        stats.record(None, iteration(0, 0))  # a step may have either
        assert (stats.load.running_requests, stats.load.kv_usage_frac) == (running, usage)


def test_tokens_are_counted_and_queues_are_the_last_steps() -> None:
    stats = make_logger()
    stats.record(scheduler(num_waiting_reqs=2, num_skipped_waiting_reqs=1), iteration(5, 100, 40))
    stats.record(scheduler(num_waiting_reqs=1), iteration(7, 0, 20))
    stats.record(scheduler(num_waiting_reqs=1), iteration(0, 0, 500, pulled=80))
    assert asdict(stats.load) == {
        "running_requests": 0.0,
        "waiting_requests": 1.0,
        "deferred_requests": 0.0,
        "kv_usage_frac": 0.0,
        "decode_tokens": 12.0,
        "prefill_tokens": 100.0,
        "cached_prefill_tokens": 60.0,
        "pulled_bytes": 0.0,
        "pull_s": 0.0,
        "decode_steps": 0,
        "decode_steps_s": 0.0,
        "decode_steps_requests": 0,
        "decode_steps_kv_tokens": 0.0,
    }


def test_steps_without_prompts_are_added_up() -> None:
    stats = make_logger()
    stats.record(scheduler(kv_cache_usage=0.5), iteration(2, 0, gaps_s=(0.02, 0.09)))  # one request had waited
    stats.record(scheduler(kv_cache_usage=0.25), iteration(3, 0, gaps_s=(0.03, 0.03, 0.03)))
    stats.record(scheduler(kv_cache_usage=0.9), iteration(3, 64, gaps_s=(0.5, 0.5)))  # with a prompt
    load = stats.load
    assert (load.decode_steps, load.decode_steps_s, load.decode_steps_requests) == (2, pytest.approx(0.05), 5)
    assert load.decode_steps_kv_tokens == pytest.approx((0.5 + 0.25) * 100 * 32)


def test_pulls_of_a_step_are_added_up() -> None:
    stats = make_logger()
    stats.record(scheduler(kv_connector_stats={"bytes_transferred": [100, 50], "transfer_duration": [0.1, 0.2]}), None)
    stats.record(scheduler(kv_connector_stats={"num_failed_transfers": [1]}), None)
    assert (stats.load.pulled_bytes, stats.load.pull_s) == (150.0, pytest.approx(0.3 / WORKERS))


def test_an_engine_that_caches_no_prefix_has_no_blocks_for_them() -> None:
    assert make_logger().prefix_cache_blocks == 100
    assert make_logger(enable_prefix_caching=False).prefix_cache_blocks == 0
    assert make_logger(num_gpu_blocks=None).prefix_cache_blocks == 0


def test_the_server_finds_the_logger_of_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    from deployments.vllm_seam import engine_stats

    stats = make_logger()
    assert engine_stats.engine_stats() is stats
    monkeypatch.setattr(engine_stats, "_LOGGERS", [])
    with pytest.raises(RuntimeError, match="pip install -e"):
        engine_stats.engine_stats()
