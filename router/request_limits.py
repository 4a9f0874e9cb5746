"""Limits of one replica of the endpoint over all models: requests at a time, and rates of API keys (pure)."""

import math
from dataclasses import dataclass

from router.admission_config import AdmissionConfig, KeyLimits, Priority

# Longest Retry-After of a refusal, seconds.
_MOST_RETRY_AFTER_S = 60.0
# Share of max_requests that is reserved for each priority above a request's own.
_RESERVED_FRAC = 0.05
# Time, seconds: a key that has sent nothing may send the requests of this time at once. With 60 s, a key could send the
# requests of two minutes within one minute.
_BURST_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a request is refused, in words for its client, and the time after which to send it again."""

    reason: str
    message: str
    retry_after_s: float


def refusal(reason: str, what: str, retry_after_s: float) -> Refusal:
    """A refusal; ``what``: its reason for the client. The time is rounded up and bounded."""
    after_s = float(math.ceil(min(_MOST_RETRY_AFTER_S, max(1.0, retry_after_s))))
    return Refusal(reason=reason, message=f"{what}; send it again after {after_s:g} s", retry_after_s=after_s)


class _Bucket:
    """Token bucket that holds at most ``_BURST_S`` of its rate, but at least 1. A level below 0 is a debt."""

    def __init__(self, per_s: float, now_s: float) -> None:
        self._per_s = per_s
        self._most = max(1.0, per_s * _BURST_S)
        self.level, self._filled_s = self._most, now_s

    def wait_s(self, least: float, now_s: float) -> float:
        """Fill the bucket up to now. Returns the time until it holds ``least``, seconds; 0 if it does."""
        self.level = min(self._most, self.level + self._per_s * (now_s - self._filled_s))
        self._filled_s = now_s
        return max(0.0, (least - self.level) / self._per_s)


class _Allowance:
    """The requests and the tokens that one API key may still send; one without a limit has no bucket."""

    def __init__(self, limits: KeyLimits, replicas: int, now_s: float) -> None:
        def bucket(per_minute: float | None) -> _Bucket | None:
            return None if per_minute is None else _Bucket(per_minute / 60.0 / replicas, now_s)

        self.requests, self.tokens = bucket(limits.requests_per_minute), bucket(limits.tokens_per_minute)

    def spent(self, now_s: float) -> tuple[str, float] | None:
        """What has to be waited for, ``requests`` or ``tokens``, and for how long, seconds; ``None``: nothing."""
        for what, bucket in (("requests", self.requests), ("tokens", self.tokens)):
            # One token is enough to enter: a prompt that needs more leaves a debt, which later requests wait for.
            if bucket is not None and (after_s := bucket.wait_s(1.0, now_s)):
                return what, after_s
        return None

    def charge(self, requests: int = 0, tokens: int = 0) -> None:
        """Take requests and tokens; negative numbers give them back."""
        if self.requests is not None:
            self.requests.level -= requests
        if self.tokens is not None:
            self.tokens.level -= tokens


@dataclass(slots=True)
class _KeyUse:
    """What one API key may still send, and what it has sent."""

    allowed: _Allowance
    offered: _Allowance  # as ``allowed``, but also requests that are refused for lack of capacity take from it
    request_count: int = 0  # requests of the key that wait or are being answered


class RequestLimits:
    """Requests of all models at one replica of the endpoint: their number, and the rates of each API key."""

    def __init__(self, config: AdmissionConfig, replicas: int) -> None:
        """``replicas``: number of the endpoint's replicas; each allows an equal part of a key's rates."""
        self._config = config
        self._replicas = replicas
        self._uses: dict[str | None, _KeyUse] = {}

    def refuse(self, key: str | None, priority: Priority, requests: int, now_s: float) -> Refusal | None:
        """Whether a request is refused before its body is read.

        ``key``: name of its API key. ``requests``: number of other requests at this replica of the endpoint.
        """
        return self.refuse_full(requests, self.priority(key, priority)) or self.refuse_key(key, now_s)

    def priority(self, key: str | None, priority: Priority) -> Priority:
        """The priority that a request of this key gets: the requested one, or the key's highest if that is lower."""
        highest = Priority[self._config.limits(key).highest_priority.upper()]
        return max(priority, highest)  # the larger number is the lower priority

    def refuse_full(self, requests: int, priority: Priority) -> Refusal | None:
        """Refuse a request of this priority if this number of other requests leaves no room for it."""
        most = self._config.max_requests
        higher_priorities = int(priority)  # priorities count from 0, the highest
        most_of_priority = most - int(_RESERVED_FRAC * most) * higher_priorities
        if requests < most_of_priority:
            return None
        name = priority.name.lower()
        what = (
            f"this replica of the endpoint has {requests} requests, and takes one of {name} priority only while it has "
            f"fewer than {most_of_priority} (admission.max_requests is {most})"
        )
        return refusal("requests", what, 1.0)

    def refuse_key(self, key: str | None, now_s: float) -> Refusal | None:
        """Refuse one more request of a key that has reached a limit."""
        limits, use = self._config.limits(key), self._use(key, now_s)
        if limits.max_requests is not None and use.request_count >= limits.max_requests:
            what = f"this replica of the endpoint has {use.request_count} requests of this key (max_requests)"
            return refusal("key", what, 1.0)
        if (spent := use.allowed.spent(now_s)) is None:
            return None
        what, after_s = spent
        per_minute = limits.requests_per_minute if what == "requests" else limits.tokens_per_minute
        burst = f"of which those of {_BURST_S:g} s may come at once"
        return refusal("key", f"{what} of this key come faster than {per_minute:g} a minute, {burst}", after_s)

    def offer(self, key: str | None, tokens: int, now_s: float) -> bool:
        """Whether a request counts as demand: whether the rates of its key would let it through if engines had room."""
        offered = self._use(key, now_s).offered
        if offered.spent(now_s) is not None:
            return False
        offered.charge(requests=1, tokens=tokens)
        return True

    def enter(self, key: str | None, tokens: int, now_s: float) -> Refusal | None:
        """Count a request and its prompt tokens for its key until ``leave``; or refuse it."""
        if (refused := self.refuse_key(key, now_s)) is not None:
            return refused
        self._uses[key].allowed.charge(requests=1, tokens=tokens)
        self._uses[key].request_count += 1
        return None

    def refund(self, key: str | None, tokens: int) -> None:
        """Return a request and its prompt tokens to its key: no engine has computed anything for it."""
        self._uses[key].allowed.charge(requests=-1, tokens=-tokens)

    def body_refused(self, key: str | None, now_s: float) -> None:
        """Charge a request whose body is refused: the body had to be read."""
        self._use(key, now_s).allowed.charge(requests=1)

    def spend(self, key: str | None, tokens: int) -> None:
        """Charge output tokens of a key's requests."""
        self._uses[key].allowed.charge(tokens=tokens)

    def leave(self, key: str | None) -> None:
        """End one request of a key."""
        self._uses[key].request_count -= 1

    def _use(self, key: str | None, now_s: float) -> _KeyUse:
        """What a key has used, with full buckets at its first request."""
        if key not in self._uses:
            limits = self._config.limits(key)
            allowed, offered = (_Allowance(limits, self._replicas, now_s) for _ in range(2))
            self._uses[key] = _KeyUse(allowed, offered)
        return self._uses[key]
