"""The time that load adds to requests of an idle application, fitted to replays of a trace.

An application that was idle, or that serves other requests, takes longer than one that gets requests one after the
other: by a half if engines, proxies and clients share a few cores. The speed of such a machine also varies: the same
request of the same trace takes a third longer in one replay than in the next.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from autoscale.engines.profile import EngineProfile
from autoscale.traces.trace import TraceRequest
from autoscale.types import PoolKey
from kvtransfer.topology import Role
from router.config import RouterConfig
from tests.lab.stand.shared_host import Host, SharedCluster
from tests.lab.truth.served_profile import LOCAL_TOKENS, Records

# Quantiles at which simulated and real times are compared.
_QUANTILES = np.linspace(0.1, 0.95, 18)
# The first tries go this share of each range away from the start.
_FIRST_STEP = 0.25
# A value this near an end of its range, as a share of the range, is at its edge.
_EDGE_FRAC = 0.01
# Least time of a prompt's chunk, in seconds, if all of the measured time passes on the way to the engine.
_MIN_S = 1e-4
# Seeds of the simulated machines, whose speed varies too; a fit is judged by their mean.
_SEEDS = (0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """The times that load adds to a served profile.

    Attributes:
        front_s: part of each time to first token that passes outside engines, which can work meanwhile.
        wake_s: added to each step with prompts: processes that slept need time.
        handoff_s: added to each handoff.
        step_frac: length of steps, as a share of the profile's.
        stream_s: added to a step for each request but the first.
        prefill_contention_frac: see ``Host``; so are ``decode_contention_frac``, ``swing_frac`` and ``swing_s``.
    """

    prefill_contention_frac: float = 1.5
    decode_contention_frac: float = 0.3
    wake_s: float = 0.006
    step_frac: float = 1.2
    stream_s: float = 0.0004
    handoff_s: float = 0.0
    front_s: float = 0.008
    swing_frac: float = 0.2
    swing_s: float = 0.5

    @property
    def host(self) -> Host:
        """The machine that engines share."""
        contention_frac = {Role.PREFILL: self.prefill_contention_frac, Role.DECODE: self.decode_contention_frac}
        return Host(contention_frac=contention_frac, swing_frac=self.swing_frac, swing_s=self.swing_s)

    def applied_to(self, profile: EngineProfile) -> EngineProfile:
        """The profile of the engines under load, without the host and the time outside engines."""
        decode, handoff, prefill = profile.decode, profile.handoff, profile.prefill
        more_s = self.stream_s * (np.array(decode.batch) - 1)
        rows = np.array(decode.step_s) * self.step_frac + more_s[:, None]
        seconds = (max(_MIN_S, each - self.front_s + self.wake_s) for each in prefill.seconds)
        return profile.model_copy(
            update={
                "prefill": prefill.model_copy(update={"seconds": tuple(accumulate(seconds, max))}),
                "decode": decode.model_copy(update={"step_s": tuple(tuple(map(float, row)) for row in rows)}),
                "handoff": handoff.model_copy(update={"base_s": max(0.0, handoff.base_s + self.handoff_s)}),
            }
        )

    def simulated(
        self, profile: EngineProfile, trace: Sequence[TraceRequest], router: RouterConfig, seed: int = 0
    ) -> Records:
        """Simulate a trace on one replica of each role, on a machine whose speed varies by the seed."""
        counts = {PoolKey("g0", role): 1 for role in Role}
        cluster = SharedCluster(dict.fromkeys(counts, self.applied_to(profile)), router, random.Random(seed), self.host)
        records = cluster.replay(trace, counts)
        # The same for every request, so their order stays and the time can be added at the end.
        return [
            replace(
                each,
                first_token_s=_later(each.first_token_s, self.front_s),
                last_token_s=_later(each.last_token_s, self.front_s),
            )
            for each in records
        ]


# Range of each value of the fit.
_RANGES = {
    "prefill_contention_frac": (0.0, 3.0),
    "decode_contention_frac": (0.0, 1.0),
    "wake_s": (0.0, 0.03),
    "step_frac": (0.6, 2.0),
    "stream_s": (0.0, 0.002),
    "handoff_s": (-0.03, 0.03),
    "front_s": (0.0, 0.02),
    "swing_frac": (0.0, 0.6),
    "swing_s": (0.02, 3.0),
}


def fitted(
    profile: EngineProfile,
    loads: Sequence[tuple[Sequence[TraceRequest], Sequence[Records]]],
    router: RouterConfig,
    *,
    tries: int = 300,
) -> Fit:
    """The fit whose simulated replays have the quantiles nearest to those of real ones.

    Args:
        profile: the served profile.
        loads: traces, each with the records of its replays on one replica of each role.
        router: configuration of the application's router.
        tries: simulations of the whole load, at the most.
    """
    real = [np.median([_quantiles(records) for records in replays], axis=0) for _, replays in loads]

    def error(fit: Fit) -> float:
        simulated = (
            np.mean([_quantiles(fit.simulated(profile, trace, router, seed)) for seed in _SEEDS], axis=0)
            for trace, _ in loads
        )
        return float(np.mean([np.abs(s - r).mean() for s, r in zip(simulated, real, strict=True)]))

    low, high = np.array(list(_RANGES.values())).T
    start = (np.array([getattr(Fit(), name) for name in _RANGES]) - low) / (high - low)
    steps = np.diag(np.where(start < 0.5, _FIRST_STEP, -_FIRST_STEP))
    found = minimize(
        lambda shares: error(_fit(low + shares * (high - low))),
        start,
        method="Nelder-Mead",  # the error has corners: quantiles are of whole requests
        bounds=[(0.0, 1.0)] * len(start),
        options={"maxfev": tries, "initial_simplex": np.vstack([start, start + steps])},
    )
    return _fit(low + found.x * (high - low))


def at_the_edge(fit: Fit) -> list[str]:
    """Names of the values at an edge of their range, where the best value may lie beyond; 0 is no edge."""
    return [
        name
        for name, (low, high) in _RANGES.items()
        if getattr(fit, name) > high - _EDGE_FRAC * (high - low)
        or (low and getattr(fit, name) < low + _EDGE_FRAC * (high - low))
    ]


def _fit(values: NDArray[np.float64]) -> Fit:
    return Fit(**dict(zip(_RANGES, map(float, values), strict=True)))


def _later(at_s: float | None, by_s: float) -> float | None:
    return None if at_s is None else at_s + by_s


def _quantiles(records: Records) -> NDArray[np.float64]:
    """Logarithms of quantiles (so errors are shares) of TTFT for local and for remote prompts, and of TPOT."""
    near, far, steps = list[float](), list[float](), list[float]()
    for record in (each for each in records if each.error is None):
        if record.ttft_s:
            (near if record.input_tokens <= LOCAL_TOKENS[-1] else far).append(record.ttft_s)
        if record.tpot_s:
            steps.append(record.tpot_s)
    return np.asarray(np.log(np.concatenate([np.quantile(each, _QUANTILES) for each in (near, far, steps) if each])))
