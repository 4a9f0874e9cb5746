"""Settings of the engines of each role, from the times of operators: how many tokens and requests a step takes (pure).

Each setting is a trade: more tokens in a step use the GPU better, and make other requests wait for longer.
"""

from dataclasses import dataclass, replace

from autoscale.engines.capacity import Limit, decode_limit
from autoscale.engines.profile import EngineProfile
from autoscale.operators.engine_profile import engine_profile
from autoscale.operators.graph import OperatorGraph
from autoscale.operators.kinds import Pass
from autoscale.operators.pair_load import PairLoad
from autoscale.operators.step_times import EngineSettings, StepTimes
from autoscale.operators.times import OperatorTimes

# Sizes of a step that are compared, tokens.
_STEP_TOKENS = (512, 1024, 2048, 4096, 8192, 16_384)
# Share of the best rate of prompt tokens that is enough: more tokens than that only make prompts wait for each other.
_ENOUGH_FRAC = 0.97
# Batches of CUDA graphs, up to 256, are multiples of this (vLLM's capture sizes).
_GRAPH_BATCH = 8
# Most requests in a batch that are looked at: vLLM's default on large GPUs.
_MOST_RUNNING = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The engine of a role, and why its step has these sizes."""

    settings: EngineSettings
    profile: EngineProfile
    tokens_reason: str
    requests_reason: str


class RoleEngines:
    """Engines of both roles for one model, GPU type and load."""

    def __init__(self, model: str, graph: OperatorGraph, times: OperatorTimes, load: PairLoad, tpot_s: float) -> None:
        self.graph, self.times = graph, times
        self._model, self._load, self._tpot_s = model, load, tpot_s
        self._profiles: dict[EngineSettings, EngineProfile] = {}

    def profile(self, settings: EngineSettings) -> EngineProfile:
        """The profile of an engine.

        Raises:
            ParallelSizeError, MemoryShortageError: as ``engine_profile``.
        """
        if settings not in self._profiles:
            sizes = f"{settings.max_batch_tokens}-tokens-{settings.max_running}-requests"
            name = f"{self.times.gpu.name}-tp{settings.parallel}-{sizes}"
            self._profiles[settings] = engine_profile(name, self._model, self.graph, self.times, settings)
        return self._profiles[settings]

    def prefill(self, base: EngineSettings) -> Chosen:
        """The prefill engine of this size: the smallest step that computes prompts nearly as fast as the best one."""
        steps, length = StepTimes(self.graph, self.times, base), max(1, round(self._load.lengths.input_tokens))
        rates = {}
        for tokens in _STEP_TOKENS:
            prompts = max(1, tokens // length)
            each = min(length, tokens)
            rates[tokens] = prompts * each / steps.seconds(Pass(prompts=prompts, new_tokens=each))
        best = max(rates.values())
        tokens = next(size for size in _STEP_TOKENS if rates[size] >= _ENOUGH_FRAC * best)
        short = max(1.0, self._load.input_quantile(0.1))
        running = _up_to_graph(max(1, int(tokens / short)))
        settings = replace(base, max_batch_tokens=tokens, max_running=running)
        return Chosen(
            settings=settings,
            profile=self.profile(settings),
            tokens_reason=f"a step of {tokens} tokens reaches {rates[tokens] / best:.0%} of the best rate; in a larger "
            "one prompts wait for each other",
            requests_reason=f"{running} short prompts ({short:.0f} tokens) fill a step of {tokens} tokens",
        )

    def decode(self, base: EngineSettings) -> Chosen:
        """The decode engine of this size: as many requests as TPOT and KV allow, and prompts that stall none."""
        context = self._load.lengths.context_tokens
        wide = self.profile(replace(base, max_running=_MOST_RUNNING))
        most, limit = decode_limit(wide, context, self._tpot_s)
        running = min(_MOST_RUNNING, max(1, most // _GRAPH_BATCH * _GRAPH_BATCH or most))
        step_s = wide.decode.seconds_for(running, context)
        tokens, stall_s = self._local_step(base, running, context)
        settings = replace(base, max_batch_tokens=tokens, max_running=running)
        why = {
            Limit.TPOT: f"a step of {running} requests takes {step_s * 1e3:.1f} ms, and more would exceed the TPOT",
            Limit.KV_MEMORY: f"KV has room for {most} requests of {context:.0f} tokens; more would be preempted",
        }
        return Chosen(
            settings=settings,
            profile=self.profile(settings),
            tokens_reason=f"a step of half a batch with {tokens} prompt tokens takes {stall_s * 1e3:.1f} ms; TPOT "
            f"allows {self._tpot_s * 1e3:g} ms",
            requests_reason=why.get(limit, f"a step of {running} requests takes {step_s * 1e3:.1f} ms"),
        )

    def _local_step(self, base: EngineSettings, running: int, context: float) -> tuple[int, float]:
        """The largest step with prompts that keeps TPOT beside half a batch, and its seconds.

        Where none does, the step stays as it is: prompts are rare on decode, so single long steps matter less than the
        many steps that small pieces of a prompt take.
        """
        steps, batch = StepTimes(self.graph, self.times, base), max(1, running // 2)
        # vLLM refuses a step that has less room than one token of each request.
        sizes = [tokens for tokens in _STEP_TOKENS if tokens >= running]

        def seconds(tokens: int) -> float:
            return steps.seconds(
                Pass(prompts=1, new_tokens=tokens, decoding=batch, context_tokens=max(1, round(context)))
            )

        fit = [tokens for tokens in sizes if seconds(tokens) <= self._tpot_s]
        tokens = max(fit, default=max(base.max_batch_tokens, running))
        return tokens, seconds(tokens)


def _up_to_graph(requests: int) -> int:
    return -(-requests // _GRAPH_BATCH) * _GRAPH_BATCH
