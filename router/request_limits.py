"""Limits of one replica of the endpoint over all models: requests at a time, and rates of API keys (pure)."""

import math
from dataclasses import dataclass

from router.admission_config import AdmissionConfig, Priority

# Longest Retry-After of a refusal, seconds.
_MOST_RETRY_AFTER_S = 60.0
# Share of max_requests that is reserved for each priority above a request's own.
_ROOM_FRAC = 0.05
# A key may use the unused rate of this time, seconds, at once. A minute here would allow two minutes' requests in one.
_BURST_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a request is refused, in words for its client, and the time after which to send it again."""

    reason: str
    message: str
    retry_after_s: float


def refusal(reason: str, what: str, retry_after_s: float) -> Refusal:
    """A refusal; the time to come again is rounded up and bounded."""
    after_s = float(math.ceil(min(_MOST_RETRY_AFTER_S, max(1.0, retry_after_s))))
    return Refusal(reason=reason, message=f"{what}; send it again after {after_s:g} s", retry_after_s=after_s)


class _Bucket:
    """Token bucket that holds at most ``_BURST_S`` of its rate, but at least 1; its level may be negative."""

    def __init__(self, rate_s: float, now_s: float) -> None:
        self._rate_s = rate_s
        self._most = max(1.0, rate_s * _BURST_S)
        self.level, self._at_s = self._most, now_s

    def empty_s(self, least: float, now_s: float) -> float:
        """Time until the bucket holds ``least``, seconds; 0 if it does."""
        self.level = min(self._most, self.level + self._rate_s * (now_s - self._at_s))
        self._at_s = now_s
        return max(0.0, (least - self.level) / self._rate_s)


@dataclass(slots=True)
class _Key:
    requests: _Bucket | None
    tokens: _Bucket | None
    here: int = 0


class RequestLimits:
    """Requests of all models at one replica of the endpoint: their number, and the rates of each API key."""

    def __init__(self, config: AdmissionConfig, replicas: int) -> None:
        """``replicas``: of the endpoint, which share each key's rates equally."""
        self._config = config
        self._replicas = replicas
        self._keys: dict[str | None, _Key] = {}

    def refuse(self, key: str | None, priority: Priority, requests: int, now_s: float) -> Refusal | None:
        """Whether a request of this key is refused before its body is read; ``requests``: number of others."""
        return self.refuse_full(requests, self.priority(key, priority)) or self.refuse_key(key, now_s)

    def priority(self, key: str | None, priority: Priority) -> Priority:
        """The priority that a request of this key gets."""
        return max(priority, Priority[self._config.limits(key).highest_priority.upper()])

    def refuse_full(self, requests: int, priority: Priority) -> Refusal | None:
        """Refuse a request of this priority if this number of other requests leaves no room for it."""
        most = self._config.max_requests
        most_of_priority = most - int(_ROOM_FRAC * most) * priority
        if requests < most_of_priority:
            return None
        name = priority.name.lower()
        what = f"{requests} requests are here, and one of {name} priority enters below {most_of_priority}"
        return refusal("requests", f"{what} (admission.max_requests is {most})", 1.0)

    def refuse_key(self, name: str | None, now_s: float) -> Refusal | None:
        """Refuse one more request of a key that has reached a limit."""
        limits, key = self._config.limits(name), self._key(name, now_s)
        if limits.max_requests is not None and key.here >= limits.max_requests:
            return refusal("key", f"{key.here} requests of this key are here (max_requests)", 1.0)
        rates = (
            ("requests", key.requests, limits.requests_per_minute),
            ("tokens", key.tokens, limits.tokens_per_minute),
        )
        for what, bucket, per_minute in rates:
            if bucket is not None and (after_s := bucket.empty_s(1.0, now_s)):
                worth = f"of which {_BURST_S:g} s' worth may come at once"
                return refusal("key", f"{what} of this key come faster than {per_minute:g} a minute, {worth}", after_s)
        return None

    def enter(self, name: str | None, tokens: int, now_s: float) -> Refusal | None:
        """Count a request and its prompt tokens for its key until ``leave``; or refuse it."""
        if (refused := self.refuse_key(name, now_s)) is not None:
            return refused
        self._charge(name, requests=1, tokens=tokens)
        self._keys[name].here += 1
        return None

    def refund(self, name: str | None, tokens: int) -> None:
        """Return a request and its prompt tokens to its key: no engine has computed anything for it."""
        self._charge(name, requests=-1, tokens=-tokens)

    def body_refused(self, name: str | None, now_s: float) -> None:
        """Charge a request whose body is refused: the body had to be read."""
        self._key(name, now_s)
        self._charge(name, requests=1)

    def spend(self, name: str | None, tokens: int) -> None:
        """Charge output tokens of a key's requests."""
        self._charge(name, tokens=tokens)

    def leave(self, name: str | None) -> None:
        """End one request of a key."""
        self._keys[name].here -= 1

    def _charge(self, name: str | None, requests: int = 0, tokens: int = 0) -> None:
        key = self._keys[name]
        if key.requests is not None:
            key.requests.level -= requests
        if key.tokens is not None:
            key.tokens.level -= tokens

    def _key(self, name: str | None, now_s: float) -> _Key:
        if name not in self._keys:
            limits = self._config.limits(name)

            def bucket(per_minute: float | None) -> _Bucket | None:
                return None if per_minute is None else _Bucket(per_minute / 60.0 / self._replicas, now_s)

            self._keys[name] = _Key(bucket(limits.requests_per_minute), bucket(limits.tokens_per_minute))
        return self._keys[name]
