"""Simulates overload in steps of 20 ms: replicas of the endpoint admit requests to prefill and decode engines."""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from router.admission import Admission, QueuedRequest
from router.admission_config import AdmissionConfig, Priority

_STEP_S = 0.02
_LATE_STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One request: tokens of its prompt, those of them that prefill must compute, and its output tokens."""

    tokens: int
    computed_tokens: int
    output_tokens: int


def short(rng: random.Random) -> Shape:
    """Short prompts; decode has the most work."""
    tokens = rng.randrange(50, 400)
    return Shape(tokens=tokens, computed_tokens=tokens, output_tokens=rng.randrange(50, 300))


def mixed(rng: random.Random) -> Shape:
    """A tenth of the prompts are long; both pools have much work."""
    tokens = rng.randrange(8000, 30_000) if rng.random() < 0.1 else rng.randrange(50, 1500)
    return Shape(tokens=tokens, computed_tokens=tokens, output_tokens=rng.randrange(20, 300))


def cached(rng: random.Random) -> Shape:
    """Seven prompts in ten are cached but for the last question; prefill has the most work."""
    tokens = rng.randrange(500, 16_000)
    computed = tokens if rng.random() < 0.3 else 200
    return Shape(tokens=tokens, computed_tokens=computed, output_tokens=rng.randrange(30, 150))


@dataclass(slots=True, kw_only=True)
class Engines:
    """Prefill replicas that take one prompt after the other, and decode replicas that share all streams.

    Attributes:
        prefill: prefill replicas.
        prompt_tokens_per_s: prompt tokens that one prefill replica computes per second.
        decode: decode replicas.
        step_s: time of a decode step without streams.
        stream_s: time that each stream of a replica adds to its step.
    """

    prefill: int
    prompt_tokens_per_s: float
    decode: float
    step_s: float
    stream_s: float

    def requests_per_s(self, shape: Callable[[random.Random], Shape], tpot_s: float) -> float:
        """Highest request rate of both pools at which decode keeps ``tpot_s``."""
        rng = random.Random(9)
        shapes = [shape(rng) for _ in range(2000)]
        computed = sum(one.computed_tokens for one in shapes) / len(shapes)
        output = sum(one.output_tokens for one in shapes) / len(shapes)
        streams = self.decode * (tpot_s - self.step_s) / self.stream_s
        return min(self.prefill * self.prompt_tokens_per_s / computed, streams / (output * tpot_s))


@dataclass(slots=True)
class _Sent:
    shape: Shape
    pool: Admission
    sent_s: float
    left_s: float = 0.0
    first_s: float = 0.0
    fresh: float = 1.0
    produced: int = 0


@dataclass(slots=True)
class Seconds:
    """Requests that arrived, were refused, or were answered within their objectives, by the second of that event."""

    asked: list[int] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    good: list[int] = field(default_factory=list)

    def good_per_s(self, first: int, last: int) -> float:
        """Mean rate of answers within both objectives."""
        return sum(self.good[first:last]) / (last - first)

    def refused_frac(self, first: int, last: int) -> float:
        """Refused requests as a share of the requests that arrived."""
        return sum(self.refused[first:last]) / sum(self.asked[first:last])


def run(  # noqa: C901 (one loop over time; its parts would share all of its state)
    shape: Callable[[random.Random], Shape],
    engines: Engines,
    config: AdmissionConfig,
    loads: Sequence[tuple[float, float]],
    *,
    seconds: int,
    is_stream: bool = True,
    replicas: int = 1,
    stalls: tuple[float, float] = (0.0, 0.0),
    scales: tuple[float, float] | None = None,
    seed: int = 0,
) -> Seconds:
    """Send requests at random times.

    Args:
        shape: draws a request.
        engines: the engines at the start.
        config: the objectives.
        loads: begin in seconds, and load as a multiple of the highest rate of the engines at the start.
        seconds: duration.
        is_stream: admission sees each token as it comes, and not only the end of an answer.
        replicas: replicas of the endpoint.
        stalls: begin and end, in seconds, of a time in which engines stand still.
        scales: time in seconds from which on the number of engines is multiplied, and the factor.
        seed: draws arrivals and shapes.
    """
    assert config.ttft_s is not None
    assert config.tpot_s is not None
    rng, most_per_s = random.Random(seed), engines.requests_per_s(shape, config.tpot_s)
    pools = [Admission(config, replicas=replicas, prefill_replicas=engines.prefill, now_s=0.0) for _ in range(replicas)]
    seen = Seconds(*([0] * seconds for _ in range(3)))
    sent: dict[QueuedRequest, _Sent] = {}
    queue: deque[QueuedRequest] = deque()
    computing: list[QueuedRequest] = []
    streams: dict[QueuedRequest, None] = {}
    prefill, decode, next_s = engines.prefill, engines.decode, 0.0
    for step in range(round(seconds / _STEP_S)):
        now_s = step * _STEP_S
        second = int(now_s)
        load = [factor for from_s, factor in loads if from_s <= now_s][-1]
        if scales is not None and now_s >= scales[0]:
            prefill, decode = max(1, round(engines.prefill * scales[1])), engines.decode * scales[1]
        while next_s <= now_s:
            next_s += rng.expovariate(load * most_per_s)
            drawn, pool = shape(rng), rng.choice(pools)
            one = QueuedRequest(
                tokens=drawn.tokens, most_output_tokens=None, is_stream=is_stream, key=None, priority=Priority.NORMAL
            )
            seen.asked[second] += 1
            if pool.arrive(one, now_s) is None:
                sent[one] = _Sent(drawn, pool, now_s, drawn.computed_tokens / engines.prompt_tokens_per_s)
            else:
                seen.refused[second] += 1
        for pool in pools:
            if pool.waiting and step % _LATE_STEPS == 0:
                for one in pool.late(now_s):
                    seen.refused[second] += 1
                    del sent[one]
            queue.extend(pool.passed(now_s))
        if stalls[0] <= now_s < stalls[1]:
            continue
        room_s = [_STEP_S] * max(prefill, len(computing))
        for index, left_s in enumerate(room_s):
            while left_s > 0.0:
                if index >= len(computing):
                    if index >= prefill or not queue:
                        break
                    computing.append(queue.popleft())
                one = computing[index]
                of = sent[one]
                used_s = min(left_s, of.left_s)
                of.left_s -= used_s
                left_s -= used_s
                if of.left_s > 1e-9:
                    break
                of.first_s, of.produced = now_s, 1
                streams[one] = None
                if is_stream:
                    of.pool.output(one, 1, now_s)
                else:
                    of.pool.note_first_token(one, now_s)
                if queue and index < prefill:
                    computing[index] = queue.popleft()
                else:
                    computing[index] = computing[-1]
                    computing.pop()
        pace_s = engines.step_s + engines.stream_s * len(streams) / decode
        for one in list(streams):
            of = sent[one]
            of.fresh += _STEP_S / pace_s
            tokens = min(int(of.fresh), of.shape.output_tokens - of.produced)
            of.fresh -= int(of.fresh)
            of.produced += tokens
            if tokens and is_stream:
                of.pool.output(one, tokens, now_s)
            if of.produced < of.shape.output_tokens:
                continue
            if not is_stream:
                of.pool.output(one, of.produced, now_s)
            of.pool.leave(one, now_s)
            del streams[one], sent[one]
            tpot_s = (now_s - of.first_s) / of.shape.output_tokens
            seen.good[second] += of.first_s - of.sent_s <= config.ttft_s and tpot_s <= config.tpot_s
    return seen
