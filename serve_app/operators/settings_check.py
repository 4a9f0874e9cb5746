"""Settings judged by the simulator on the same trace: the whole choice, and each setting by the run without it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoscale.engines.profile import EngineProfile
from autoscale.operators.engine_profile import MemoryShortageError
from autoscale.operators.pair_load import PairLoad
from autoscale.operators.pair_prediction import predict
from autoscale.operators.pair_search import neighbours
from autoscale.operators.pool_pair import Effect, LengthRule, Objectives, PoolPair
from autoscale.operators.step_times import EngineSettings, ParallelSizeError
from autoscale.report import Slo
from autoscale.sim.config import SimConfig
from autoscale.sim.scenario import Run, run_schedule, scenario_of
from autoscale.traces.trace import TraceRequest
from autoscale.types import PoolKey
from kvtransfer.topology import Role
from router.config import RouterConfig
from serve_app.operators.settings_config import RoleState, Setting, with_settings

# Start of the trace in which engines fill up, seconds: nothing is measured there. At most a fifth of the trace.
_WARM_UP_S = 60.0
# Two runs are alike if their shares of requests differ by less than this ...
_SAME_SHARE = 0.002
# ... and the sum of both 90th percentiles, each as a share of its objective, by less than this share.
_SAME_LATENCY = 0.02
# Most replicas that are added or removed because the simulator shows another size than the prediction.
_MOST_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """The predicted and the simulated effect of one choice."""

    predicted: Effect
    simulated: Effect


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A setting, and what happens without it; ``None``: the rest cannot run without it.

    ``verdict``: 1 the simulator shows that it helps, 0 no difference, -1 it harms.
    """

    setting: Setting
    without: Compared | None
    verdict: int


