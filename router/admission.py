"""Who may go on to the engines, who waits for its turn, and who is refused (pure).

Requests wait at the endpoint and not in the engines' queues, which know neither priorities nor keys and compute what
nobody can use in time any more. The endpoint lets so many prompt tokens through as get their first output token within
a part of the objective; the others wait in order of priority and, within one, of fair shares of the keys (start-time
fair queueing, Goyal, Vin and Cheng, SIGCOMM 1996). Who would get its first token too late is refused when it comes.
"""

import heapq
import itertools
import math
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from router.capacity import Capacity
from router.rate_limit import KeyLimits, RateLimits

# Of the objective: how long prompts may take from here to their first token, and with the wait before that.
_WINDOW_FRAC, _PREDICTED_FRAC = 0.4, 0.8
# Nobody is refused before somebody has waited for so much of the objective: what was learned at rest is too low.
_EVIDENCE_FRAC = 0.15
# Each prefill replica always has so many prompt tokens, or one prompt: what it had so far may have been too little.
_LEAST_WINDOW_TOKENS = 2048
_MOST_RETRY_AFTER_S = 60.0
# Of each answer in their mean length.
_ANSWER_WEIGHT = 0.05


class Priority(IntEnum):
    """Who goes first; the header ``X-Tandem-Priority`` names one in lower case."""

    HIGH = 0
    NORMAL = 1
    LOW = 2


class AdmissionConfig(BaseModel):
    """Bounds of admission, of each replica of the endpoint on its own where nothing else is said."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    ttft_s: float | None = Field(
        None,
        gt=0.0,
        le=250.0,
        description="A request that would wait longer for its first token is refused, or dropped before it is "
        "computed. Left out, nobody waits here nor is refused for what it would wait.",
    )
    ttft_s_per_input_token: float = Field(
        0.0, ge=0.0, description="A prompt that takes longer at this pace has that much instead of ttft_s."
    )
    tpot_s: float | None = Field(
        None, gt=0.0, le=8.0, description="So many streams go on at a time as keep this time per output token."
    )
    max_queued_tokens: int | None = Field(
        None, ge=1, description="Prompt tokens that may wait here, by 4 bytes of a prompt's text each."
    )
    max_requests: int = Field(2000, ge=1, le=100_000, description="Requests that may be here at a time, in all.")
    key: KeyLimits = KeyLimits()
    keys: dict[str, KeyLimits] = Field(
        default_factory=dict, description="By an API key's name, what holds for it instead of `key`."
    )

    @model_validator(mode="after")
    def _check_objectives(self) -> Self:
        for name in ("tpot_s", "max_queued_tokens"):
            value = getattr(self, name)
            if value is not None and self.ttft_s is None:
                raise ValueError(
                    f"{name} is {value:g} and ttft_s is not given, without which nobody waits here: give both"
                )
        return self

    def limits(self, key: str | None) -> KeyLimits:
        """What holds for a key; ``None``: nobody's."""
        return self.key if key is None else self.keys.get(key, self.key)


