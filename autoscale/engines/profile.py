"""EngineProfile: the measured speed and size of an engine, and interpolation between its points (pure)."""

import math
from bisect import bisect_right
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from autoscale.documents import first_fault
from kvtransfer.strict_config import StrictConfig

# Beyond the points of a profile a line may fall below 0. So a decode step takes at least this share of the time of the
# step with the smallest batch and the shortest context.
_LEAST_STEP_FRAC = 0.5


class Source(StrictConfig):
    """Where the numbers of a part of a profile come from."""

    part: str = Field(description="The field of the profile, such as 'prefill' or 'decode'.")
    kind: Literal["measured", "derived", "assumed"]
    text: str


class PrefillCurve(StrictConfig):
    """Seconds to prefill a prompt that is alone on an idle engine, by its length."""

    tokens: tuple[int, ...] = Field(min_length=2)
    seconds: tuple[float, ...] = Field(min_length=2)
    derived_above_tokens: int | None = Field(None, ge=0)
    """Points above this length are derived; None: all points are measured."""

    @model_validator(mode="after")
    def _check_points(self) -> Self:
        _check_axis("prefill.tokens", self.tokens)
        if len(self.seconds) != len(self.tokens):
            raise ValueError(f"prefill: {len(self.seconds)} seconds for {len(self.tokens)} tokens")
        if any(later < sooner for sooner, later in pairwise(self.seconds)):
            raise ValueError("prefill.seconds must not fall with length: a longer prompt takes longer")
        return self

    @cached_property
    def step_s(self) -> float:
        """Seconds of a step without prompt tokens: the line through the first two points, extended to 0 tokens."""
        return max(0.0, _at(self.tokens, self.seconds, 0.0))

    def seconds_for(self, tokens: float) -> float:
        """Seconds for a prompt; beyond the points, the line through the nearest two is extended."""
        return max(self.step_s, _at(self.tokens, self.seconds, tokens))

    def chunk_s(self, start: float, end: float) -> float:
        """Seconds that prompt tokens ``start`` to ``end`` add to a step."""
        return max(0.0, _at(self.tokens, self.seconds, end) - _at(self.tokens, self.seconds, start))

    def covers(self, tokens: float) -> bool:
        """Whether a length lies between the first and the last point."""
        return self.tokens[0] <= tokens <= self.tokens[-1]

    def is_derived(self, tokens: float) -> bool:
        """Whether the time of a prompt of this length follows from a derived point, which was not measured."""
        above = self.derived_above_tokens
        return above is not None and tokens > above and self.covers(tokens)


class DecodeSurface(StrictConfig):
    """Seconds of one decode step, by the number of requests in the batch and their mean context, tokens."""

    batch: tuple[int, ...] = Field(min_length=1)
    context_tokens: tuple[int, ...] = Field(min_length=1)
    step_s: tuple[tuple[float, ...], ...] = Field(description="One row per batch, one value per context.")

    @model_validator(mode="after")
    def _check_points(self) -> Self:
        _check_axis("decode.batch", self.batch)
        _check_axis("decode.context_tokens", self.context_tokens)
        if len(self.step_s) != len(self.batch) or any(len(row) != len(self.context_tokens) for row in self.step_s):
            raise ValueError(
                f"decode.step_s needs {len(self.batch)} rows (batch) of {len(self.context_tokens)} values (context)"
            )
        if any(value <= 0 for row in self.step_s for value in row):
            raise ValueError("decode.step_s must be above 0")
        return self

    def seconds_for(self, batch: int, context_tokens: float) -> float:
        """Seconds of a step, by bilinear interpolation; beyond the points the nearest line is extended.

        The result is at least half of the step with the smallest batch and the shortest context.
        """
        return self.line(batch, context_tokens)[0]

    def line(self, batch: int, context_tokens: float) -> tuple[float, float, float]:
        """Time of the next decode steps, in each of which every request gains a token.

        Returns the seconds of the first step, the seconds by which each later one is longer, and the knot: the mean
        context in tokens up to which this growth holds.
        """
        axis, row = self.context_tokens, self._rows.get(batch) or self._row(batch)
        least_s = self.step_s[0][0] * _LEAST_STEP_FRAC
        if len(axis) == 1:
            return max(least_s, row[0]), 0.0, math.inf
        index = min(max(bisect_right(axis, context_tokens), 1), len(axis) - 1)
        slope = (row[index] - row[index - 1]) / (axis[index] - axis[index - 1])
        seconds = row[index - 1] + slope * (context_tokens - axis[index - 1])
        is_beyond_points = index == len(axis) - 1 and context_tokens >= axis[index]
        knot = math.inf if is_beyond_points else axis[index]
        if slope:
            # The line crosses least_s here: on one side of it steps follow the line, on the other they take least_s.
            crossing_tokens = context_tokens + (least_s - seconds) / slope
            if crossing_tokens > context_tokens:
                knot = min(knot, crossing_tokens)
        is_on_line = seconds > least_s or (seconds == least_s and slope > 0.0)
        return (seconds, slope, knot) if is_on_line else (least_s, 0.0, knot)

    def _row(self, batch: int) -> list[float]:
        """Seconds at each context for one batch. They are stored, since a run uses few batches, each often."""
        row = self._rows[batch] = [_at(self.batch, column, batch) for column in zip(*self.step_s, strict=True)]
        return row

    @cached_property
    def _rows(self) -> dict[int, list[float]]:
        return {}

    def covers(self, batch: float, context_tokens: float) -> bool:
        """Whether a batch and a mean context lie inside the profile's points."""
        return (
            self.batch[0] <= batch <= self.batch[-1]
            and self.context_tokens[0] <= context_tokens <= self.context_tokens[-1]
        )


