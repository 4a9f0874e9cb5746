"""Checks of a trace on a virtual cluster: which requests are refused, and which cannot meet their objectives (pure).

Requests that cannot meet their objectives lower the required share. Notes tell the reader of figures about them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from autoscale.engines.profile import EngineProfile, PrefillCurve
from autoscale.sim.config import SimConfig
from autoscale.sim.scenario import Scenario
from autoscale.traces.trace import TraceRequest
from autoscale.types import PoolKey
from kvtransfer.topology import Role

# Most bins of the oracle's counts that fit into memory: four months of 15 s.
_MOST_BINS = 700_000
# If the first request comes later than this after the warm-up, seconds, there is a note. Mostly the trace's timestamps
# then do not begin at 0.
_IDLE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfiledRange:
    """Lengths that all profiles cover.

    Attributes:
        curves: prefill times of each engine that computes prompts.
        prompts: prompt lengths, tokens.
        longest_tokens: longest context of a request, its prompt and its output.
    """

    curves: Sequence[PrefillCurve]
    prompts: range
    longest_tokens: int

    @classmethod
    def of(cls, profiles: Mapping[PoolKey, EngineProfile]) -> Self:
        """The range of some pools; if there is no prefill pool, decode engines compute the prompts."""
        decodes = [each for key, each in profiles.items() if key.role is Role.DECODE]
        prefills = [each for key, each in profiles.items() if key.role is Role.PREFILL]
        curves = [each.prefill for each in prefills or decodes]
        return cls(
            curves=curves,
            prompts=range(max(each.tokens[0] for each in curves), min(each.tokens[-1] for each in curves) + 1),
            longest_tokens=min(each.decode.context_tokens[-1] for each in decodes),
        )

    def covers(self, request: TraceRequest) -> bool:
        """Whether a request's times follow from the profiles without extrapolation by length."""
        context_tokens = request.input_tokens + request.output_tokens
        return request.input_tokens in self.prompts and context_tokens <= self.longest_tokens

    def has_derived_time(self, request: TraceRequest) -> bool:
        """Whether the time of a request's prompt is derived in any profile, not measured."""
        return any(each.is_derived(request.input_tokens) for each in self.curves)


def check_lengths(config: SimConfig, trace: Sequence[TraceRequest], path: Path, *, is_strict: bool = False) -> None:
    """Refuse requests that do not fit an engine's KV; ``is_strict``: also requests with lengths beyond the profiles.

    Raises:
        ValueError: there is such a request; names the file, and the line of the first one.
    """
    profiles = config.profiles()
    kv_tokens = min(profile.kv_tokens for profile in profiles.values())
    block_tokens = max(profile.block_tokens for key, profile in profiles.items() if key.role is Role.DECODE)
    profiled = ProfiledRange.of(profiles)
    beyond = []
    for request in trace:
        # KV is taken in whole blocks, so a request may take almost a block more than its tokens.
        if request.input_tokens + request.output_tokens + block_tokens > kv_tokens:
            raise ValueError(
                f"{path}: line {request.line}: {request.input_tokens} + {request.output_tokens} tokens do not fit the "
                f"KV of an engine, {kv_tokens} tokens: choose another profile, or leave the request out"
            )
        if not profiled.covers(request):
            beyond.append(request)
    if is_strict and beyond:
        first = beyond[0]
        raise ValueError(
            f"{path}: {len(beyond)} of {len(trace)} requests are beyond the profile, the first in line {first.line}: "
            f"{first.input_tokens} + {first.output_tokens} tokens: it covers prompts of {profiled.prompts.start} to "
            f"{profiled.prompts.stop - 1} tokens and contexts up to {profiled.longest_tokens}; profile more, or leave "
            "--strict out"
        )


