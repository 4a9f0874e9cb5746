"""Synthetic traces: arrivals with lengths, from a description of a workload (pure, but for loading and saving)."""

import csv
import gzip
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import BeforeValidator, Field, SkipValidation, ValidationError, model_validator

from autoscale.documents import load_mapping
from autoscale.traces.arrivals import MmppConfig, PoissonConfig
from autoscale.traces.lengths import SeparateLengthsConfig
from autoscale.traces.trace import TraceRequest, load_trace
from kvtransfer.strict_config import StrictConfig

# Most requests that may be drawn for a trace. Each needs two numbers: together 160 MB.
_MOST_REQUESTS = 10_000_000
# Fields with several kinds. In the place of a fault, pydantic adds the kind after each of these fields.
_UNIONS = ("arrivals", "rate", "lengths", "input_tokens", "output_tokens")


def _loaded(value: Any) -> Any:
    """The trace at a path; any other value is left to pydantic."""
    return load_trace(Path(value)) if isinstance(value, str | Path) else value


class TraceLengthsConfig(StrictConfig):
    """Both lengths of random requests of another trace; their times and prefixes are not used."""

    kind: Literal["trace"] = "trace"
    # SkipValidation: ``load_trace`` has already checked each request.
    trace: Annotated[tuple[TraceRequest, ...], SkipValidation, BeforeValidator(_loaded)] = Field(
        description="File of the other trace, relative to the configuration's file."
    )

    def sample(self, count: int, rng: np.random.Generator) -> Iterable[tuple[int, int]]:
        """Prompt and output lengths of ``count`` requests, tokens."""
        drawn = (self.trace[index] for index in rng.integers(len(self.trace), size=count))
        return ((request.input_tokens, request.output_tokens) for request in drawn)


class WorkloadConfig(StrictConfig):
    """The configuration of ``tandem trace synthesize``."""

    duration_s: float = Field(gt=0.0)
    arrivals: Annotated[PoissonConfig | MmppConfig, Field(discriminator="kind")]
    lengths: Annotated[SeparateLengthsConfig | TraceLengthsConfig, Field(discriminator="kind")]

    @model_validator(mode="after")
    def _check_size(self) -> Self:
        if (draws := self.arrivals.draws(self.duration_s)) > _MOST_REQUESTS:
            raise ValueError(
                f"{draws:,.0f} requests or changes of state, more than {_MOST_REQUESTS:,}: lower duration_s or the "
                "highest rate"
            )
        return self

    @classmethod
    def parse(cls, document: Any, where: object) -> Self:
        """The configuration in a document.

        Raises:
            ValueError: a value is wrong; names ``where`` and the field.
        """
        try:
            return cls.model_validate(document)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            place = first["loc"]
            is_kind = [False, *(part in _UNIONS for part in place)]  # a kind stands after its field
            field = ".".join(str(part) for part, skipped in zip(place, is_kind, strict=False) if not skipped)
            message = first["msg"].removeprefix("Value error, ")
            got = f", got {first['input']!r:.80}" if isinstance(first["input"], int | float | str) else ""
            raise ValueError(f"{where}: {field + ': ' if field else ''}{message}{got}") from None

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a YAML.

        Raises:
            ValueError: it cannot be read, or a value is wrong; names the file and the field.
        """
        document = load_mapping(path, "duration_s, arrivals and lengths")
        lengths = document.get("lengths")
        if isinstance(lengths, dict) and isinstance(lengths.get("trace"), str):
            document["lengths"] = {**lengths, "trace": str(path.parent / lengths["trace"])}
        return cls.parse(document, path)


def synthesize(config: WorkloadConfig, rng: np.random.Generator) -> tuple[TraceRequest, ...]:
    """Random requests in order of time, from 0 to the duration, in whole microseconds; perhaps none.

    Arrivals are drawn before lengths, so the times do not depend on the lengths.
    """
    times_s = np.round(config.arrivals.sample(config.duration_s, rng), 6)
    times_s = np.minimum(times_s, config.duration_s)  # the last one may have been rounded up
    pairs = config.lengths.sample(len(times_s), rng)
    return tuple(
        TraceRequest(at_s=at_s, input_tokens=prompt, output_tokens=output)
        for at_s, (prompt, output) in zip(times_s.tolist(), pairs, strict=True)
    )


def save_trace(path: Path, trace: Sequence[TraceRequest]) -> None:
    """Write a CSV from which ``load_trace`` reads the same trace, gzipped if its name ends in ``.gz``.

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
        # The gzip header has no time, so that the same trace makes the same file.
        path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    except OSError as error:
        raise ValueError(f"{path}: cannot be written: {error.strerror}: give another file") from None
