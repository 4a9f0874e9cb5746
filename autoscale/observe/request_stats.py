"""Waiting times of one decode replica's requests, as counters for the autoscaler (pure).

vLLM's own TTFT counts a stream again on each replica that continues it. Here a request counts once, and its TTFT starts
when it arrives at the endpoint. If long prompts have a longer objective, their TTFT is scaled down
(``SloConfig.ttft_share``), so that one objective holds for all requests.
"""

from collections.abc import Callable

from autoscale.observe.histogram import LENGTH_EDGES_TOKENS, TPOT_EDGES_S, TTFT_EDGES_S, Histogram

# A stream's pace is its recent time per output token. It is measured over this time, seconds: engines return tokens in
# chunks, so over a shorter time the pace would depend on the size of a chunk.
_PACE_S = 2.0
# Weight of a new answer in the mean length of answers, an exponential mean: about the last 64 answers count.
_ANSWER_WEIGHT = 1 / 64


class RequestTimer:
    """One request, from its arrival to its end."""

    __slots__ = ("_arrived_s", "_first_s", "_last_s", "_mark", "_pace_s", "_share", "_stats", "tokens")

    def __init__(self, stats: "RequestStats", arrived_s: float, share: float) -> None:
        self._stats = stats
        self._share = share  # factor of its TTFT (``SloConfig.ttft_share``)
        self._arrived_s = arrived_s
        self._first_s = self._last_s = 0.0  # times of its first and last output token
        self.tokens = 0  # output tokens so far
        self._mark = (0.0, 0)  # time and tokens from which the next pace is measured
        self._pace_s: float | None = None

    def add_tokens(self, count: int, at_s: float | None = None) -> None:
        """Count output tokens that came at ``at_s``; ``None``: now."""
        if not count:
            return
        self._last_s = self._stats.clock() if at_s is None else at_s
        if not self.tokens:
            self._first_s = self._last_s
            self._stats.leave(self)
            self._observe_first()
            self._stats.streaming.add(self)
            self._mark = (self._first_s, count)
        self.tokens += count

    def add_all(self, tokens: int, first_s: float, last_s: float) -> None:
        """Count all output tokens of a request that is answered in one piece.

        ``first_s``, ``last_s``: times of its first and last token by the engine, on the same clock.
        """
        if tokens:
            self._first_s, self._last_s, self.tokens = first_s, last_s, tokens
            self._observe_first()

    def add_result(self) -> None:
        """Count the result of a request without output tokens, that of a pooling model: its TTFT ends now."""
        self._first_s = self._stats.clock()
        self._stats.leave(self)
        self._observe_first()

    def _observe_first(self) -> None:
        waited_s = max(0.0, self._first_s - self._arrived_s)
        self._stats.ttft.observe(self._share * waited_s)
        self._stats.first_tokens += 1
        self._stats.first_tokens_s += waited_s

    def end(self) -> None:
        """Take the request out, and count it as ended if it has output tokens."""
        self._stats.leave(self)
        if self.tokens:
            self._stats.answer(self.tokens)
        if self.tokens > 1:
            self._stats.tpot.observe((self._last_s - self._first_s) / (self.tokens - 1))

    def waited_s(self, now_s: float) -> float:
        """Time for which the request has waited for its first token, scaled as its TTFT; seconds."""
        return self._share * max(0.0, now_s - self._arrived_s)

    def pace_s(self, now_s: float) -> float | None:
        """Recent time per output token, seconds; ``None``: the stream is younger than ``_PACE_S``.

        Measures anew if the last measurement is ``_PACE_S`` old.
        """
        mark_s, mark_tokens = self._mark
        if now_s - mark_s >= _PACE_S:
            # A stream without a new token counts as if one came now.
            self._pace_s = (now_s - mark_s) / max(1, self.tokens - mark_tokens)
            self._mark = (now_s, self.tokens)
        return self._pace_s


class RequestStats:
    """All requests of a replica since it started.

    ``clock``: the time in seconds. ``ttft_share``: factor of a request's TTFT, from its prompt's number of tokens.
    """

    def __init__(
        self, clock: Callable[[], float], ttft_share: Callable[[int], float] = lambda input_tokens: 1.0
    ) -> None:
        self.clock = clock
        self._ttft_share = ttft_share
        self.ttft = Histogram(TTFT_EDGES_S)
        self.tpot = Histogram(TPOT_EDGES_S)
        self._input_lengths = Histogram(LENGTH_EDGES_TOKENS)
        self._output_lengths = Histogram(LENGTH_EDGES_TOKENS)
        self.first_tokens = 0
        self.first_tokens_s = 0.0  # sum of TTFTs, not scaled
        self.ended = 0
        self.output_tokens = 0
        self.output_tokens_mean: float | None = None  # output tokens of an answer, about the last 64 answers
        self._begun = 0
        self._input_tokens = 0
        self._input_tokens_squared = 0  # for the spread of prompt lengths
        self.streaming: set[RequestTimer] = set()
        self._waiting: set[RequestTimer] = set()

    def begin(self, arrived_s: float, input_tokens: int, *, is_streamed: bool) -> RequestTimer:
        """Count a request that reaches the replica; ``arrived_s``: its arrival at the endpoint, by this object's clock.

        ``is_streamed``: its tokens are observed as they come; a request that is not streamed never counts as waiting.
        """
        self._begun += 1
        self._input_tokens += input_tokens
        self._input_tokens_squared += input_tokens * input_tokens
        self._input_lengths.observe(input_tokens)
        timer = RequestTimer(self, arrived_s, self._ttft_share(input_tokens))
        if is_streamed:
            self._waiting.add(timer)
        return timer

    def answer(self, output_tokens: int) -> None:
        """Count a request that has ended with this many output tokens."""
        self.ended += 1
        self.output_tokens += output_tokens
        self._output_lengths.observe(output_tokens)
        mean = output_tokens if self.output_tokens_mean is None else self.output_tokens_mean
        self.output_tokens_mean = mean + (output_tokens - mean) * _ANSWER_WEIGHT

    def leave(self, timer: RequestTimer) -> None:
        """Remove a request from the sets of requests that wait and that stream."""
        self._waiting.discard(timer)
        self.streaming.discard(timer)

    def report(self) -> dict[str, float]:
        """Counters and buckets, by the names of ``autoscale.observe.signals``.

        Buckets ``late`` count requests that still wait for their first token, buckets ``pace`` requests that stream.
        """
        late, pace = Histogram(TTFT_EDGES_S), Histogram(TPOT_EDGES_S)
        now_s = self.clock()
        for timer in self._waiting:
            late.observe(timer.waited_s(now_s))
        for timer in self.streaming:
            if (pace_s := timer.pace_s(now_s)) is not None:
                pace.observe(pace_s)
        return {
            "requests": float(self._begun),
            "requests_ended": float(self.ended),
            "first_tokens": float(self.first_tokens),
            "first_tokens_s": self.first_tokens_s,
            "input_tokens": float(self._input_tokens),
            "input_tokens_squared": float(self._input_tokens_squared),
            "output_tokens": float(self.output_tokens),
            **self.ttft.as_report("ttft"),
            **self.tpot.as_report("tpot"),
            **late.as_report("late"),
            **pace.as_report("pace"),
            **self._input_lengths.as_report("input_length"),
            **self._output_lengths.as_report("output_length"),
        }