@dataclass(slots=True, eq=False, kw_only=True)
class Asked:
    """One request.

    Attributes:
        tokens: of its prompt, about.
        most_output_tokens: that it asks for, at least one; ``None``: it does not say.
        is_stream: whether its first token is seen when it comes.
        key: the name of its API key.
        priority: what it asks for.
        answers: how many it wants to its prompt, at least one.
    """

    tokens: int
    most_output_tokens: int | None
    is_stream: bool
    key: str | None
    priority: Priority
    answers: int = 1
    arrived_s: float = 0.0
    deadline_s: float = math.inf
    order: tuple[int, float, int] = (0, 0.0, 0)
    is_waiting: bool = False
    passed_s: float | None = None
    first_s: float | None = None
    output_tokens: int = 0
    has_left: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a request does not go on, in words for its client, and when it may come again."""

    reason: str
    message: str
    retry_after_s: float


@dataclass(slots=True)
class _Class:
    """The virtual time of one priority, and of each key in it when its next request begins."""

    now: float = 0.0
    next: dict[str | None, float] = field(default_factory=dict)


class Admission:
    """The requests of one replica of the endpoint."""

    def __init__(self, config: AdmissionConfig, *, replicas: int, prefill_replicas: int, now_s: float) -> None:
        """Begin with nobody here.

        Args:
            config: the bounds.
            replicas: of the endpoint, among which the engines and the rates of keys are shared out.
            prefill_replicas: of all groups, at least.
            now_s: by any clock that the other methods share.
        """
        self._config = config
        self._least_prompts = prefill_replicas / replicas
        self._window_s = _WINDOW_FRAC * (config.ttft_s or 0.0)
        self._rates = RateLimits(config.limits, replicas)
        self._capacity = Capacity(config.tpot_s, now_s)
        self._classes = {priority: _Class() for priority in Priority}
        self._numbers = itertools.count()
        self._waiting: list[tuple[tuple[int, float, int], Asked]] = []
        self._held: dict[Asked, None] = {}  # the same, oldest first
        self._unseen: dict[Asked, None] = {}  # answers in one piece whose first token may not show, oldest first
        self._waiting_tokens = 0
        self._window_tokens = self._window_prompts = 0
        self._here = self._passed = 0
        self._answer_tokens = 128.0

    @property
    def here(self) -> int:
        """Requests that wait or have gone on."""
        return self._here

    @property
    def waiting(self) -> int:
        """Requests that wait for their turn."""
        return len(self._held)

    def refuse(self, key: str | None, coming: int, now_s: float) -> Refusal | None:
        """Whether a request of this key is refused whatever it asks for, before its body is read.

        Args:
            key: the name of its API key.
            coming: how many requests' bodies are being read.
            now_s: when.
        """
        if refusal := self._refuse_full(self._here + coming):
            return refusal
        over = self._rates.over(key, now_s)
        return None if over is None else _refusal("key", over.what, over.after_s)

    def arrive(self, asked: Asked, now_s: float) -> Refusal | None:
        """Take a request in, to wait until ``passed`` names it; or refuse it."""
        self._capacity.learn(now_s)
        if refusal := self._refuse_full(self._here):
            return refusal
        cost = asked.tokens + asked.answers * min(asked.most_output_tokens or math.inf, self._answer_tokens)
        limits = self._config.limits(asked.key)
        asked.arrived_s = now_s
        asked.order = self._order(asked, limits)
        if refusal := self._refuse_late(asked, now_s):
            return refusal
        if (over := self._rates.enter(asked.key, asked.tokens, now_s)) is not None:
            return _refusal("key", over.what, over.after_s)
        level = self._classes[Priority(asked.order[0])]
        level.next[asked.key] = asked.order[1] + cost / limits.share
        self._here += 1
        self._waiting_tokens += asked.tokens
        asked.is_waiting = True
        self._held[asked] = None
        heapq.heappush(self._waiting, (asked.order, asked))
        return None

    def passed(self, now_s: float) -> list[Asked]:
        """Those that go on now, to be asked for after each call of another method."""
        self._capacity.learn(now_s)
        gone = []
        while (first := self._first()) is not None and self._has_room(first):
            heapq.heappop(self._waiting)
            level = self._classes[Priority(first.order[0])]
            level.now = first.order[1]
            self._stop_waiting(first)
            first.passed_s = now_s
            if not first.is_stream:
                self._unseen[first] = None
            self._window_tokens += first.tokens
            self._window_prompts += 1
            self._passed += first.answers
            gone.append(first)
        if self._first() is None:
            self._capacity.idle()
            for level in self._classes.values():
                level.next.clear()
        return gone

    def late(self, now_s: float) -> list[Asked]:
        """Those that would get their first token too late even if they went on now, dropped; for while some wait."""
        for unseen in list(self._unseen):
            if now_s - (unseen.passed_s or 0.0) < (self._config.ttft_s or math.inf):
                break
            self.first(unseen, now_s)
        self._capacity.learn(now_s)
        ahead_s = min(self._window_s, self._window_tokens / (self._capacity.tokens_s or math.inf))
        late = [asked for _, asked in self._waiting if asked.is_waiting and now_s + ahead_s > asked.deadline_s]
        for asked in late:
            self.leave(asked, now_s)
        if late:
            self._waiting = [entry for entry in self._waiting if entry[1].is_waiting]
            heapq.heapify(self._waiting)
        return late

    def first(self, asked: Asked, now_s: float) -> None:
        """A request has got its first output token, if that was not known."""
        if asked.first_s is None:
            asked.first_s = now_s
            self._unseen.pop(asked, None)
            self._leave_window(asked)
            self._capacity.first(asked.tokens)
            self._capacity.streams(asked.answers, now_s, is_seen=asked.is_stream)

    def output(self, asked: Asked, tokens: int, now_s: float) -> None:
        """So many output tokens of a request have come; of an answer in one piece all of them."""
        self._rates.spend(asked.key, tokens)
        asked.output_tokens += tokens
        is_first = asked.first_s is None
        self.first(asked, now_s)
        if not asked.is_stream and not is_first:
            self._capacity.output(tokens, asked.answers * (now_s - (asked.first_s or now_s)))
        elif not is_first:  # the first tokens' time is not their pace
            self._capacity.output(tokens)

    def leave(self, asked: Asked, now_s: float) -> None:
        """A request has ended, or its client has gone; of one that was dropped nothing is left to do."""
        if asked.has_left:
            return
        asked.has_left = True
        self._here -= 1
        self._rates.leave(asked.key)
        self._unseen.pop(asked, None)
        if asked.is_waiting:
            self._stop_waiting(asked)
            return
        if asked.output_tokens:
            self._answer_tokens += _ANSWER_WEIGHT * (asked.output_tokens / asked.answers - self._answer_tokens)
        self._passed -= asked.answers
        if asked.first_s is not None:
            self._capacity.streams(-asked.answers, now_s, is_seen=asked.is_stream)
        else:
            self._leave_window(asked)

    def late_refusal(self, asked: Asked, now_s: float) -> Refusal:
        """What one of ``late`` is told."""
        waited_s, ttft_s = now_s - asked.arrived_s, asked.deadline_s - asked.arrived_s
        what = f"it waited {waited_s:.1f} s and would not have its first token within {ttft_s:g} s (admission.ttft_s)"
        return _refusal("late", what, self._wait_s(asked) - _PREDICTED_FRAC * ttft_s)

    def _order(self, asked: Asked, limits: KeyLimits) -> tuple[int, float, int]:
        priority = max(asked.priority, Priority[limits.highest_priority.upper()])
        level = self._classes[priority]
        return (int(priority), max(level.now, level.next.get(asked.key, 0.0)), next(self._numbers))

    def _refuse_full(self, here: int) -> Refusal | None:
        if here < self._config.max_requests:
            return None
        return _refusal("requests", f"{here} requests are here (admission.max_requests)", 1.0)

    def _refuse_late(self, asked: Asked, now_s: float) -> Refusal | None:
        most = self._config.max_queued_tokens
        if most is not None and self._waiting_tokens and self._waiting_tokens + asked.tokens > most:
            what = f"{self._waiting_tokens} prompt tokens wait, with this one more than {most}"
            return _refusal("queued_tokens", f"{what} (admission.max_queued_tokens)", self._wait_s(asked))
        if self._config.ttft_s is None:
            return None
        ttft_s = max(self._config.ttft_s, self._config.ttft_s_per_input_token * asked.tokens)
        asked.deadline_s = now_s + ttft_s
        oldest = next(iter(self._held), None)
        if oldest is None or now_s - oldest.arrived_s < _EVIDENCE_FRAC * self._config.ttft_s:
            return None
        beyond_s = self._wait_s(asked) - _PREDICTED_FRAC * ttft_s
        if beyond_s <= 0.0:
            return None
        what = f"its first token would come later than after {ttft_s:g} s (admission.ttft_s)"
        return _refusal("predicted_ttft", what, beyond_s)

    def _wait_s(self, asked: Asked) -> float:
        """How long a request would wait for its first token by what is before it; 0 while nothing is known."""
        rate = self._capacity.tokens_s
        if rate is None:
            return 0.0
        ahead = sum(other.tokens for order, other in self._waiting if other.is_waiting and order < asked.order)
        return (self._window_tokens + ahead) / max(rate, 1e-9)

    def _has_room(self, asked: Asked) -> bool:
        if self._config.ttft_s is None or not self._passed:
            return True
        most = self._capacity.most_streams
        if most is not None and self._passed >= most:
            return False
        rate = self._capacity.tokens_s
        if rate is None or self._window_prompts < self._least_prompts:
            return True
        return self._window_tokens + asked.tokens <= max(
            _LEAST_WINDOW_TOKENS * self._least_prompts, rate * self._window_s
        )

    def _first(self) -> Asked | None:
        while self._waiting and not self._waiting[0][1].is_waiting:
            heapq.heappop(self._waiting)
        return self._waiting[0][1] if self._waiting else None

    def _stop_waiting(self, asked: Asked) -> None:
        asked.is_waiting = False
        del self._held[asked]
        self._waiting_tokens -= asked.tokens

    def _leave_window(self, asked: Asked) -> None:
        self._window_tokens -= asked.tokens
        self._window_prompts -= 1


def _refusal(reason: str, what: str, retry_after_s: float) -> Refusal:
    after_s = float(math.ceil(min(_MOST_RETRY_AFTER_S, max(1.0, retry_after_s))))
    return Refusal(reason=reason, message=f"{what}; send it again after {after_s:g} s", retry_after_s=after_s)