class SettingsCheck:
    """Predictions and simulations of both roles on one trace."""

    def __init__(
        self,
        profile: Callable[[EngineSettings], EngineProfile],
        trace: Sequence[TraceRequest],
        router: RouterConfig,
        objectives: Objectives,
    ) -> None:
        self._profile, self._trace, self._router, self.objectives = profile, trace, router, objectives
        self._warm_up_s = min(_WARM_UP_S, trace[-1].at_s / 5.0)
        self.load = PairLoad.of_requests([request for request in trace if request.at_s >= self._warm_up_s])
        self.requests_per_s = PairLoad.of_requests(trace).requests_per_s
        self.rule = LengthRule(**router.length.model_dump())
        self._runs: dict[tuple[tuple[Role, RoleState], ...], Run] = {}

    def pair(self, states: Mapping[Role, RoleState]) -> PoolPair:
        """Both pools with the profiles of their engines.

        Raises:
            ParallelSizeError, MemoryShortageError: the model does not fit.
        """
        prefill, decode = states[Role.PREFILL], states[Role.DECODE]
        return PoolPair(
            prefill=self._profile(prefill.engine),
            decode=self._profile(decode.engine),
            prefill_replicas=prefill.replicas,
            decode_replicas=decode.replicas,
        )

    def compared(self, states: Mapping[Role, RoleState]) -> Compared:
        """The prediction and the simulation of both roles; raises as ``pair``."""
        pair = self.pair(states)
        predicted = predict(pair, self.load, self.rule, self.objectives)
        return Compared(predicted=predicted, simulated=self._effect(self._run(states), pair.gpus))

    def refined(self, states: Mapping[Role, RoleState], most_gpus: int | None) -> dict[Role, RoleState]:
        """The counts of the prediction, a few replicas larger or smaller where the simulator shows other needs."""
        found = dict(states)
        for _ in range(_MOST_STEPS):
            run = self._run(found)
            if self._is_enough(run):
                break
            role = self._scarce_role(run)
            grown = {**found, role: replace(found[role], replicas=found[role].replicas + 1)}
            if most_gpus is not None and self.pair(grown).gpus > most_gpus:
                break
            found = grown
        for _ in range(_MOST_STEPS if self._is_enough(self._run(found)) else 0):
            pairs = sorted(neighbours(self.pair(found), -1), key=lambda each: each.gpus)
            smaller = (self._with_counts(found, each) for each in pairs)
            enough = next((each for each in smaller if self._is_enough(self._run(each))), None)
            if enough is None:
                break
            found = enough
        return found

    def judged(self, before: Mapping[Role, RoleState], settings: Sequence[Setting]) -> list[Judged]:
        """Each setting by the run that has all others."""
        whole = self.compared(with_settings(before, settings)).simulated
        found = []
        for setting in settings:
            others = [each for each in settings if each is not setting]
            states = with_settings(before, others)
            if not _can_run(states):
                found.append(Judged(setting=setting, without=None, verdict=1))
                continue
            try:
                without = self.compared(states)
            except (ParallelSizeError, MemoryShortageError, ValueError):
                found.append(Judged(setting=setting, without=None, verdict=1))
                continue
            found.append(Judged(setting=setting, without=without, verdict=self.verdict(whole, without.simulated)))
        return found

    def verdict(self, one: Effect, other: Effect) -> int:
        """1: the first effect is better, -1: the second, 0: they are alike.

        Enough requests within the objectives come first, then GPUs, then latency. Below enough, the share decides.
        """
        least = self.objectives.attained_frac
        is_enough = one.attained_frac >= least, other.attained_frac >= least
        if is_enough[0] != is_enough[1]:
            return 1 if is_enough[0] else -1
        if not is_enough[0] and abs(one.attained_frac - other.attained_frac) >= _SAME_SHARE:
            return 1 if one.attained_frac > other.attained_frac else -1
        if one.gpus != other.gpus:
            return 1 if one.gpus < other.gpus else -1
        latency, other_latency = self._latency(one), self._latency(other)
        if abs(latency - other_latency) < _SAME_LATENCY * max(latency, other_latency):
            return 0
        return 1 if latency < other_latency else -1

    def _latency(self, effect: Effect) -> float:
        return effect.ttft_p90_s / self.objectives.ttft_s + effect.tpot_p90_s / self.objectives.tpot_s

    def _run(self, states: Mapping[Role, RoleState]) -> Run:
        key = tuple(sorted(states.items()))
        if key not in self._runs:
            self._runs[key] = self._simulated(self.pair(states))
        return self._runs[key]

    def _simulated(self, pair: PoolPair) -> Run:
        engines = {Role.PREFILL: pair.prefill, Role.DECODE: pair.decode}
        counts = {Role.PREFILL: pair.prefill_replicas, Role.DECODE: pair.decode_replicas}
        pools = {str(role): {"profile": profile} for role, profile in engines.items()}
        config = SimConfig.model_validate({"groups": [pools], "router": self._router, "warm_up_s": self._warm_up_s})
        scenario = scenario_of(config, self._trace)
        slo = Slo(ttft_s=self.objectives.ttft_s, tpot_s=self.objectives.tpot_s)
        scenario = replace(scenario, slos=[slo] * len(scenario.trace))
        return run_schedule(scenario, {PoolKey("g0", role): [(0.0, count)] for role, count in counts.items()})

    def _effect(self, run: Run, gpus: int) -> Effect:
        ttfts = [record.ttft_s for record in run.measured if record.ttft_s is not None]
        tpots = [record.tpot_s for record in run.measured if record.tpot_s is not None]
        return Effect(
            gpus=gpus,
            ttft_p90_s=float(np.quantile(ttfts, 0.9)) if ttfts else float("inf"),
            tpot_p90_s=float(np.quantile(tpots, 0.9)) if tpots else 0.0,
            attained_frac=run.attainment_frac,
        )

    def _is_enough(self, run: Run) -> bool:
        return run.attainment_frac >= self.objectives.attained_frac

    def _scarce_role(self, run: Run) -> Role:
        """Decode if more requests miss the TPOT objective than the TTFT objective."""
        late = sum(each.ttft_s is None or each.ttft_s > self.objectives.ttft_s for each in run.measured)
        slow = sum((each.tpot_s or 0.0) > self.objectives.tpot_s for each in run.measured)
        return Role.DECODE if slow > late else Role.PREFILL

    def _with_counts(self, states: Mapping[Role, RoleState], pair: PoolPair) -> dict[Role, RoleState]:
        counts = {Role.PREFILL: pair.prefill_replicas, Role.DECODE: pair.decode_replicas}
        return {role: replace(state, replicas=counts[role]) for role, state in states.items()}


def _can_run(states: Mapping[Role, RoleState]) -> bool:
    """vLLM refuses steps with less room than a token of each request, and NIXL links sizes that divide each other."""
    if any(each.engine.max_batch_tokens < each.engine.max_running for each in states.values()):
        return False
    one, other = (each.engine.parallel for each in states.values())
    return max(one, other) % min(one, other) == 0
