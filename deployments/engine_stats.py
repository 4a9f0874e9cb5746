"""The only file that knows vLLM's stats objects: what each engine in this process holds now."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

# vLLM builds the logger itself and hands it to nobody: the server in the same process finds it here.
_ENGINES: dict[int, "EngineStatsLogger"] = {}


@dataclass(slots=True)
class EngineLoad:
    """What an engine holds now and what it has done since it started.

    ``deferred_requests`` wait for KV from another engine. ``prefill_tokens`` were computed; ``cached_prefill_tokens``
    were found in the engine's own prefix cache, of prompts that it computed itself.
    """

    running_requests: int = 0
    waiting_requests: int = 0
    deferred_requests: int = 0
    kv_usage_frac: float = 0.0
    output_tokens: int = 0
    prefill_tokens: int = 0
    cached_prefill_tokens: int = 0

    def report(self) -> dict[str, float]:
        """Gauges and counters by the names of ``autoscale.signals``."""
        return {
            "running_requests": float(self.running_requests),
            "waiting_requests": float(self.waiting_requests),
            "deferred_requests": float(self.deferred_requests),
            "kv_usage_frac": self.kv_usage_frac,
            "decode_tokens": float(self.output_tokens),
            "prefill_tokens": float(self.prefill_tokens),
            "cached_prefill_tokens": float(self.cached_prefill_tokens),
        }


class EngineStatsLogger(StatLoggerBase):
    """vLLM stat logger (entry point ``vllm.stat_logger_plugins``): keeps each engine step in ``load``."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self.load = EngineLoad()
        self.on_step: Callable[[], None] | None = None
        self.max_running_requests: int = vllm_config.scheduler_config.max_num_seqs
        self._cache_config = vllm_config.cache_config
        _ENGINES[engine_index] = self

    @property
    def block_tokens(self) -> int:
        """Tokens per KV block."""
        return int(self._cache_config.block_size)

    @property
    def prefix_cache_blocks(self) -> int:
        """KV blocks that may hold prefixes for reuse; 0 where the engine reuses none."""
        return int(self._cache_config.num_gpu_blocks or 0) if self._cache_config.enable_prefix_caching else 0

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Called by vLLM after every engine step; kept cheap."""
        if scheduler_stats is not None:
            self.load.running_requests = scheduler_stats.num_running_reqs
            self.load.waiting_requests = scheduler_stats.num_waiting_reqs
            self.load.deferred_requests = scheduler_stats.num_skipped_waiting_reqs
            self.load.kv_usage_frac = scheduler_stats.kv_cache_usage
        if iteration_stats is not None:
            self.load.output_tokens += iteration_stats.num_generation_tokens
            prompts = iteration_stats.prompt_token_stats
            self.load.prefill_tokens += prompts.computed
            if not prompts.external_kv_transfer:  # what another engine has computed was no work that this one saved
                self.load.cached_prefill_tokens += prompts.local_cache_hit
        if self.on_step is not None:
            self.on_step()

    def log_engine_initialized(self) -> None:
        """Nothing to say; required by the base class."""


def register_engine(stats: Any, engine_index: int = 0) -> None:
    """Make an engine that vLLM does not know of the one of this process."""
    _ENGINES[engine_index] = stats


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
