"""What load adds to the times of an application that does nothing else, fitted to replays of a trace.

An application that has been idle, or is busy with others, takes longer than one that is asked again and again: where
engines, proxies and clients share a few cores, by a half. And such a machine is not always as fast: the same request of
the same trace takes a third longer in one replay than in the next.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from autoscale.profile import EngineProfile
from autoscale.sim.host import Host
from autoscale.sim.static import replay
from autoscale.trace import TraceRequest
from kvtransfer.topology import Role
from router.config import RouterConfig
from serve_app.served_profile import LOCAL_TOKENS, Records

# Where simulated and real times are compared.
_QUANTILES = np.linspace(0.1, 0.95, 18)
# Of each range, how far the first tries go, how near its ends an edge is; and how many tries there are.
_FIRST_STEP, _EDGE_FRAC, _MOST_TRIES = 0.25, 0.01, 300
# A prompt's chunk takes some time even where all that was measured is the way to the engine.
_LEAST_S = 1e-4
# Simulated machines swing too: each fit is judged by so many of them.
_SEEDS = (0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What load adds to a served profile.

    ``front_s``: of each time to first token, what passes outside engines, who can do something else meanwhile.
    ``wake_s``: more of each step with prompts, since processes that have slept take time.
    ``handoff_s``: more of each handoff.
    ``step_frac``: steps as shares of the profile's, and ``stream_s``: more of a step for each request but the first.
    ``prefill_contention_frac``, ``decode_contention_frac``, ``swing_frac``, ``swing_s``: see ``Host``.
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
        """The profile of the engines alone, slower as they are under load; all but the host and the way to them."""
        decode, handoff, prefill = profile.decode, profile.handoff, profile.prefill
        more_s = self.stream_s * (np.array(decode.batch) - 1)
        rows = np.array(decode.step_s) * self.step_frac + more_s[:, None]
        seconds = (max(_LEAST_S, each - self.front_s + self.wake_s) for each in prefill.seconds)
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
        """What it foretells of a trace on one replica of each role, on a machine that swings as the seed says."""
        profiles = dict.fromkeys(Role, self.applied_to(profile))
        records = replay(trace, dict.fromkeys(Role, 1), profiles, router, seed=seed, host=self.host)
        # As long for everybody, so that nobody overtakes: the way there can be added at the end.
        return [
            replace(
                each,
                first_token_s=_later(each.first_token_s, self.front_s),
                last_token_s=_later(each.last_token_s, self.front_s),
            )
            for each in records
        ]


# Between which values each is looked for.
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
    profile: EngineProfile, loads: Sequence[tuple[Sequence[TraceRequest], Sequence[Records]]], router: RouterConfig
) -> Fit:
    """What load adds, by which the quantiles of simulated replays come nearest to the real ones'.

    Args:
        profile: as served.
        loads: traces, and how their requests fared on one replica of each role, each time that they were replayed.
        router: the application's.
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
        options={"maxfev": _MOST_TRIES, "initial_simplex": np.vstack([start, start + steps])},
    )
    return _fit(low + found.x * (high - low))


def at_the_edge(fit: Fit) -> list[str]:
    """What might lie beyond the values that were tried; less than nothing is not there, so 0 is no edge."""
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
    """Of TTFT, of prompts computed where they decode and of others, and of TPOT; logarithms: errors are shares."""
    near, far, steps = list[float](), list[float](), list[float]()
    for record in (each for each in records if each.error is None):
        if record.ttft_s:
            (near if record.input_tokens <= LOCAL_TOKENS[-1] else far).append(record.ttft_s)
        if record.tpot_s:
            steps.append(record.tpot_s)
    return np.asarray(np.log(np.concatenate([np.quantile(each, _QUANTILES) for each in (near, far, steps) if each])))
