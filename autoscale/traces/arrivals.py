"""The arrivals of a synthetic trace: a rate over time, and a random process with that rate (pure)."""

from typing import Annotated, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from kvtransfer.strict_config import StrictConfig

Floats = NDArray[np.float64]
PerSecond = Annotated[float, Field(ge=0.0)]


class _Rate(StrictConfig):
    def at(self, at_s: Floats, duration_s: float) -> tuple[Floats, float]:
        """Requests per second at each time ``at_s`` of a trace of this duration, and an upper bound of all rates."""
        return self._at(at_s, duration_s)

    def bound(self, duration_s: float) -> float:
        """An upper bound of all rates in a trace of this duration, requests per second."""
        return self._at(np.zeros(1), duration_s)[1]

    def _at(self, at_s: Floats, duration_s: float) -> tuple[Floats, float]:
        raise NotImplementedError


class ConstantRateConfig(_Rate):
    """The same rate all the time."""

    kind: Literal["constant"] = "constant"
    requests_per_s: PerSecond

    def _at(self, at_s: Floats, duration_s: float) -> tuple[Floats, float]:
        return np.full_like(at_s, self.requests_per_s), self.requests_per_s


class RampRateConfig(_Rate):
    """A rate on a straight line from the start of the trace to its end."""

    kind: Literal["ramp"] = "ramp"
    first_requests_per_s: PerSecond
    last_requests_per_s: PerSecond

    def _at(self, at_s: Floats, duration_s: float) -> tuple[Floats, float]:
        ends = (self.first_requests_per_s, self.last_requests_per_s)
        return np.interp(at_s, (0.0, duration_s), ends), max(ends)


