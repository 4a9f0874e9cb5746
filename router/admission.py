"""Which requests to a model go on to the engines, which wait, and which are refused (pure).

Requests wait at the endpoint and not in the engines' queues: these queues know neither priorities nor keys, and engines
also compute answers that come too late.

The *window* is the set of requests that have gone on to the engines and have no output token yet. It holds as many
prompt tokens as the engines compute within a share of the TTFT objective, ``_WINDOW_FRAC``. The other requests wait in
order of priority. Within a priority, API keys share the engines fairly. A request whose first token would come too
late is refused when it arrives.

The *rate* is the number of prompt tokens per second that the engines compute for this replica of the endpoint. The
*pace* is the time per output token of the streams. ``router.capacity`` learns the rate, and learns from the pace how
many answers the engines can produce at a time.
"""

import itertools
import math
from bisect import insort
from dataclasses import dataclass
from operator import attrgetter

from router.admission_config import AdmissionConfig, Priority
from router.capacity import Capacity, Mark
from router.demand import Demand
from router.fair_shares import FairShares
from router.request_limits import Refusal, RequestLimits, refusal

# Share of ttft_s that prompts may take from admission to their first token. The value's reason is not recorded. A
# larger one leaves less of the objective for the wait at the endpoint, where priorities count. A smaller one lets the
# engines run out of prompts between two requests.
_WINDOW_FRAC = 0.4
# Share of a request's TTFT objective that its predicted wait and prefill may take together. The rest is for errors of
# the prediction. A larger value lets more requests wait that are dropped later. A smaller one refuses more requests
# that would have met the objective (docs/decisions/request-path.md 152).
_PREDICTED_FRAC = 0.8
# Multiple of the window's time, which is _WINDOW_FRAC x ttft_s. No request goes on while the window's oldest prompt
# takes longer than this multiple plus the prefill of that prompt. The learned rate is too high then, for example after
# prompts that a cache held. The value's reason is not recorded. A larger value stops later; a smaller one stops at
# ordinary variations of prefill.
_OVERDUE_FRAC = 1.5
# Share of ttft_s that the oldest waiting request must have waited before any request is refused as too late. Until
# then the rate may be too low, since it may have been learned under a light load. Without this rule 6 % of the requests
# were refused at half load, with it 1 % (simulated). A larger value refuses later.
_EVIDENCE_FRAC = 0.15
# Prompt tokens that each prefill replica may have in the window whatever the learned rate is. The rate may be too low,
# and only more tokens in the window show that. The value's reason is not recorded. A larger one makes requests of high
# priority wait for more prompts; a smaller one slows the rise of the rate.
_LEAST_WINDOW_TOKENS = 2048
# Output tokens that an answer is charged with before the first answer has ended. The value's reason is not recorded.
# The end of an answer corrects its charge, so the value only moves the first order of the keys.
_FIRST_ANSWER_TOKENS = 128.0
# Weight of each ended answer in the mean length of answers: the mean follows about the last 20 answers. The value's
# reason is not recorded. A larger one follows single answers; a smaller one follows a change of traffic later.
_ANSWER_WEIGHT = 0.05
# Time, seconds, for which a stream's reader may delay the stream before its tokens stop counting for the pace. The
# value's reason is not recorded. A larger one takes slow readers for slow engines; a smaller one leaves fewer streams
# to observe.
_SLOW_READER_S = 0.5
# Share of a stream's own time that its reader may delay it, on top of _SLOW_READER_S: long streams gather small delays.
# The value's reason is not recorded; a larger or a smaller one does the same as for _SLOW_READER_S.
_SLOW_READER_FRAC = 0.1


