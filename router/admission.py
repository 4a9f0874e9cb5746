"""Who may go on to the engines, who waits for its turn, and who is refused (pure).

Requests wait at the endpoint and not in the engines' queues, which know neither priorities nor keys and compute what
nobody can use in time any more. The endpoint lets so many prompt tokens through as get their first output token within
a part of the objective; the others wait in order of priority and, within one, of fair shares of the keys. Who would
get its first token too late is refused when it comes.
"""

import heapq
import itertools
import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from router.capacity import Capacity, Mark
from router.fair_shares import FairShares
from router.rate_limit import KeyLimits, RateLimits

# Of the objective: how long prompts may take from here to their first token, and with the wait before that.
_WINDOW_FRAC, _PREDICTED_FRAC = 0.4, 0.8
# Of the time that they should take: nobody follows them while the oldest takes longer than this and its own.
_OVERDUE_FRAC = 1.5
# Nobody is refused before somebody has waited for so much of the objective: what was learned at rest is too low.
_EVIDENCE_FRAC = 0.15
# Each prefill replica always has so many prompt tokens, or one prompt: what it had so far may have been too little.
_LEAST_WINDOW_TOKENS = 2048
_MOST_RETRY_AFTER_S = 60.0
# Of each answer in their mean length.
_ANSWER_WEIGHT = 0.05
# Of max_requests, for each priority above a request's own.
_ROOM_FRAC = 0.05
# A stream whose reader takes longer than this, and this part of its time, says nothing of the engines' pace.
_SLOW_READER_S, _SLOW_READER_FRAC = 0.5, 0.1


class Priority(IntEnum):
    """Who goes first; the header ``X-Tandem-Priority`` names one in lower case."""

    HIGH = 0
    NORMAL = 1
    LOW = 2


class ObjectivesConfig(BaseModel):
    """What users are to wait at most; who would wait longer is refused."""

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
        None,
        ge=1,
        description="Prompt tokens that may wait here, by 4 bytes of a prompt's text each. Who is last in the order "
        "makes room for who comes before it, and a longer prompt waits alone.",
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


