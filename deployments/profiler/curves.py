"""The curves of a profile, and how far they are off, from measured times."""

import statistics
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from autoscale.engines.form import Place, decode_surface, prefill_curve, prompt_terms, step_terms, term_weights
from autoscale.engines.profile import DecodeSurface, Handoff, LeftOut, Link, PrefillCurve
from autoscale.engines.sampling import form_of, place_times
from deployments.profiler.bench import Bench
from deployments.profiler.engines import handoff_s, pull_s
from deployments.profiler.rounds import Track, places_track

_LEAST_MIXED_FRAC = 0.01  # a prompt beside streams adds at least this share: 0 would make prompts free
_HANDOFF_LENGTHS = (128, 512, 1024, 2048, 4000)  # prompts of the measured handoffs, tokens
_WARM_UPS = 3  # handoffs before the first measured one; the first makes the link


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTracks:
    """All that is measured of one engine, or of two that are alike.

    ``beside``: seconds that prompts add to streams. The other four are two curves, and what was left out of them.
    """

    prompts: Track
    prompts_left_out: Track
    steps: Track
    steps_left_out: Track
    beside: Track
    max_batch_tokens: int

    @classmethod
    def of(cls, prompts: Bench, steps: Bench) -> Self:
        """Prompts are measured on the one engine, and steps on the other."""
        return cls(
            prompts=prompts.prompts(),
            prompts_left_out=prompts.prompts_left_out(),
            steps=steps.steps(),
            steps_left_out=steps.steps_left_out(),
            beside=steps.prompts_beside(),
            max_batch_tokens=prompts.max_batch_tokens,
        )

    @property
    def tracks(self) -> list[Track]:
        """All five."""
        return [self.prompts, self.prompts_left_out, self.steps, self.steps_left_out, self.beside]

    def prefill_curve(self) -> PrefillCurve:
        """Seconds of a prompt by its length."""
        return prefill_curve(form_of(prompt_terms(self.max_batch_tokens), self.prompts.times), self.max_batch_tokens)

    def decode_surface(self) -> DecodeSurface:
        """Seconds of a step by batch and context."""
        return decode_surface(form_of(step_terms, self.steps.times))

    def mixed_prefill_frac(self, curve: PrefillCurve) -> float:
        """What a prompt adds to the streams beside it, as a share of the time that it adds to an idle engine."""
        alone_s = {place: curve.chunk_s(0, place[0]) for place in self.beside.timings}
        shares = [self.beside.seconds(place) / seconds for place, seconds in alone_s.items() if seconds]
        return round(max(_LEAST_MIXED_FRAC, statistics.fmean(shares)), 3) if shares else 1.0

    def left_out(self, curve: PrefillCurve, surface: DecodeSurface) -> LeftOut:
        """Errors of both curves at the places that were left out."""
        prompts, steps = place_times(self.prompts_left_out.times), place_times(self.steps_left_out.times)
        prompt_errors = [curve.seconds_for(tokens) / seconds - 1.0 for (tokens, _), seconds in prompts.items()]
        step_errors = [surface.seconds_for(*place) / seconds - 1.0 for place, seconds in steps.items()]
        return LeftOut(
            points=len(prompt_errors) + len(step_errors),
            prefill_error_frac_p90=_p90(prompt_errors),
            decode_error_frac_p90=_p90(step_errors),
        )


def _p90(errors: list[float]) -> float:
    return round(float(np.quantile(np.abs(errors), 0.9)), 3)


class LinkTracks:
    """Handoffs from one engine to another, and the transfers of KV in them."""

    def __init__(self, prefill: Bench, decode: Bench, decode_stats: Any) -> None:
        """``decode_stats``: the statistics of the decode engine (``EngineStatsLogger``)."""
        self._prefill, self._decode, self._stats = prefill, decode, decode_stats
        longest = decode.longest - 8  # leaves room for the output tokens
        places = [(tokens, 0) for tokens in sorted({min(tokens, longest) for tokens in _HANDOFF_LENGTHS})]
        self.handoffs = places_track("link", "handoff", places, self._handoff_s)
        self.pulls = places_track("link", "pull", places, self._pull_s)

    async def warm_up(self) -> None:
        """Make the link."""
        for _ in range(_WARM_UPS):
            await self._handoff_s((min(_HANDOFF_LENGTHS), 0))

    def handoff(self, kv_bytes_per_token: float) -> Handoff:
        """A line through the times of handoffs."""
        base_s, bytes_per_s = _line(self.handoffs, kv_bytes_per_token)
        return Handoff(base_s=base_s, kv_bytes_per_token=kv_bytes_per_token, bytes_per_s=bytes_per_s)

    def link(self, kv_bytes_per_token: float) -> Link:
        """A line through the times of transfers."""
        base_s, bytes_per_s = _line(self.pulls, kv_bytes_per_token)
        return Link(base_s=base_s, bytes_per_s=bytes_per_s)

    async def _handoff_s(self, place: Place) -> float:
        return await handoff_s(self._prefill.client, self._decode.client, self._prefill.prompt(place[0]))

    async def _pull_s(self, place: Place) -> float:
        prompt = self._prefill.prompt(place[0])
        return await pull_s(self._prefill.client, self._decode.client, self._stats, prompt)


def _line(track: Track, bytes_per_token: float) -> tuple[float, float]:
    """Seconds at 0 tokens, and bytes per second, of the line through the times of a track."""
    seconds = place_times(track.times)
    base_s, token_s = term_weights([(1.0, float(tokens)) for tokens, _ in seconds], list(seconds.values()))
    longest = max(seconds)
    # If noise hides the slope, the longest transfer counts as transfer alone: a lower bound of the bandwidth.
    return round(base_s, 7), round(bytes_per_token / (token_s or seconds[longest] / longest[0]))