@dataclass(slots=True, eq=False, kw_only=True)
class QueuedRequest:
    """One request on its way through admission; the caller sets the fields from ``tokens`` to ``answers``."""

    tokens: int  # estimated length of its prompt, or of all its prompts
    most_output_tokens: int | None  # limit that the request sets, at least 1; ``None``: it sets none
    is_stream: bool  # whether its tokens are observed as they come
    key: str | None  # name of its API key
    priority: Priority  # the one that its client asks for
    answers: int = 1  # number of answers that it wants, at least 1
    arrived_s: float = 0.0
    deadline_s: float = math.inf  # time until which its first token must come
    # Priority that it gets, virtual start (``router.fair_shares``) and number of the request. The lowest goes on first.
    order: tuple[int, float, int] = (0, 0.0, 0)
    passed_s: float | None = None  # time at which it went on to the engines
    first_token: Mark | None = None  # time of its first token; ``None``: it has not come
    output_tokens: int = 0  # tokens of all its answers that have come
    cost: float = 0.0  # tokens that its key was charged for
    is_displaced: bool = False  # whether it was dropped to make room for a request before it in the order
    is_paced: bool = False  # whether its tokens count for the pace now
    paused_at_s: float | None = None  # time since which its tokens wait for its reader; ``None``: they do not wait
    paused_s: float = 0.0  # total time for which its tokens have waited for its reader, seconds
    has_left: bool = False  # whether it has ended, or its client has gone


