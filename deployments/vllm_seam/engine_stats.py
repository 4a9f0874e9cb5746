"""The load of this process's engine after its last step, and its totals, from vLLM's statistics objects."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

# Registry: the statistics logger of this process's engine. vLLM builds it, and returns it to no caller.
_LOGGERS: list["EngineStatsLogger"] = []


@dataclass(slots=True)
class EngineLoad:
    """Load of one engine: the first four fields are values after its last step, the others totals since its start."""

    running_requests: int = 0  # requests in the batch
    waiting_requests: int = 0  # requests in the engine's queue
    deferred_requests: int = 0  # requests that wait for KV from another engine
    kv_usage_frac: float = 0.0  # share of the KV blocks in use, 0..1
    decode_tokens: int = 0  # tokens generated since the start
    prefill_tokens: int = 0  # prompt tokens computed since the start
    cached_prefill_tokens: int = 0  # prefix cache hits since the start, in tokens of prompts without KV from prefill
    pulled_bytes: float = 0.0  # KV pulled from prefill since the start
    pull_s: float = 0.0  # sum of the times of these transfers
    decode_steps: int = 0  # steps in which no prompt was computed
    decode_steps_s: float = 0.0  # sum of their durations
    decode_steps_requests: int = 0  # sum of their batches
    decode_steps_kv_tokens: float = 0.0  # sum of the tokens of KV in use


class EngineStatsLogger(StatLoggerBase):
    """A vLLM statistics logger that writes each step's figures into ``load``.

    Needs: the entry point ``vllm.stat_logger_plugins``; ``vllm.v1.metrics.loggers.StatLoggerBase``; what ``record``
    reads of ``SchedulerStats``, ``IterationStats``, ``PromptTokenStats`` and ``NixlKVConnectorStats.data``.
    Without it: no replica starts (``engine_stats`` raises), since neither routing nor autoscaling would see the engine.
    """

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self.load = EngineLoad()
        self.on_step: Callable[[], None] | None = None  # called after every step
        self.max_running_requests: int = vllm_config.scheduler_config.max_num_seqs
        self._cache_config = vllm_config.cache_config
        self._workers: int = vllm_config.parallel_config.world_size
        register_engine(self)

    @property
    def block_tokens(self) -> int:
        """Tokens per KV block."""
        return int(self._cache_config.block_size)

    @property
    def kv_tokens(self) -> int:
        """Tokens of KV that the engine can keep; 0: not known yet."""
        return int(self._cache_config.num_gpu_blocks or 0) * self.block_tokens

    @property
    def prefix_cache_blocks(self) -> int:
        """KV blocks that may hold prefixes for reuse; 0 if the engine reuses none."""
        return int(self._cache_config.num_gpu_blocks or 0) if self._cache_config.enable_prefix_caching else 0

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Add the figures of one step. vLLM calls this after every step, so it must be cheap."""
        if scheduler_stats is not None:
            self.load.running_requests = scheduler_stats.num_running_reqs
            self.load.waiting_requests = scheduler_stats.num_waiting_reqs
            self.load.deferred_requests = scheduler_stats.num_skipped_waiting_reqs
            self.load.kv_usage_frac = scheduler_stats.kv_cache_usage
            if pulls := scheduler_stats.kv_connector_stats:  # most steps have none
                self.load.pulled_bytes += sum(pulls.get("bytes_transferred", ()))
                # Each worker reports its own part of a pull, and the parts are transferred at the same time.
                self.load.pull_s += sum(pulls.get("transfer_duration", ())) / self._workers
        if iteration_stats is not None:
            self.load.decode_tokens += iteration_stats.num_generation_tokens
            prompts = iteration_stats.prompt_token_stats
            self.load.prefill_tokens += prompts.computed
            gaps_s = iteration_stats.inter_token_latencies_iter
            if gaps_s and not prompts.computed:
                self._add_step(min(gaps_s), len(gaps_s))  # a request that waited longer has a longer gap
            if not prompts.external_kv_transfer:  # if prefill computes the prompt, a cache hit saves no work here
                self.load.cached_prefill_tokens += prompts.local_cache_hit
        if self.on_step is not None:
            self.on_step()

    def _add_step(self, seconds: float, requests: int) -> None:
        """Add a step without prompts."""
        load, cache = self.load, self._cache_config
        load.decode_steps += 1
        load.decode_steps_s += seconds
        load.decode_steps_requests += requests
        load.decode_steps_kv_tokens += load.kv_usage_frac * (cache.num_gpu_blocks or 0) * cache.block_size

    def log_engine_initialized(self) -> None:
        """Log nothing; the base class requires this method."""


def register_engine(stats: Any) -> None:
    """Register the statistics of this process's engine."""
    _LOGGERS[:] = [stats]


def engine_stats() -> EngineStatsLogger:
    """The statistics of this process's engine. Raises RuntimeError: no engine, or vLLM did not load the plugin."""
    if not _LOGGERS:
        raise RuntimeError(
            "no engine stats in this process: vLLM did not load the 'tandem' entry point of "
            "'vllm.stat_logger_plugins'; install the package in the environment of the Serve replicas "
            "(pip install -e .)"
        )
    return _LOGGERS[0]