def check_trace(config: SimConfig, trace: Sequence[TraceRequest], path: Path, *, is_strict: bool = False) -> None:
    """As ``check_lengths``; also refuse a trace that ends during the warm-up, or that lasts too long."""
    check_lengths(config, trace, path, is_strict=is_strict)
    if trace[-1].at_s > _MOST_BINS * config.bin_s:
        raise ValueError(
            f"{path}: line {trace[-1].line}: the trace lasts {trace[-1].at_s:.6g} s, more than {_MOST_BINS:,} bins of "
            f"{config.bin_s:g} s: are its timestamps seconds? Else give a part of it with --start and --duration"
        )
    if trace[-1].at_s <= config.warm_up_s:
        raise ValueError(
            f"{path}: no request arrives after the warm-up of {config.warm_up_s:g} s: give a longer trace or a shorter "
            "warm_up_s"
        )


def impossible_requests(config: SimConfig, trace: Iterable[TraceRequest]) -> int:
    """Number of requests that miss their TPOT objective even alone on the fastest engine of all groups."""
    surfaces = [group.pool(Role.DECODE).profile.decode for group in config.groups]

    def is_impossible(request: TraceRequest) -> bool:
        if request.output_tokens < 2:
            return False  # it has no time between tokens
        mean_context_tokens = request.input_tokens + request.output_tokens / 2
        return all(surface.seconds_for(1, mean_context_tokens) > config.slo.tpot_s for surface in surfaces)

    return sum(map(is_impossible, trace))


def least_frac(config: SimConfig, scenario: Scenario) -> float:
    """Share of the measured requests that must meet their objectives.

    The configured share is required of the requests that can meet their objectives. Here it is given as a share of all
    measured requests, which is smaller if some cannot.

    Raises:
        ValueError: no request is measured, or no measured one can meet its objectives.
    """
    measured = scenario.measured_trace
    if not measured:
        raise ValueError(
            f"none of {len(scenario.trace):,} requests arrives after the warm-up of {scenario.warm_up_s:g} s: give a "
            "longer trace, a larger rate scale or a shorter warm_up_s"
        )
    impossible = impossible_requests(config, measured)
    if impossible == len(measured):
        raise ValueError(
            f"slo.tpot_s is {config.slo.tpot_s:g}: none of the {len(measured)} measured requests can meet it, even "
            "alone on an engine: give a longer tpot_s, or other engines"
        )
    return config.slo.attainment_frac * (1.0 - impossible / len(measured))


def notes(config: SimConfig, trace: Sequence[TraceRequest], *, is_replayed: bool = True) -> list[str]:
    """What a reader of figures about these requests must know, one sentence each.

    ``is_replayed``: whether they arrive at their times; a pressure test takes only their lengths.
    """
    profiles = config.profiles()
    profiled, total = ProfiledRange.of(profiles), len(trace)
    lines = []
    if is_replayed and (idle_s := trace[0].at_s - config.warm_up_s) > _IDLE_S:
        lines.append(
            f"the first request comes {idle_s:,.0f} s after the warm-up: GPU-hours of that time count too; --start "
            "leaves it out"
        )
    if beyond := sum(not profiled.covers(request) for request in trace):
        lines.append(
            f"{beyond:,} of {total:,} requests are longer or shorter than what was profiled; their times are "
            "extrapolated, and --strict refuses them"
        )
    if derived := sum(map(profiled.has_derived_time, trace)):
        lines.append(f"{derived:,} of {total:,} requests have prompts whose times were derived, not measured")
    for profile in {each.name: each for each in profiles.values()}.values():
        if profile.max_running > profile.decode.batch[-1]:
            lines.append(
                f"{profile.name}: engines run up to {profile.max_running} requests at once, but only batches of "
                f"{profile.decode.batch[-1]} were profiled; the times of larger batches are extrapolated"
            )
    if impossible := impossible_requests(config, trace):
        lines.append(
            f"{impossible:,} of {total:,} requests cannot meet their TPOT objective even alone on an engine: the "
            "required share counts only the others"
        )
    return lines
