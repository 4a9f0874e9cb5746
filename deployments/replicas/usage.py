"""What an answer tells its client of cached tokens and times: the truth over prefill, handoff and decode.

vLLM counts KV that came from another engine as cached, and its times begin at the decode engine. So prefill's answer
brings prefill's own figures, and they replace those of the decode engine. A stream that another replica continues
repeats the figures of the replica that began it.
"""

import time
from dataclasses import replace
from typing import Any

from deployments.vllm_seam.engine_types import times_of, with_times
from deployments.wire.messages import PrefillResult, Sent, Times, Usage


class UsageReport:
    """Observes the engine's outputs of one prompt, and corrects the outputs for the client."""

    def __init__(self, arrived_s: float, sent: Sent | None, media: tuple[str, ...] = ()) -> None:
        """Begin before the first output.

        Args:
            arrived_s: arrival at the endpoint, monotonic.
            sent: what the client has from a lost replica.
            media: hashes of the images and other media in the prompt.
        """
        self._arrived_s = arrived_s
        self._media = media
        self._clock_s = time.time() - time.monotonic()
        self._begun = None if sent is None else sent.usage  # the figures of the replica that began the stream
        self._counts = (None, None) if self._begun is None else (self._begun.cached_tokens, self._begun.created_tokens)
        self._has_counts = self._begun is not None
        self._keeps_counts = sent is None  # whether the engine's own counts are right
        self._prefill: PrefillResult | None = None  # prefill's answer, if prefill computed the prompt
        self._prefill_began_s = 0.0  # monotonic time at which prefill's engine began; 0.0: not observed
        self._metrics: Any = None  # the engine's times of the request, which it updates with each token
        self._is_reported = False

    @property
    def arrived_at_s(self) -> float:
        """Wall-clock time of the arrival at the endpoint."""
        return self._arrived_s + self._clock_s

    def prefilled(self, result: PrefillResult, answered_s: float) -> None:
        """Prefill has computed the prompt; ``answered_s``: monotonic time of its answer."""
        self._prefill, self._keeps_counts = result, False
        if result.computed_s is not None:
            self._prefill_began_s = answered_s - result.computed_s

    def observe(self, output: Any) -> None:
        """Note the figures of an output of this replica's engine."""
        self._metrics = output.metrics
        if self._has_counts:
            return
        self._has_counts = True
        self._counts = (output.num_cached_tokens, output.num_cache_creation_tokens)
        prefill = self._prefill
        # If the pull failed, the engine computed the prompt itself, and counts as cached only what it had.
        if prefill is not None and (output.num_cached_tokens or 0) >= (prefill.cached_tokens or 0):
            self._counts = (prefill.cached_tokens, prefill.created_tokens)

    def correct(self, output: Any) -> Usage | None:
        """Write the true figures into an output for the client.

        Returns them with the first and the last output, for a replica that may have to continue the stream.
        """
        # Both name engines, ports and blocks of KV, which no client may know.
        output.kv_transfer_params = output.ec_transfer_params = None
        if not self._keeps_counts:
            output.num_cached_tokens, output.num_cache_creation_tokens = self._counts
        if self._is_reported and not output.finished:
            return None
        self._is_reported = True
        times = self._times()
        if times is not None:
            output.metrics = with_times(output.metrics, times)
        return Usage(cached_tokens=self._counts[0], created_tokens=self._counts[1], times=times, media=self._media)

    def _times(self) -> Times | None:
        """From the arrival at the endpoint to the latest token; ``None``: not observed."""
        own = times_of(self._metrics, self._clock_s)
        begun = None if self._begun is None else self._begun.times
        if own is None or begun is None:
            return begun if own is None else replace(own, queued_s=self._arrived_s, scheduled_s=self._scheduled_s(own))
        # The client got the first token from the replica that began the stream. Its wall clock may be ahead.
        last_token_s = max(begun.last_token_s, own.last_token_s + own.clock_s - begun.clock_s)
        return replace(begun, last_token_s=last_token_s)

    def _scheduled_s(self, own: Times) -> float:
        return own.scheduled_s if self._prefill is None else self._prefill_began_s