class Handoff(StrictConfig):
    """The time that KV takes from a prefill engine to a decode engine."""

    base_s: float = Field(ge=0.0, description="Time of an empty transfer.")
    kv_bytes_per_token: float = Field(gt=0.0)
    bytes_per_s: float = Field(gt=0.0)

    def seconds_for(self, tokens: float) -> float:
        """Seconds for the KV of a prompt over an idle link."""
        return self.base_s + tokens * self.kv_bytes_per_token / self.bytes_per_s


class Link(StrictConfig):
    """The time of a transfer of KV alone, without the steps of the two engines around it (``Handoff``)."""

    base_s: float = Field(ge=0.0, description="Time of an empty transfer.")
    bytes_per_s: float = Field(gt=0.0, description="Bandwidth of a transfer, less its base.")


class Memory(StrictConfig):
    """Memory traffic of an engine's steps, for its roofline; numbers of all its GPUs together."""

    weight_bytes: float = Field(gt=0.0, description="Weights that every step reads.")
    peak_bytes_per_s: float = Field(gt=0.0)


class Precision(StrictConfig):
    """Types of an engine's numbers, by the names of vLLM's engine arguments."""

    dtype: str = Field(description="Type of weights and activations that are not quantised, such as bfloat16.")
    quantization: str | None = Field(None, description="Method of quantisation; None: none.")
    kv_cache_dtype: str = Field("auto", description="Type of KV; auto: that of the activations.")


class LeftOut(StrictConfig):
    """How far a measured profile is off at points that were left out of it, 90th percentiles of the relative error."""

    points: int = Field(ge=1)
    prefill_error_frac_p90: float = Field(ge=0.0)
    decode_error_frac_p90: float = Field(ge=0.0)


