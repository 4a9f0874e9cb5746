"""Synthetic traces: arrivals by a process and a rate that varies, lengths by a distribution or of another trace."""

import csv
import gzip
import io
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SkipValidation, ValidationError, model_validator

from autoscale.documents import load_mapping
from autoscale.trace import TraceRequest, load_trace

Floats = NDArray[np.float64]
PerSecond = Annotated[float, Field(ge=0.0)]

# Two numbers are drawn for each: 160 MB.
_MOST_REQUESTS = 10_000_000
# No prompt is longer; numbers of 64 bits are.
_MOST_TOKENS = 10_000_000
# What is outside the bounds of a length is drawn again: a hundred times for each inside, at most.
_LEAST_INSIDE_FRAC = 0.01
# pydantic names the member of a union after each of these.
_UNIONS = ("arrivals", "rate", "lengths", "input_tokens", "output_tokens")


class _Workload(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class _Rate(_Workload):
    def at(self, at_s: Floats, duration_s: float) -> tuple[Floats, float]:
        """Requests per second at some times, seconds, of a trace this long, and a bound of them at all times."""
        return self._at(at_s, duration_s)

    def _at(self, at_s: Floats, duration_s: float) -> tuple[Floats, float]:
        raise NotImplementedError


class ConstantRateConfig(_Rate):
    """The same rate all the time."""

    kind: Literal["constant"] = "constant"
    requests_per_s: PerSecond

    def _at(self, at_s: Floats, duration_s: float) -> tuple[Floats, float]:
        return np.full_like(at_s, self.requests_per_s), self.requests_per_s


class RampRateConfig(_Rate):
    """A straight line from the start of the trace to its end."""

    kind: Literal["ramp"] = "ramp"
    first_requests_per_s: PerSecond
    last_requests_per_s: PerSecond

    def _at(self, at_s: Floats, duration_s: float) -> tuple[Floats, float]:
        ends = (self.first_requests_per_s, self.last_requests_per_s)
        return np.interp(at_s, (0.0, duration_s), ends), max(ends)


class StairsRateConfig(_Rate):
    """One rate after the other, each for as long."""

    kind: Literal["stairs"] = "stairs"
    stairs_requests_per_s: tuple[PerSecond, ...] = Field(min_length=1)
    stair_s: float | None = Field(
        None, gt=0.0, description="How long one is, and the last stays; without it they share the trace."
    )

    def _at(self, at_s: Floats, duration_s: float) -> tuple[Floats, float]:
        stairs = np.asarray(self.stairs_requests_per_s)
        index = np.minimum(at_s // (self.stair_s or duration_s / len(stairs)), len(stairs) - 1)
        return stairs[index.astype(int)], max(self.stairs_requests_per_s)


class SpikesRateConfig(_Rate):
    """A rate, and another for short times at regular distances."""

    kind: Literal["spikes"] = "spikes"
    base_requests_per_s: PerSecond
    spike_requests_per_s: PerSecond
    spike_s: float = Field(gt=0.0, description="How long one lasts.")
    every_s: float = Field(gt=0.0, description="From the start of one to that of the next.")
    first_s: float = Field(0.0, ge=0.0, description="When the first starts.")

    @model_validator(mode="after")
    def _check_distance(self) -> Self:
        if self.spike_s >= self.every_s:
            raise ValueError(f"spike_s ({self.spike_s:g}) is not less than every_s ({self.every_s:g})")
        return self

    def _at(self, at_s: Floats, duration_s: float) -> tuple[Floats, float]:
        is_spike = (at_s >= self.first_s) & ((at_s - self.first_s) % self.every_s < self.spike_s)
        levels = (self.spike_requests_per_s, self.base_requests_per_s)
        return np.where(is_spike, *levels), max(levels)


class SineRateConfig(_Rate):
    """A sine around a mean: a day at its simplest."""

    kind: Literal["sine"] = "sine"
    mean_requests_per_s: PerSecond
    amplitude_frac: float = Field(ge=0.0, le=1.0, description="Of the mean: how far the peak is above it.")
    period_s: float = Field(86_400.0, gt=0.0)
    peak_s: float | None = Field(
        None, description="When it is highest; a quarter of the period: it starts at its mean."
    )

    def _at(self, at_s: Floats, duration_s: float) -> tuple[Floats, float]:
        peak_s = self.period_s / 4.0 if self.peak_s is None else self.peak_s
        waves = self.amplitude_frac * np.cos(2.0 * np.pi * (at_s - peak_s) / self.period_s)
        return self.mean_requests_per_s * (1.0 + waves), self.mean_requests_per_s * (1.0 + self.amplitude_frac)


class CurveRateConfig(_Rate):
    """Straight lines through rates at equal distances, again and again: a day from its 24 hours."""

    kind: Literal["curve"] = "curve"
    points_requests_per_s: tuple[PerSecond, ...] = Field(min_length=2, description="The first at 0 s.")
    period_s: float = Field(86_400.0, gt=0.0, description="From the first of them to the first again.")

    def _at(self, at_s: Floats, duration_s: float) -> tuple[Floats, float]:
        points = (*self.points_requests_per_s, self.points_requests_per_s[0])
        return np.interp(at_s % self.period_s, np.linspace(0.0, self.period_s, len(points)), points), max(points)


class _Arrivals(_Workload):
    rate: Annotated[
        ConstantRateConfig | RampRateConfig | StairsRateConfig | SpikesRateConfig | SineRateConfig | CurveRateConfig,
        Field(discriminator="kind"),
    ]

    def draws(self, duration_s: float) -> float:
        """About how many numbers a sample takes."""
        return self.rate.at(np.zeros(1), duration_s)[1] * duration_s

    def sample(self, duration_s: float, rng: np.random.Generator) -> Floats:
        """Arrivals in seconds, in order, from 0 to the duration, by thinning (Lewis & Shedler 1979, algorithm 1)."""
        return self._thinned(duration_s, rng, np.zeros(1), np.ones(1))

    def _thinned(self, duration_s: float, rng: np.random.Generator, starts_s: Floats, factors: Floats) -> Floats:
        """As many times the rate as the factor from each start on."""
        bound = self.rate.at(np.zeros(1), duration_s)[1] * float(factors.max())
        at_s = np.sort(rng.uniform(0.0, duration_s, rng.poisson(bound * duration_s)))
        rates = self.rate.at(at_s, duration_s)[0] * factors[np.searchsorted(starts_s, at_s, side="right") - 1]
        kept: Floats = at_s[rng.uniform(0.0, bound, len(at_s)) < rates]
        return kept


class PoissonConfig(_Arrivals):
    """Each request comes by itself."""

    kind: Literal["poisson"] = "poisson"


class MmppStateConfig(_Workload):
    """A state that all users are in together."""

    rate_factor: float = Field(ge=0.0, description="Multiplies the rate; where that is 1, it is the state's own.")
    mean_sojourn_s: float = Field(gt=0.0, description="How long it lasts on average; exponentially distributed.")


class MmppConfig(_Arrivals):
    """A Markov-modulated Poisson process: the rate jumps with a hidden state, so that requests clump.

    After a state every other is as likely; the first is drawn by how long each lasts, so that all times are alike.
    """

    kind: Literal["mmpp"] = "mmpp"
    states: tuple[MmppStateConfig, ...] = Field(min_length=2)

    def draws(self, duration_s: float) -> float:
        """About how many numbers a sample takes."""
        requests = super().draws(duration_s) * max(state.rate_factor for state in self.states)
        return max(requests, duration_s * len(self.states) / sum(state.mean_sojourn_s for state in self.states))

    def sample(self, duration_s: float, rng: np.random.Generator) -> Floats:
        """Arrivals in seconds, in order, from 0 to the duration."""
        means = np.array([state.mean_sojourn_s for state in self.states])
        state, end_s = int(rng.choice(len(means), p=means / means.sum())), 0.0
        starts_s, states = [np.zeros(1)], [np.array([state])]
        while end_s < duration_s:
            states.append((state + np.cumsum(rng.integers(1, len(means), size=1024))) % len(means))
            sojourns_s = rng.exponential(means[np.append(state, states[-1][:-1])])
            starts_s.append(end_s + np.cumsum(sojourns_s))
            state, end_s = int(states[-1][-1]), float(starts_s[-1][-1])
        factors = np.array([state.rate_factor for state in self.states])
        return self._thinned(duration_s, rng, np.concatenate(starts_s), factors[np.concatenate(states)])


class ConstantLengthConfig(_Workload):
    """Always the same."""

    kind: Literal["constant"] = "constant"
    tokens: int = Field(ge=1, le=_MOST_TOKENS)

    def sample(self, count: int, rng: np.random.Generator) -> Floats:
        """So many lengths, tokens."""
        return np.full(count, float(self.tokens))


class _Bounded(_Workload):
    lowest_tokens: int = Field(1, ge=1)
    highest_tokens: int = Field(_MOST_TOKENS, ge=1, le=_MOST_TOKENS)

    @model_validator(mode="after")
    def _check_inside(self) -> Self:
        inside = self._share_below(self.highest_tokens) - self._share_below(self.lowest_tokens)
        if inside < _LEAST_INSIDE_FRAC:
            raise ValueError(
                f"{max(0.0, inside):.2%} of all lengths are from lowest_tokens ({self.lowest_tokens}) to "
                f"highest_tokens ({self.highest_tokens}): move them around the middle"
            )
        return self

    def sample(self, count: int, rng: np.random.Generator) -> Floats:
        """So many lengths, tokens."""
        values = self._draw(count, rng)
        while len(outside := np.flatnonzero((values < self.lowest_tokens) | (values > self.highest_tokens))):
            values[outside] = self._draw(len(outside), rng)
        return values

    def _share_below(self, tokens: float) -> float:
        raise NotImplementedError

    def _draw(self, count: int, rng: np.random.Generator) -> Floats:
        raise NotImplementedError


class LognormalLengthConfig(_Bounded):
    """Its logarithm is normal; what is outside the bounds is drawn again."""

    kind: Literal["lognormal"] = "lognormal"
    median_tokens: float = Field(gt=0.0, description="Before it is bounded.")
    sigma: float = Field(gt=0.0, le=5.0, description="Standard deviation of the natural logarithm.")

    def _share_below(self, tokens: float) -> float:
        return NormalDist(math.log(self.median_tokens), self.sigma).cdf(math.log(tokens))

    def _draw(self, count: int, rng: np.random.Generator) -> Floats:
        return rng.lognormal(math.log(self.median_tokens), self.sigma, count)


class NormalLengthConfig(_Bounded):
    """Normal; what is outside the bounds is drawn again."""

    kind: Literal["normal"] = "normal"
    mean_tokens: float = Field(gt=0.0, description="Before it is bounded.")
    deviation_tokens: float = Field(gt=0.0, description="Standard deviation, before it is bounded.")

    def _share_below(self, tokens: float) -> float:
        return NormalDist(self.mean_tokens, self.deviation_tokens).cdf(tokens)

    def _draw(self, count: int, rng: np.random.Generator) -> Floats:
        return rng.normal(self.mean_tokens, self.deviation_tokens, count)


class ParetoLengthConfig(_Workload):
    """Many short ones, and a tail that falls as a power, up to a bound."""

    kind: Literal["pareto"] = "pareto"
    lowest_tokens: int = Field(ge=1)
    highest_tokens: int = Field(ge=1, le=_MOST_TOKENS)
    alpha: float = Field(gt=0.0, le=100.0, description="The tail's exponent: the smaller, the heavier.")

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.highest_tokens <= self.lowest_tokens:
            low, high = self.lowest_tokens, self.highest_tokens
            raise ValueError(f"highest_tokens ({high}) is not more than lowest_tokens ({low})")
        return self

    def sample(self, count: int, rng: np.random.Generator) -> Floats:
        """So many lengths, tokens, by inversion: x = L / (1 - u (1 - (L / H)^alpha))^(1 / alpha)."""
        cut = 1.0 - (self.lowest_tokens / self.highest_tokens) ** self.alpha
        lengths: Floats = self.lowest_tokens * (1.0 - rng.random(count) * cut) ** (-1.0 / self.alpha)
        return lengths


LengthConfig = Annotated[
    ConstantLengthConfig | LognormalLengthConfig | NormalLengthConfig | ParetoLengthConfig, Field(discriminator="kind")
]


class SeparateLengthsConfig(_Workload):
    """Prompts and outputs whose lengths have nothing to do with each other."""

    kind: Literal["separate"] = "separate"
    input_tokens: LengthConfig
    output_tokens: LengthConfig

    def sample(self, count: int, rng: np.random.Generator) -> Iterable[tuple[int, int]]:
        """Prompt and output length of so many requests, tokens."""
        columns = (self.input_tokens.sample(count, rng), self.output_tokens.sample(count, rng))
        return zip(*(np.rint(column).astype(int).tolist() for column in columns), strict=True)


def _loaded(value: Any) -> Any:
    return load_trace(Path(value)) if isinstance(value, str | Path) else value


class TraceLengthsConfig(_Workload):
    """Both lengths of a request of another trace, drawn at random; its times and prefixes are not kept."""

    kind: Literal["trace"] = "trace"
    trace: Annotated[tuple[TraceRequest, ...], SkipValidation, BeforeValidator(_loaded)] = Field(
        description="Its file, relative to the configuration's."
    )

    def sample(self, count: int, rng: np.random.Generator) -> Iterable[tuple[int, int]]:
        """Prompt and output length of so many requests, tokens."""
        drawn = (self.trace[index] for index in rng.integers(len(self.trace), size=count))
        return ((request.input_tokens, request.output_tokens) for request in drawn)


class WorkloadConfig(_Workload):
    """What ``tandem trace synthesize`` makes a trace from."""

    duration_s: float = Field(gt=0.0)
    arrivals: Annotated[PoissonConfig | MmppConfig, Field(discriminator="kind")]
    lengths: Annotated[SeparateLengthsConfig | TraceLengthsConfig, Field(discriminator="kind")]

    @model_validator(mode="after")
    def _check_size(self) -> Self:
        if (draws := self.arrivals.draws(self.duration_s)) > _MOST_REQUESTS:
            raise ValueError(
                f"{draws:,.0f} requests or states, more than {_MOST_REQUESTS:,}: lower duration_s or the highest rate"
            )
        return self

    @classmethod
    def parse(cls, document: Any, where: object) -> Self:
        """Check what a file or a user says.

        Raises:
            ValueError: it says something impossible; names ``where`` and the field.
        """
        try:
            return cls.model_validate(document)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            loc = zip(("", *first["loc"]), first["loc"], strict=False)
            field = ".".join(str(part) for before, part in loc if before not in _UNIONS)
            message = first["msg"].removeprefix("Value error, ")
            got = f", got {first['input']!r:.80}" if isinstance(first["input"], int | float | str) else ""
            raise ValueError(f"{where}: {field + ': ' if field else ''}{message}{got}") from None

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a YAML.

        Raises:
            ValueError: it cannot be read, or says something impossible; names the file and the field.
        """
        document = load_mapping(path, "duration_s, arrivals and lengths")
        lengths = document.get("lengths")
        if isinstance(lengths, dict) and isinstance(lengths.get("trace"), str):
            document["lengths"] = {**lengths, "trace": str(path.parent / lengths["trace"])}
        return cls.parse(document, path)


def synthesize(config: WorkloadConfig, rng: np.random.Generator) -> tuple[TraceRequest, ...]:
    """Requests in order of time, from 0 to the duration, in whole microseconds; perhaps none.

    Arrivals are drawn before lengths: other lengths leave the times as they are.
    """
    times_s = np.round(config.arrivals.sample(config.duration_s, rng), 6)
    pairs = config.lengths.sample(len(times_s), rng)
    return tuple(
        TraceRequest(at_s=at_s, input_tokens=prompt, output_tokens=output)
        for at_s, (prompt, output) in zip(np.minimum(times_s, config.duration_s).tolist(), pairs, strict=True)
    )


def save_trace(path: Path, trace: Sequence[TraceRequest]) -> None:
    """Write a CSV from which ``load_trace`` reads the same trace, gzipped where its name ends in ``.gz``.

    Raises:
        ValueError: there are no requests, or the file cannot be written.
    """
    if not trace:
        raise ValueError(f"{path}: not written: there are no requests")
    has_hashes = any(request.hash_ids for request in trace)
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["timestamp_s", "input_tokens", "output_tokens", *(["hash_ids"] if has_hashes else [])])
    for request in trace:
        hashes = [" ".join(map(str, request.hash_ids))] if has_hashes else []
        rows.writerow([request.at_s, request.input_tokens, request.output_tokens, *hashes])
    data = text.getvalue().encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Without a time inside the same trace is the same file.
        path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    except OSError as error:
        raise ValueError(f"{path}: cannot be written: {error.strerror}: give another file") from None
