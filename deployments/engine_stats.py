"""The only file that knows vLLM's stats objects: what each engine in this process did and holds now."""

import time
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

# vLLM builds the logger itself and hands it to nobody: the server in the same process finds it here.
_ENGINES: dict[int, "EngineStatsLogger"] = {}


@dataclass(slots=True)
class EngineCounters:
    """Monotonic totals and current gauges of one engine; counts since its start."""

    generated_tokens: int = 0
    computed_prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    transferred_prompt_tokens: int = 0
    running_requests: int = 0
    waiting_requests: int = 0
    deferred_requests: int = 0
    kv_usage_frac: float = 0.0
    nixl_bytes: int = 0
    nixl_transfers: int = 0
    nixl_seconds: float = 0.0
    nixl_failed_transfers: int = 0
    nixl_expired_requests: int = 0
    updated_s: float = field(default_factory=time.monotonic)


class EngineStatsLogger(StatLoggerBase):
    """vLLM stat logger (entry point ``vllm.stat_logger_plugins``): folds each engine step into ``counters``."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self.counters = EngineCounters()
        self.max_running_requests: int = vllm_config.scheduler_config.max_num_seqs
        self._cache_config = vllm_config.cache_config
        _ENGINES[engine_index] = self

    @property
    def block_tokens(self) -> int:
        """Tokens per KV block."""
        return int(self._cache_config.block_size)

    @property
    def kv_blocks(self) -> int:
        """KV capacity in blocks."""
        return int(self._cache_config.num_gpu_blocks or 0)

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Called by vLLM after every engine step; kept cheap."""
        c = self.counters
        c.updated_s = time.monotonic()
        if iteration_stats is not None:
            prompt = iteration_stats.prompt_token_stats
            c.generated_tokens += iteration_stats.num_generation_tokens
            c.computed_prompt_tokens += prompt.computed
            c.cached_prompt_tokens += prompt.local_cache_hit
            c.transferred_prompt_tokens += prompt.external_kv_transfer
        if scheduler_stats is not None:
            c.running_requests = scheduler_stats.num_running_reqs
            c.waiting_requests = scheduler_stats.num_waiting_reqs
            c.deferred_requests = scheduler_stats.num_skipped_waiting_reqs
            c.kv_usage_frac = scheduler_stats.kv_cache_usage
            if scheduler_stats.kv_connector_stats:
                self._record_transfers(scheduler_stats.kv_connector_stats)

    def _record_transfers(self, stats: dict[str, Any]) -> None:
        c = self.counters
        data = stats.get("data", stats)
        c.nixl_bytes += int(sum(data.get("bytes_transferred", ())))
        c.nixl_transfers += len(data.get("bytes_transferred", ()))
        c.nixl_seconds += float(sum(data.get("transfer_duration", ())))
        c.nixl_failed_transfers += len(data.get("num_failed_transfers", ()))
        c.nixl_expired_requests += len(data.get("num_kv_expired_reqs", ()))

    def log_engine_initialized(self) -> None:
        """Nothing to say; required by the base class."""


def engine_stats(engine_index: int = 0) -> EngineStatsLogger:
    """The stats of the engine in this process.

    Raises:
        RuntimeError: no engine has started here, or vLLM did not load the plugin.
    """
    try:
        return _ENGINES[engine_index]
    except KeyError:
        raise RuntimeError(
            "no engine stats in this process: vLLM did not load the 'tandem' entry point of "
            "'vllm.stat_logger_plugins'; install the package in the environment of the Serve replicas "
            "(pip install -e .)"
        ) from None