class StairsRateConfig(_Rate):
    """One rate after another, each for the same time."""

    kind: Literal["stairs"] = "stairs"
    stairs_requests_per_s: tuple[PerSecond, ...] = Field(min_length=1)
    stair_s: float | None = Field(
        None, gt=0.0, description="Time of each stair, seconds; the last one stays. Left out: all have equal times."
    )

    def _at(self, at_s: Floats, duration_s: float) -> tuple[Floats, float]:
        stairs = np.asarray(self.stairs_requests_per_s)
        index = np.minimum(at_s // (self.stair_s or duration_s / len(stairs)), len(stairs) - 1)
        return stairs[index.astype(int)], max(self.stairs_requests_per_s)


class SpikesRateConfig(_Rate):
    """A base rate, and another rate in spikes at regular intervals."""

    kind: Literal["spikes"] = "spikes"
    base_requests_per_s: PerSecond
    spike_requests_per_s: PerSecond
    spike_s: float = Field(gt=0.0, description="Length of a spike, seconds.")
    every_s: float = Field(gt=0.0, description="Time from the start of a spike to the start of the next, seconds.")
    first_s: float = Field(0.0, ge=0.0, description="Start of the first spike, seconds.")

    @model_validator(mode="after")
    def _check_distance(self) -> Self:
        if self.spike_s >= self.every_s:
            raise ValueError(f"spike_s ({self.spike_s:g}) is not less than every_s ({self.every_s:g})")
        return self

    def _at(self, at_s: Floats, duration_s: float) -> tuple[Floats, float]:
        is_spike = (at_s >= self.first_s) & ((at_s - self.first_s) % self.every_s < self.spike_s)
        spike, base = self.spike_requests_per_s, self.base_requests_per_s
        return np.where(is_spike, spike, base), max(spike, base)


class SineRateConfig(_Rate):
    """A sine around a mean rate: the simplest daily curve."""

    kind: Literal["sine"] = "sine"
    mean_requests_per_s: PerSecond
    amplitude_frac: float = Field(
        ge=0.0, le=1.0, description="Height of the peak above the mean, as a share of the mean."
    )
    period_s: float = Field(86_400.0, gt=0.0)
    peak_s: float | None = Field(
        None, description="Time of the peak, seconds; left out: a quarter of the period, so that the mean is at 0 s."
    )

    def _at(self, at_s: Floats, duration_s: float) -> tuple[Floats, float]:
        peak_s = self.period_s / 4.0 if self.peak_s is None else self.peak_s
        waves = self.amplitude_frac * np.cos(2.0 * np.pi * (at_s - peak_s) / self.period_s)
        return self.mean_requests_per_s * (1.0 + waves), self.mean_requests_per_s * (1.0 + self.amplitude_frac)


class CurveRateConfig(_Rate):
    """Straight lines between rates at equal intervals, repeated: for example a day, from the rates of its 24 hours."""

    kind: Literal["curve"] = "curve"
    points_requests_per_s: tuple[PerSecond, ...] = Field(
        min_length=2, description="Rates at equal intervals, the first at 0 s."
    )
    period_s: float = Field(86_400.0, gt=0.0, description="Time until the first point is repeated, seconds.")

    def _at(self, at_s: Floats, duration_s: float) -> tuple[Floats, float]:
        points = (*self.points_requests_per_s, self.points_requests_per_s[0])
        return np.interp(at_s % self.period_s, np.linspace(0.0, self.period_s, len(points)), points), max(points)


class _Arrivals(StrictConfig):
    rate: Annotated[
        ConstantRateConfig | RampRateConfig | StairsRateConfig | SpikesRateConfig | SineRateConfig | CurveRateConfig,
        Field(discriminator="kind"),
    ]

    def draws(self, duration_s: float) -> float:
        """Mean number of arrivals that a sample draws before thinning (see ``_thinned``)."""
        return self.rate.bound(duration_s) * duration_s

    def sample(self, duration_s: float, rng: np.random.Generator) -> Floats:
        """Arrivals in seconds, in order, from 0 to the duration, by thinning (Lewis & Shedler 1979, algorithm 1)."""
        return self._thinned(duration_s, rng, np.zeros(1), np.ones(1))

    def _thinned(self, duration_s: float, rng: np.random.Generator, starts_s: Floats, factors: Floats) -> Floats:
        """Arrivals at the rate times a factor, in order.

        ``factors``: one factor after another; each holds from the time at its index in ``starts_s`` until the next one.
        Thinning draws arrivals at a constant rate, the bound. Each of them stays with the probability rate / bound.
        """
        bound = self.rate.bound(duration_s) * float(factors.max())
        at_s = np.sort(rng.uniform(0.0, duration_s, rng.poisson(bound * duration_s)))
        rates = self.rate.at(at_s, duration_s)[0] * factors[np.searchsorted(starts_s, at_s, side="right") - 1]
        arrivals: Floats = at_s[rng.uniform(0.0, bound, len(at_s)) < rates]
        return arrivals


class PoissonConfig(_Arrivals):
    """Requests arrive independently of each other."""

    kind: Literal["poisson"] = "poisson"


class MmppStateConfig(StrictConfig):
    """A hidden state of the load; the time that it lasts is exponentially distributed."""

    rate_factor: float = Field(ge=0.0, description="Multiplies the rate while the state lasts.")
    mean_sojourn_s: float = Field(gt=0.0, description="Mean time in the state, seconds.")


class MmppConfig(_Arrivals):
    """A Markov-modulated Poisson process: the rate changes with a hidden state, which makes bursts.

    After each state all other states are equally likely. The first state is drawn in proportion to the mean times, so
    that the process is stationary.
    """

    kind: Literal["mmpp"] = "mmpp"
    states: tuple[MmppStateConfig, ...] = Field(min_length=2)

    def draws(self, duration_s: float) -> float:
        """Mean number of arrivals that a sample draws before thinning, or of changes of state if these are more."""
        requests = super().draws(duration_s) * max(state.rate_factor for state in self.states)
        # All states are entered equally often, so a state lasts the mean of their mean times.
        changes = duration_s * len(self.states) / sum(state.mean_sojourn_s for state in self.states)
        return max(requests, changes)

    def sample(self, duration_s: float, rng: np.random.Generator) -> Floats:
        """Arrivals in seconds, in order, from 0 to the duration."""
        means_s = np.array([state.mean_sojourn_s for state in self.states])
        last, last_start_s = int(rng.choice(len(means_s), p=means_s / means_s.sum())), 0.0
        # Arrays with the indices of the states, one after another, and with the times at which the states begin. After
        # the first one, each array has 1024 states, which are drawn at once.
        indices, starts_s = [np.array([last])], [np.zeros(1)]
        while last_start_s < duration_s:
            # Each state is from 1 to n - 1 places further in a circle: each of the other states is equally likely.
            following = (last + np.cumsum(rng.integers(1, len(means_s), size=1024))) % len(means_s)
            # Each of these states begins when the state before it ends.
            sojourns_s = rng.exponential(means_s[np.append(last, following[:-1])])
            indices.append(following)
            starts_s.append(last_start_s + np.cumsum(sojourns_s))
            last, last_start_s = int(following[-1]), float(starts_s[-1][-1])
        factors = np.array([state.rate_factor for state in self.states])
        return self._thinned(duration_s, rng, np.concatenate(starts_s), factors[np.concatenate(indices)])