class EngineProfile(StrictConfig):
    """One engine: model, hardware and parallelism, its KV and its speed."""

    name: str = Field(min_length=1)
    model: str
    gpu: str | None = Field(None, description="GPU type as Ray names it; None: an engine on CPU.")
    gpus: int = Field(0, ge=0)
    kv_tokens: int = Field(gt=0, description="Tokens of KV that fit.")
    block_tokens: int = Field(16, gt=0)
    max_batch_tokens: int = Field(gt=0, description="Prompt and output tokens of one step (chunked prefill).")
    max_running: int = Field(gt=0, description="Requests in the batch at one time.")
    prefill: PrefillCurve
    decode: DecodeSurface
    decode_beside_prompts: DecodeSurface | None = None
    """Seconds that a batch which decodes takes in a step with prompts, less what the prompts add (``chunk_s``).

    None: as long as in a step without prompts.
    """
    mixed_prefill_frac: float = Field(1.0, gt=0.0)
    """Time that prompt tokens add to a step in which requests decode, as a share of what they add to an idle engine."""
    handoff: Handoff
    link: Link | None = Field(None, description="None: the transfer of KV alone was not measured.")
    start_s: float = Field(ge=0.0, description="Seconds from the request for a replica until it is ready.")
    flops_per_token: float = Field(gt=0.0)  # floating-point operations, without attention
    peak_flops: float = Field(gt=0.0)  # floating-point operations per second, of all its GPUs together
    memory: Memory | None = Field(None, description="Memory traffic; left out: the roofline counts only arithmetic.")
    precision: Precision | None = Field(None, description="None: not recorded.")
    sources: tuple[Source, ...] = Field(min_length=1)
    left_out: LeftOut | None = Field(None, description="None: no point was left out to test the profile.")

    def roofline_s(self, tokens: int, context_tokens: int = 0, *, more_tokens: int = 0, steps: int = 1) -> float:
        """Least time of steps on the hardware, seconds: for each step the longer of its arithmetic and memory traffic.

        ``tokens``: tokens that each step computes. Attention counts only as memory traffic: the first step reads the KV
        of ``context_tokens``, and each later step that of ``more_tokens`` more than the step before.
        """
        compute_s = tokens * self.flops_per_token / self.peak_flops
        if self.memory is None:
            return steps * compute_s
        kv_s = self.handoff.kv_bytes_per_token / self.memory.peak_bytes_per_s
        first_s = self.memory.weight_bytes / self.memory.peak_bytes_per_s + context_tokens * kv_s
        more_s = more_tokens * kv_s
        # Memory traffic grows from step to step, arithmetic does not: only in the first steps can arithmetic be longer.
        compute_bound = steps
        if first_s >= compute_s:
            compute_bound = 0
        elif more_s:
            compute_bound = min(steps, math.ceil((compute_s - first_s) / more_s))
        # The other steps, from number ``compute_bound`` to ``steps - 1``, take the mean of the first and the last one.
        memory_bound = steps - compute_bound
        return compute_bound * compute_s + memory_bound * (first_s + more_s * (compute_bound + steps - 1) / 2)

    def with_steps(self, factor: float) -> Self:
        """The profile of an engine whose decode steps take ``factor`` times as long; the rest stays."""
        beside = self.decode_beside_prompts
        slower = {"decode": _slowed(self.decode, factor), "decode_beside_prompts": beside and _slowed(beside, factor)}
        return self.model_copy(update=slower)

    def at_speed(self, factor: float) -> Self:
        """The profile of an engine that computes ``factor`` times as fast; its links and its start stay."""
        if factor == 1.0:
            return self
        document = self.model_dump()
        document["name"] = f"{self.name} x{factor:g}"
        document["prefill"]["seconds"] = [s / factor for s in self.prefill.seconds]
        document["decode"]["step_s"] = [[s / factor for s in row] for row in self.decode.step_s]
        if beside := self.decode_beside_prompts:
            document["decode_beside_prompts"]["step_s"] = [[s / factor for s in row] for row in beside.step_s]
        return self.model_validate(document)  # a copy would keep what was computed from the old speed

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a profile; a ValueError if it cannot be read, or a value is wrong."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror or error}") from None
        except ValidationError as error:
            raise ValueError(f"{path}: {first_fault(error)}") from None


def _loaded(value: Any) -> Any:
    """The profile at a path; any other value is left to pydantic."""
    return EngineProfile.load(Path(value)) if isinstance(value, str | Path) else value


# In a configuration: a profile, or the path of one.
ProfileRef = Annotated[EngineProfile, BeforeValidator(_loaded, json_schema_input_type=EngineProfile | str)]


def _check_axis(name: str, values: tuple[int, ...]) -> None:
    if any(later <= sooner for sooner, later in pairwise(values)):
        raise ValueError(f"{name} must rise: {list(values)}")


def _slowed(surface: DecodeSurface, factor: float) -> DecodeSurface:
    """A surface with all times multiplied. A copy would keep rows that were computed from the old times."""
    rows = tuple(tuple(factor * step_s for step_s in row) for row in surface.step_s)
    return DecodeSurface(batch=surface.batch, context_tokens=surface.context_tokens, step_s=rows)


def _at(axis: tuple[int, ...], values: tuple[float, ...], point: float) -> float:
    """The value at ``point``, by the line through the two nearest points of the axis; its value if it has only one."""
    if len(axis) == 1:
        return values[0]
    index = min(max(bisect_right(axis, point), 1), len(axis) - 1)
    share = (point - axis[index - 1]) / (axis[index] - axis[index - 1])
    return values[index - 1] + share * (values[index] - values[index - 1])