class Admission:
    """The requests to one model at one replica of the endpoint."""

    def __init__(
        self,
        config: AdmissionConfig,
        limits: RequestLimits | None = None,
        *,
        replicas: int,
        prefill_replicas: float,
        now_s: float,
    ) -> None:
        """Begin without requests.

        ``limits``: limits of all models together. ``replicas``: number of the endpoint's replicas, which share the
        engines and the rates of keys equally. ``prefill_replicas``: replicas that compute prompts, in all groups.
        ``now_s``: time by the clock of all methods, seconds.
        """
        self._config = config
        self._replicas = replicas
        self._prefill_share = prefill_replicas / replicas  # prefill replicas for this replica of the endpoint
        self._window_s = _WINDOW_FRAC * (config.ttft_s or 0.0)  # time that the engines should need for the window
        self._limits = limits or RequestLimits(config, replicas)
        self._capacity = Capacity(config.tpot_s, now_s)
        self._shares = {priority: FairShares() for priority in Priority}
        self._numbers = itertools.count()
        self._waiting_by_order: list[QueuedRequest] = []  # the first one goes on next
        self._waiting_by_age: dict[QueuedRequest, None] = {}  # the same requests, oldest first
        self._window: dict[QueuedRequest, None] = {}  # requests on their way to their first token, oldest first
        self._displaced: list[QueuedRequest] = []  # dropped requests that ``late`` has still to return
        self._waiting_tokens = self._window_tokens = 0
        self._last_first_token_s = now_s  # time at which a prompt last got its first token
        self.request_count = 0  # requests that wait or are being answered
        self.demand = Demand()
        self._answers_on_their_way = 0  # answers of admitted requests that have not ended
        self._answer_tokens = _FIRST_ANSWER_TOKENS  # mean output tokens of an answer

    @property
    def waiting(self) -> int:
        """Number of requests that wait for their turn."""
        return len(self._waiting_by_age)

    def set_prefill_replicas(self, count: float, now_s: float) -> None:
        """From now on this number of replicas computes prompts, at least 1, in all groups."""
        share = count / self._replicas
        if share != self._prefill_share:
            self._prefill_share = share
            self._capacity.set_busy(len(self._window) / share, now_s)

    def waits(self, now_s: float) -> list[tuple[int, float]]:
        """Prompt tokens of each request that waits, and the time for which it has waited, seconds."""
        return [(request.tokens, now_s - request.arrived_s) for request in self._waiting_by_age]

    def arrive(self, request: QueuedRequest, now_s: float) -> Refusal | None:
        """Let a request wait until ``passed`` returns it; or refuse it."""
        priority = self._limits.priority(request.key, request.priority)
        is_demand = self._limits.offer(request.key, request.tokens, now_s)
        refused = self._enter(request, priority, now_s)
        if refused is None:
            self.demand.offer(request.tokens)
        elif is_demand and refused.reason != "key":
            self.demand.offer(request.tokens)
            self.demand.refuse(refused.reason, priority)
        return refused

    def refuse_unread(self, key: str | None, priority: Priority, now_s: float) -> None:
        """Count a request that the endpoint refuses as full before it has read the body."""
        if self._limits.offer(key, 0, now_s):
            self.demand.offer_unread()
            self.demand.refuse("requests", self._limits.priority(key, priority))

    def _enter(self, request: QueuedRequest, priority: Priority, now_s: float) -> Refusal | None:
        self._capacity.learn(now_s)
        if refused := self._limits.refuse_full(self.request_count, priority):
            return refused
        shares = self._shares[priority]
        request.arrived_s = now_s
        start_tokens = shares.start(request.key)
        request.order = (int(priority), start_tokens, next(self._numbers))
        if refused := self._refuse_crowded(request, now_s) or self._refuse_late(request, now_s):
            return refused
        # After all other rules, since it charges the key.
        if refused := self._limits.enter(request.key, request.tokens, now_s):
            return refused
        answer_tokens = min(request.most_output_tokens or math.inf, self._answer_tokens)
        request.cost = request.tokens + request.answers * answer_tokens
        shares.charge(request.key, start_tokens, request.cost / self._config.limits(request.key).share)
        self.request_count += 1
        self._waiting_tokens += request.tokens
        self._waiting_by_age[request] = None
        insort(self._waiting_by_order, request, key=attrgetter("order"))
        self._displace(request, now_s)
        return None

    def passed(self, now_s: float) -> list[QueuedRequest]:
        """Requests that go on to the engines now. Call it after each call of another method."""
        self._capacity.learn(now_s)
        passed = []
        while self._waiting_by_order and self._has_room(first := self._waiting_by_order[0], now_s):
            priority, start_tokens, _ = first.order
            self._shares[Priority(priority)].begin(start_tokens)
            self._stop_waiting(first)
            self.demand.let_pass(first.tokens)
            first.passed_s = now_s
            self._window[first] = None
            self._window_tokens += first.tokens
            self._capacity.set_busy(len(self._window) / self._prefill_share, now_s)
            self._answers_on_their_way += first.answers
            self._capacity.change_answers(first.answers, now_s)
            passed.append(first)
        if not self._waiting_by_order:
            self._capacity.note_idle()
            for shares in self._shares.values():
                shares.forget()
        return passed

    def late(self, now_s: float) -> list[QueuedRequest]:
        """Waiting requests that are dropped now. Call it regularly while requests wait.

        A request is dropped if its first token would come too late even if it went on now, or if it had to make room
        for a request before it in the order.
        """
        self._drop_unobserved(now_s)
        self._capacity.learn(now_s)
        # The window counts with at most the time that the engines should need for it: a longer delay drops no request.
        window_left_s = min(self._window_s, self._window_left_s(now_s))
        late = [
            request
            for request in self._waiting_by_order
            if now_s + window_left_s + self._own_prompt_s(request, now_s) > request.deadline_s
        ]
        for request in late:
            self.leave(request, now_s)
        displaced, self._displaced = self._displaced, []
        for request in displaced:
            self.demand.refuse("queued_tokens", Priority(request.order[0]))
        for request in late:
            self.demand.refuse("late", Priority(request.order[0]))
        return [*displaced, *late]

    def note_first_token(self, request: QueuedRequest, now_s: float) -> None:
        """A request has its first output token. Later calls change nothing."""
        if request.first_token is not None:
            return
        request.first_token = self._capacity.mark(now_s)
        self._leave_window(request, now_s)
        self._last_first_token_s = now_s
        self._capacity.count_prompt(request.tokens)
        if request.is_stream:
            request.is_paced = True
            self._capacity.change_observed(request.answers, now_s)

    def output(self, request: QueuedRequest, tokens: int, now_s: float) -> None:
        """Output tokens of a request have come: all of them at once if it is no stream.

        Tokens that come together with the first one do not count for the pace.
        """
        self._limits.spend(request.key, tokens)
        request.output_tokens += tokens
        if request.first_token is None:
            self.note_first_token(request, now_s)
        elif request.is_paced:
            self._capacity.count_output(tokens)
        elif not request.is_stream:
            self._capacity.count_whole(tokens, request.answers, request.first_token, now_s)
        # The tokens of a stream with a slow reader say nothing about the pace.

    def pause(self, request: QueuedRequest, now_s: float) -> None:
        """A stream's tokens wait for its reader from now on, so they say nothing about the pace."""
        if request.is_paced:
            self._stop_pace(request, now_s)
            request.paused_at_s = now_s

    def go_on(self, request: QueuedRequest, now_s: float) -> None:
        """A stream's reader has taken the tokens. The next ones count for the pace again, unless the reader is slow."""
        if request.paused_at_s is None or request.first_token is None:
            return
        request.paused_s += now_s - request.paused_at_s
        request.paused_at_s = None
        if request.paused_s <= _SLOW_READER_S + _SLOW_READER_FRAC * (now_s - request.first_token.at_s):
            request.is_paced = True
            self._capacity.change_observed(request.answers, now_s)

    def leave(self, request: QueuedRequest, now_s: float) -> None:
        """A request has ended, or its client has gone. A second call changes nothing."""
        if request.has_left:
            return
        request.has_left = True
        self.request_count -= 1
        self._limits.leave(request.key)
        if request in self._waiting_by_age:
            self._stop_waiting(request)
            self._limits.refund(request.key, request.tokens)
            self._correct_charge(request, 0.0)
            return
        self._correct_charge(request, request.tokens + request.output_tokens)
        if request.output_tokens:
            self._answer_tokens += _ANSWER_WEIGHT * (request.output_tokens / request.answers - self._answer_tokens)
        self._answers_on_their_way -= request.answers
        self._capacity.change_answers(-request.answers, now_s)
        self._leave_window(request, now_s)
        if request.is_paced:
            self._stop_pace(request, now_s)

    def late_refusal(self, request: QueuedRequest, now_s: float) -> Refusal:
        """Refusal of a request that ``late`` returned."""
        if request.is_displaced:
            what = "requests before this one in the order took its room (admission.max_queued_tokens)"
            return refusal("queued_tokens", what, self._wait_s(request, now_s))
        waited_s, ttft_s = now_s - request.arrived_s, request.deadline_s - request.arrived_s
        what = (
            f"the request waited {waited_s:.1f} s and would not have its first token within {ttft_s:g} s "
            "(admission.ttft_s)"
        )
        # By then the predicted wait is short enough, if no other request arrives.
        return refusal("late", what, self._wait_s(request, now_s) - _PREDICTED_FRAC * ttft_s)

    def _refuse_crowded(self, request: QueuedRequest, now_s: float) -> Refusal | None:
        """Refuse a request that the queue cannot hold together with those before it in the order.

        The requests after it do not count, since they make room for it. If no request is before it, a prompt of any
        length fits.
        """
        most = self._config.max_queued_tokens
        if most is None or self._waiting_tokens + request.tokens <= most:
            return None
        tokens_ahead = self._tokens_ahead(request)
        if not tokens_ahead or tokens_ahead + request.tokens <= most:
            return None
        what = (
            f"{tokens_ahead} prompt tokens wait before this request; with its own {request.tokens} they are more than "
            f"{most} (admission.max_queued_tokens)"
        )
        return refusal("queued_tokens", what, self._wait_s(request, now_s))

    def _displace(self, request: QueuedRequest, now_s: float) -> None:
        """Drop the last requests in the order until the queue is within its limit; ``request``: the newest one."""
        most = self._config.max_queued_tokens
        while most is not None and self._waiting_tokens > most:
            last = self._waiting_by_order[-1]
            if last is request:  # no request is before it, so its prompt may exceed the limit
                return
            last.is_displaced = True
            self._displaced.append(last)
            self.leave(last, now_s)

    def _refuse_late(self, request: QueuedRequest, now_s: float) -> Refusal | None:
        """Set the request's deadline; refuse the request if its first token would probably come later."""
        if self._config.ttft_s is None:
            return None
        ttft_s = max(self._config.ttft_s, self._config.ttft_s_per_input_token * request.tokens)
        request.deadline_s = now_s + ttft_s
        if not self._are_engines_full(now_s):
            return None
        predicted_s = self._wait_s(request, now_s) + self._own_prompt_s(request, now_s)
        excess_s = predicted_s - _PREDICTED_FRAC * ttft_s
        if excess_s <= 0.0:
            return None
        what = f"the first token of this request would come later than after {ttft_s:g} s (admission.ttft_s)"
        return refusal("predicted_ttft", what, excess_s)

    def _are_engines_full(self, now_s: float) -> bool:
        """Whether the oldest waiting request has waited long enough to show that the engines can do no more."""
        oldest = next(iter(self._waiting_by_age), None)
        return oldest is not None and now_s - oldest.arrived_s >= _EVIDENCE_FRAC * (self._config.ttft_s or math.inf)

    def _wait_s(self, request: QueuedRequest, now_s: float) -> float:
        """Time that a request would wait for the prompts before it, seconds; 0 while no rate is known."""
        tokens_per_s = self._capacity.prompt_tokens_per_s or math.inf
        return self._window_left_s(now_s) + self._tokens_ahead(request) / tokens_per_s

    def _window_left_s(self, now_s: float) -> float:
        """Time until all prompts of the window have their first token, seconds; 0 while no rate is known.

        Here the prefill replicas count as one replica, which computes the prompts one after another at the rate.
        """
        rate = self._capacity.prompt_tokens_per_s
        oldest = next(iter(self._window), None)
        if rate is None or oldest is None:
            return 0.0
        # The engines have computed the oldest prompt since the prompt before it had its first token.
        began_s = max(self._last_first_token_s, oldest.passed_s or 0.0)
        computed_tokens = min(oldest.tokens, rate * (now_s - began_s))
        return (self._window_tokens - computed_tokens) / rate

    def _own_prompt_s(self, request: QueuedRequest, now_s: float) -> float:
        """Time that the request's own prompt takes, seconds; 0 until the rate of full engines is known."""
        if not (self._are_engines_full(now_s) and self._capacity.is_known(now_s)):
            return 0.0
        return self._prompt_s(request, self._capacity.prompt_tokens_per_s or math.inf)

    def _prompt_s(self, request: QueuedRequest, rate: float) -> float:
        """Time of a prompt on one replica, at its part of the rate of all, seconds."""
        return request.tokens * max(1.0, self._prefill_share) / rate

    def _tokens_ahead(self, request: QueuedRequest) -> int:
        return sum(other.tokens for other in self._waiting_by_order if other.order < request.order)

    def _has_room(self, request: QueuedRequest, now_s: float) -> bool:
        """Whether the request may go on to the engines now. The first rule that fits decides.

        1. There is no TTFT objective, or no answer is on its way: yes.
        2. One more answer at a time would miss the TPOT objective: no.
        3. The window has fewer prompts than there are prefill replicas: yes.
        4. The oldest prompt of the window is overdue: no.
        5. No rate is known: yes.
        6. Otherwise: yes if the request's prompt fits into the window.
        """
        if self._config.ttft_s is None or not self._answers_on_their_way:
            return True
        most = self._capacity.most_answers
        if most is not None and self._answers_on_their_way >= most:
            self._capacity.note_limit_reached()
            return False
        if len(self._window) < self._prefill_share:
            return True
        rate = self._capacity.prompt_tokens_per_s
        if self._is_overdue(rate or math.inf, now_s):
            return False
        if rate is None:
            return True
        most_tokens = max(_LEAST_WINDOW_TOKENS * self._prefill_share, rate * self._window_s)
        return self._window_tokens + request.tokens <= most_tokens

    def _is_overdue(self, rate: float, now_s: float) -> bool:
        """Whether the oldest prompt of the window takes longer than ``_OVERDUE_FRAC`` of the window and its prefill."""
        oldest = next(iter(self._window), None)
        if oldest is None or oldest.passed_s is None:
            return False
        return now_s - oldest.passed_s > _OVERDUE_FRAC * self._window_s + self._prompt_s(oldest, rate)

    def _stop_waiting(self, request: QueuedRequest) -> None:
        self._waiting_by_order.remove(request)
        del self._waiting_by_age[request]
        self._waiting_tokens -= request.tokens

    def _stop_pace(self, request: QueuedRequest, now_s: float) -> None:
        request.is_paced = False
        self._capacity.change_observed(-request.answers, now_s)

    def _leave_window(self, request: QueuedRequest, now_s: float) -> None:
        if request in self._window:
            del self._window[request]
            self._window_tokens -= request.tokens
            self._capacity.set_busy(len(self._window) / self._prefill_share, now_s)

    def _drop_unobserved(self, now_s: float) -> None:
        """Take answers in one piece out of the window after ttft_s, since their first token may not be observed."""
        passed_before_s = now_s - (self._config.ttft_s or math.inf)
        for request in list(itertools.takewhile(lambda one: (one.passed_s or 0.0) <= passed_before_s, self._window)):
            if not request.is_stream:
                self._leave_window(request, now_s)

    def _correct_charge(self, request: QueuedRequest, cost: float) -> None:
        """Charge the request's key for ``cost`` tokens instead of those that were estimated when it arrived."""
        shares = self._shares[Priority(request.order[0])]
        shares.correct(request.key, (cost - request.cost) / self._config.limits(request.key).share)
