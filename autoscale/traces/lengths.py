"""The lengths of prompts and outputs in a synthetic trace (pure)."""

import math
from collections.abc import Iterable
from statistics import NormalDist
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from autoscale.traces.arrivals import Floats
from kvtransfer.strict_config import StrictConfig

# Longest length, tokens: longer than every model's context.
_MOST_TOKENS = 10_000_000
# Lengths outside their bounds are drawn again. So bounds with less than this share of all lengths inside are refused:
# drawing would take too long.
_LEAST_INSIDE_FRAC = 0.01


class ConstantLengthConfig(StrictConfig):
    """The same length for all requests."""

    kind: Literal["constant"] = "constant"
    tokens: int = Field(ge=1, le=_MOST_TOKENS)

    def sample(self, count: int, rng: np.random.Generator) -> Floats:
        """An array with ``count`` times the length, tokens."""
        return np.full(count, float(self.tokens))


class _Bounded(StrictConfig):
    lowest_tokens: int = Field(1, ge=1)
    highest_tokens: int = Field(_MOST_TOKENS, ge=1, le=_MOST_TOKENS)

    @model_validator(mode="after")
    def _check_inside(self) -> Self:
        inside = self._share_below(self.highest_tokens) - self._share_below(self.lowest_tokens)
        if inside < _LEAST_INSIDE_FRAC:
            raise ValueError(
                f"{max(0.0, inside):.2%} of all lengths are from lowest_tokens ({self.lowest_tokens}) to "
                f"highest_tokens ({self.highest_tokens}): choose bounds nearer to the middle of the lengths"
            )
        return self

    def sample(self, count: int, rng: np.random.Generator) -> Floats:
        """``count`` random lengths, tokens."""
        values = self._draw(count, rng)
        while len(outside := np.flatnonzero((values < self.lowest_tokens) | (values > self.highest_tokens))):
            values[outside] = self._draw(len(outside), rng)
        return values

    def _share_below(self, tokens: float) -> float:
        """Share of all lengths below ``tokens``, before the bounds."""
        raise NotImplementedError

    def _draw(self, count: int, rng: np.random.Generator) -> Floats:
        raise NotImplementedError


class LognormalLengthConfig(_Bounded):
    """Lengths whose logarithm is normally distributed; a length outside the bounds is drawn again."""

    kind: Literal["lognormal"] = "lognormal"
    median_tokens: float = Field(gt=0.0, description="Median of all lengths, before the bounds.")
    sigma: float = Field(gt=0.0, le=5.0, description="Standard deviation of the natural logarithm.")

    def _share_below(self, tokens: float) -> float:
        return NormalDist(math.log(self.median_tokens), self.sigma).cdf(math.log(tokens))

    def _draw(self, count: int, rng: np.random.Generator) -> Floats:
        return rng.lognormal(math.log(self.median_tokens), self.sigma, count)


class NormalLengthConfig(_Bounded):
    """Normally distributed lengths; a length outside the bounds is drawn again."""

    kind: Literal["normal"] = "normal"
    mean_tokens: float = Field(gt=0.0, description="Mean of all lengths, before the bounds.")
    deviation_tokens: float = Field(gt=0.0, description="Standard deviation before the bounds.")

    def _share_below(self, tokens: float) -> float:
        return NormalDist(self.mean_tokens, self.deviation_tokens).cdf(tokens)

    def _draw(self, count: int, rng: np.random.Generator) -> Floats:
        return rng.normal(self.mean_tokens, self.deviation_tokens, count)


class ParetoLengthConfig(StrictConfig):
    """Many short lengths and a tail that falls as a power, up to a bound."""

    kind: Literal["pareto"] = "pareto"
    lowest_tokens: int = Field(ge=1)
    highest_tokens: int = Field(ge=1, le=_MOST_TOKENS)
    alpha: float = Field(gt=0.0, le=100.0, description="Exponent of the tail; a smaller one makes a heavier tail.")

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.highest_tokens <= self.lowest_tokens:
            low, high = self.lowest_tokens, self.highest_tokens
            raise ValueError(f"highest_tokens ({high}) is not more than lowest_tokens ({low})")
        return self

    def sample(self, count: int, rng: np.random.Generator) -> Floats:
        """``count`` random lengths, tokens, by inversion: x = L / (1 - u (1 - (L / H)^alpha))^(1 / alpha).

        L and H are the lowest and the highest length; u is uniform from 0 to 1.
        """
        # Share of lengths up to H, if there were no bound.
        below_highest = 1.0 - (self.lowest_tokens / self.highest_tokens) ** self.alpha
        lengths: Floats = self.lowest_tokens * (1.0 - rng.random(count) * below_highest) ** (-1.0 / self.alpha)
        return lengths


LengthConfig = Annotated[
    ConstantLengthConfig | LognormalLengthConfig | NormalLengthConfig | ParetoLengthConfig, Field(discriminator="kind")
]


class SeparateLengthsConfig(StrictConfig):
    """Lengths of prompts and outputs that are drawn independently."""

    kind: Literal["separate"] = "separate"
    input_tokens: LengthConfig
    output_tokens: LengthConfig

    def sample(self, count: int, rng: np.random.Generator) -> Iterable[tuple[int, int]]:
        """Prompt and output lengths of ``count`` requests, tokens."""
        columns = (self.input_tokens.sample(count, rng), self.output_tokens.sample(count, rng))
        return zip(*(np.rint(column).astype(int).tolist() for column in columns), strict=True)