class AdmissionConfig(ObjectivesConfig):
    """Bounds of admission, of each replica of the endpoint on its own where nothing else is said."""

    max_requests: int = Field(
        2000,
        ge=1,
        le=100_000,
        description="Requests that may be here at a time, in all; the last 5 % are for high priority, and the 5 % "
        "before them not for low.",
    )
    key: KeyLimits = KeyLimits()
    keys: dict[str, KeyLimits] = Field(
        default_factory=dict, description="By an API key's name, what holds for it instead of `key`."
    )

    def with_objectives(self, objectives: ObjectivesConfig | None) -> "AdmissionConfig":
        """The same bounds with other objectives."""
        return self if objectives is None else self.model_copy(update=objectives.model_dump())

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
        answers: how many it wants to its prompts, at least one.
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
    first: Mark | None = None
    output_tokens: int = 0
    cost: float = 0.0
    is_displaced: bool = False
    is_paced: bool = False
    paused_at_s: float | None = None
    paused_s: float = 0.0
    has_left: bool = False

    @property
    def has_first(self) -> bool:
        """Whether its first token is known to have come."""
        return self.first is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a request does not go on, in words for its client, and when it may come again."""

    reason: str
    message: str
    retry_after_s: float


class Admission:
    """The requests of one replica of the endpoint."""

    def __init__(
        self,
        config: AdmissionConfig,
        rates: RateLimits | None = None,
        *,
        replicas: int,
        prefill_replicas: int,
        now_s: float,
    ) -> None:
        """Begin with nobody here.

        Args:
            config: the bounds.
            rates: of keys, where they hold for requests to others too.
            replicas: of the endpoint, among which the engines and the rates of keys are shared out.
            prefill_replicas: of all groups, at least.
            now_s: by any clock that the other methods share.
        """
        self._config = config
        self._least_prompts = prefill_replicas / replicas
        self._window_s = _WINDOW_FRAC * (config.ttft_s or 0.0)
        self._rates = rates or RateLimits(config.limits, replicas)
        self._capacity = Capacity(config.tpot_s, now_s)
        self._shares = {priority: FairShares() for priority in Priority}
        self._numbers = itertools.count()
        self._waiting: list[tuple[tuple[int, float, int], Asked]] = []
        self._held: dict[Asked, None] = {}  # the same, oldest first
        self._window: dict[Asked, None] = {}  # those on their way to their first token, oldest first
        self._displaced: list[Asked] = []
        self._waiting_tokens = self._window_tokens = 0
        self._first_s = now_s  # when a prompt last got its first token
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

    def refuse(self, key: str | None, priority: Priority, coming: int, now_s: float) -> Refusal | None:
        """Whether a request of this key is refused whatever it asks for, before its body is read.

        Args:
            key: the name of its API key.
            priority: what it asks for.
            coming: how many requests' bodies are being read.
            now_s: when.
        """
        if refusal := self._refuse_full(self._here + coming, self._priority(key, priority)):
            return refusal
        over = self._rates.over(key, now_s)
        return None if over is None else _refusal("key", over.what, over.after_s)

    def refused(self, key: str | None, now_s: float) -> None:
        """The body of a request of this key has been refused."""
        self._rates.refused(key, now_s)

    def arrive(self, asked: Asked, now_s: float) -> Refusal | None:
        """Take a request in, to wait until ``passed`` names it; or refuse it."""
        self._capacity.learn(now_s)
        priority = self._priority(asked.key, asked.priority)
        if refusal := self._refuse_full(self._here, priority):
            return refusal
        shares = self._shares[priority]
        asked.arrived_s = now_s
        asked.order = (int(priority), shares.start(asked.key), next(self._numbers))
        if refusal := self._refuse_crowded(asked, now_s) or self._refuse_late(asked, now_s):
            return refusal
        if (over := self._rates.enter(asked.key, asked.tokens, now_s)) is not None:
            return _refusal("key", over.what, over.after_s)
        asked.cost = asked.tokens + asked.answers * min(asked.most_output_tokens or math.inf, self._answer_tokens)
        shares.charge(asked.key, asked.order[1], asked.cost / self._config.limits(asked.key).share)
        self._here += 1
        self._waiting_tokens += asked.tokens
        asked.is_waiting = True
        self._held[asked] = None
        heapq.heappush(self._waiting, (asked.order, asked))
        self._displace(asked, now_s)
        return None

    def passed(self, now_s: float) -> list[Asked]:
        """Those that go on now, to be asked for after each call of another method."""
        self._capacity.learn(now_s)
        gone = []
        while (first := self._next()) is not None and self._has_room(first, now_s):
            heapq.heappop(self._waiting)
            self._shares[Priority(first.order[0])].begin(first.order[1])
            self._stop_waiting(first)
            first.passed_s = now_s
            self._window[first] = None
            self._window_tokens += first.tokens
            self._capacity.busy(len(self._window) / self._least_prompts, now_s)
            self._passed += first.answers
            self._capacity.answers(first.answers, now_s)
            gone.append(first)
        if self._next() is None:
            self._capacity.idle()
            for shares in self._shares.values():
                shares.forget()
        return gone

    def late(self, now_s: float) -> list[Asked]:
        """Those that are dropped, to be asked for while some wait.

        They would get their first token too late even if they went on now, or others needed their room.
        """
        self._forget_unseen(now_s)
        self._capacity.learn(now_s)
        ahead_s = min(self._window_s, self._window_takes_s(now_s))
        late = [
            asked
            for _, asked in self._waiting
            if asked.is_waiting and now_s + ahead_s + self._own_s(asked, now_s) > asked.deadline_s
        ]
        for asked in late:
            self.leave(asked, now_s)
        if late:
            self._waiting = [entry for entry in self._waiting if entry[1].is_waiting]
            heapq.heapify(self._waiting)
        displaced, self._displaced = self._displaced, []
        return [*displaced, *late]

    def first(self, asked: Asked, now_s: float) -> None:
        """A request has got its first output token, if that was not known."""
        if asked.first is not None:
            return
        asked.first = self._capacity.mark(now_s)
        self._leave_window(asked, now_s)
        self._first_s = now_s
        self._capacity.first(asked.tokens)
        if asked.is_stream:
            asked.is_paced = True
            self._capacity.streams(asked.answers, now_s)

    def output(self, asked: Asked, tokens: int, now_s: float) -> None:
        """So many output tokens of a request have come; of an answer in one piece all of them."""
        self._rates.spend(asked.key, tokens)
        asked.output_tokens += tokens
        if asked.first is None:
            self.first(asked, now_s)
        elif asked.is_paced:
            self._capacity.output(tokens)
        elif not asked.is_stream:
            self._capacity.whole(tokens, asked.answers, asked.first, now_s)

    def pause(self, asked: Asked, now_s: float) -> None:
        """What has come of a stream waits for its reader from now on, and says nothing of the engines' pace."""
        if asked.is_paced:
            self._stop_pace(asked, now_s)
            asked.paused_at_s = now_s

    def go_on(self, asked: Asked, now_s: float) -> None:
        """Its reader has taken it; of one that is slow, tokens have gathered meanwhile, at no pace."""
        if asked.paused_at_s is None or asked.first is None:
            return
        asked.paused_s += now_s - asked.paused_at_s
        asked.paused_at_s = None
        if asked.paused_s <= _SLOW_READER_S + _SLOW_READER_FRAC * (now_s - asked.first.at_s):
            asked.is_paced = True
            self._capacity.streams(asked.answers, now_s)

    def leave(self, asked: Asked, now_s: float) -> None:
        """A request has ended, or its client has gone; of one that was dropped nothing is left to do."""
        if asked.has_left:
            return
        asked.has_left = True
        self._here -= 1
        self._rates.leave(asked.key)
        if asked.is_waiting:
            self._stop_waiting(asked)
            self._rates.refund(asked.key, asked.tokens)
            self._correct(asked, 0.0)
            return
        self._correct(asked, asked.tokens + asked.output_tokens)
        if asked.output_tokens:
            self._answer_tokens += _ANSWER_WEIGHT * (asked.output_tokens / asked.answers - self._answer_tokens)
        self._passed -= asked.answers
        self._capacity.answers(-asked.answers, now_s)
        self._leave_window(asked, now_s)
        if asked.is_paced:
            self._stop_pace(asked, now_s)

    def late_refusal(self, asked: Asked, now_s: float) -> Refusal:
        """What one of ``late`` is told."""
        if asked.is_displaced:
            what = "others that come before it in the order took its room (admission.max_queued_tokens)"
            return _refusal("queued_tokens", what, self._wait_s(asked, now_s))
        waited_s, ttft_s = now_s - asked.arrived_s, asked.deadline_s - asked.arrived_s
        what = f"it waited {waited_s:.1f} s and would not have its first token within {ttft_s:g} s (admission.ttft_s)"
        return _refusal("late", what, self._wait_s(asked, now_s) - _PREDICTED_FRAC * ttft_s)

    def _priority(self, key: str | None, priority: Priority) -> Priority:
        return max(priority, Priority[self._config.limits(key).highest_priority.upper()])

    def _refuse_full(self, here: int, priority: Priority) -> Refusal | None:
        most = self._config.max_requests
        most_of_priority = most - int(_ROOM_FRAC * most) * priority
        if here < most_of_priority:
            return None
        what = f"{here} requests are here, and one of {priority.name.lower()} priority enters below {most_of_priority}"
        return _refusal("requests", f"{what} (admission.max_requests is {most})", 1.0)

    def _refuse_crowded(self, asked: Asked, now_s: float) -> Refusal | None:
        most = self._config.max_queued_tokens
        if most is None or self._waiting_tokens + asked.tokens <= most:
            return None
        if not (ahead := self._ahead(asked)) or ahead + asked.tokens <= most:
            return None
        what = f"{ahead} prompt tokens wait before it, with this one more than {most} (admission.max_queued_tokens)"
        return _refusal("queued_tokens", what, self._wait_s(asked, now_s))

    def _displace(self, asked: Asked, now_s: float) -> None:
        """Make room for a request, by the last in the order."""
        most = self._config.max_queued_tokens
        while most is not None and self._waiting_tokens > most:
            last = max(self._held, key=lambda other: other.order)
            if last is asked:
                return
            last.is_displaced = True
            self._displaced.append(last)
            self.leave(last, now_s)

    def _refuse_late(self, asked: Asked, now_s: float) -> Refusal | None:
        if self._config.ttft_s is None:
            return None
        ttft_s = max(self._config.ttft_s, self._config.ttft_s_per_input_token * asked.tokens)
        asked.deadline_s = now_s + ttft_s
        if not self._is_evident(now_s):
            return None
        beyond_s = self._wait_s(asked, now_s) + self._own_s(asked, now_s) - _PREDICTED_FRAC * ttft_s
        if beyond_s <= 0.0:
            return None
        what = f"its first token would come later than after {ttft_s:g} s (admission.ttft_s)"
        return _refusal("predicted_ttft", what, beyond_s)

    def _is_evident(self, now_s: float) -> bool:
        """Whether somebody has waited for long enough to believe that engines can do no more."""
        oldest = next(iter(self._held), None)
        return oldest is not None and now_s - oldest.arrived_s >= _EVIDENCE_FRAC * (self._config.ttft_s or math.inf)

    def _wait_s(self, asked: Asked, now_s: float) -> float:
        """How long a request would wait for what is before it; 0 while nothing is known."""
        return self._window_takes_s(now_s) + self._ahead(asked) / (self._capacity.tokens_s or math.inf)

    def _window_takes_s(self, now_s: float) -> float:
        """How long those take that are on their way, of the oldest of which a part has been computed."""
        rate = self._capacity.tokens_s
        oldest = next(iter(self._window), None)
        if rate is None or oldest is None:
            return 0.0
        computed = rate * (now_s - max(self._first_s, oldest.passed_s or 0.0))
        return (self._window_tokens - min(oldest.tokens, computed)) / rate

    def _own_s(self, asked: Asked, now_s: float) -> float:
        """How long its own prompt would take; 0 while no more than a rate at rest is known."""
        if not (self._is_evident(now_s) and self._capacity.is_known(now_s)):
            return 0.0
        return asked.tokens / (self._capacity.tokens_s or math.inf)

    def _ahead(self, asked: Asked) -> int:
        return sum(other.tokens for order, other in self._waiting if other.is_waiting and order < asked.order)

    def _has_room(self, asked: Asked, now_s: float) -> bool:
        if self._config.ttft_s is None or not self._passed:
            return True
        most = self._capacity.most_streams
        if most is not None and self._passed >= most:
            self._capacity.hold_back()
            return False
        if len(self._window) < self._least_prompts:
            return True
        rate = self._capacity.tokens_s
        if self._is_overdue(rate or math.inf, now_s):
            return False
        return rate is None or self._window_tokens + asked.tokens <= max(
            _LEAST_WINDOW_TOKENS * self._least_prompts, rate * self._window_s
        )

    def _is_overdue(self, rate: float, now_s: float) -> bool:
        """Whether the oldest prompt on its way takes longer than all of them should, whatever was learned.

        Its own time is that of one prefill replica.
        """
        oldest = next(iter(self._window), None)
        if oldest is None or oldest.passed_s is None:
            return False
        own_s = oldest.tokens * self._least_prompts / rate
        return now_s - oldest.passed_s > _OVERDUE_FRAC * self._window_s + own_s

    def _next(self) -> Asked | None:
        while self._waiting and not self._waiting[0][1].is_waiting:
            heapq.heappop(self._waiting)
        return self._waiting[0][1] if self._waiting else None

    def _stop_waiting(self, asked: Asked) -> None:
        asked.is_waiting = False
        del self._held[asked]
        self._waiting_tokens -= asked.tokens

    def _stop_pace(self, asked: Asked, now_s: float) -> None:
        asked.is_paced = False
        self._capacity.streams(-asked.answers, now_s)

    def _leave_window(self, asked: Asked, now_s: float) -> None:
        if asked in self._window:
            del self._window[asked]
            self._window_tokens -= asked.tokens
            self._capacity.busy(len(self._window) / self._least_prompts, now_s)

    def _forget_unseen(self, now_s: float) -> None:
        """Answers in one piece that tell nothing by the time at which their first token is due."""
        due_s = now_s - (self._config.ttft_s or math.inf)
        for asked in list(itertools.takewhile(lambda one: (one.passed_s or 0.0) <= due_s, self._window)):
            if not asked.is_stream:
                self._leave_window(asked, now_s)

    def _correct(self, asked: Asked, cost: float) -> None:
        shares = self._shares[Priority(asked.order[0])]
        shares.correct(asked.key, (cost - asked.cost) / self._config.limits(asked.key).share)


def _refusal(reason: str, what: str, retry_after_s: float) -> Refusal:
    after_s = float(math.ceil(min(_MOST_RETRY_AFTER_S, max(1.0, retry_after_s))))
    return Refusal(reason=reason, message=f"{what}; send it again after {after_s:g} s", retry_after_s=after_s)
