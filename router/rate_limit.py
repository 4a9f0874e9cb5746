"""What one API key may take (pure)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

# What a key did not take is kept for so long; a bucket of a minute would let two minutes' requests through in one.
_BURST_S = 10.0


class KeyLimits(BaseModel):
    """Bounds of one key; of all who ask where there are no keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    requests_per_minute: float | None = Field(
        None, gt=0.0, description="By all replicas of the endpoint together: each lets an equal part of it through."
    )
    tokens_per_minute: float | None = Field(
        None, gt=0.0, description="Prompt and output tokens, shared out in the same way; a long prompt is owed."
    )
    max_requests: int | None = Field(None, ge=1, description="At a time, of each replica of the endpoint.")
    share: float = Field(1.0, gt=0.0, le=1000.0, description="Of what all who wait get, in proportion to other keys.")
    highest_priority: Literal["high", "normal", "low"] = Field(
        "high",
        description="Who asks for a higher one gets this one. As it stands anybody may ask for any: the header orders "
        "the requests of clients who trust each other, and where they do not, set this.",
    )


@dataclass(frozen=True, slots=True)
class OverLimit:
    """Which limit a key is over, and when it no longer is."""

    what: str
    after_s: float


def _too_fast(what: str, per_minute: float | None) -> str:
    worth = f"of which {_BURST_S:g} s' worth may come at once"
    return f"{what} of this key come faster than {per_minute:g} a minute, {worth}"


class _Bucket:
    """Fills by a rate, up to what it gives in ``_BURST_S``, and at least one; it may be owed."""

    def __init__(self, rate_s: float, now_s: float) -> None:
        self._rate_s = rate_s
        self._most = max(1.0, rate_s * _BURST_S)
        self._level, self._at_s = self._most, now_s

    def empty_s(self, least: float, now_s: float) -> float:
        """How long it takes until so much is in it; 0 if it is."""
        self._level = min(self._most, self._level + self._rate_s * (now_s - self._at_s))
        self._at_s = now_s
        return max(0.0, (least - self._level) / self._rate_s)

    def take(self, amount: float) -> None:
        self._level -= amount


@dataclass(slots=True)
class _Key:
    requests: _Bucket | None
    tokens: _Bucket | None
    here: int = 0


class RateLimits:
    """All keys of one replica of the endpoint."""

    def __init__(self, limits: Callable[[str | None], KeyLimits], replicas: int) -> None:
        """``limits``: of a key; ``replicas``: of the endpoint, among which rates are shared out."""
        self._limits = limits
        self._replicas = replicas
        self._keys: dict[str | None, _Key] = {}

    def enter(self, name: str | None, tokens: int, now_s: float) -> OverLimit | None:
        """Count a request of so many prompt tokens against its key, until ``leave``; or say which limit it is over."""
        if (over := self.over(name, now_s)) is not None:
            return over
        key = self._keys[name]
        if key.requests is not None:
            key.requests.take(1.0)
        if key.tokens is not None:
            key.tokens.take(tokens)
        key.here += 1
        return None

    def over(self, name: str | None, now_s: float) -> OverLimit | None:
        """Which limit one more request of a key would be over."""
        limits = self._limits(name)
        key = self._of(name, now_s)
        if limits.max_requests is not None and key.here >= limits.max_requests:
            return OverLimit(f"{key.here} requests of this key are here (max_requests)", 1.0)
        if key.requests is not None and (after_s := key.requests.empty_s(1.0, now_s)):
            return OverLimit(_too_fast("requests", limits.requests_per_minute), after_s)
        if key.tokens is not None and (after_s := key.tokens.empty_s(1.0, now_s)):
            return OverLimit(_too_fast("tokens", limits.tokens_per_minute), after_s)
        return None

    def refund(self, name: str | None, tokens: int) -> None:
        """A request of so many prompt tokens was not answered: nobody computed anything for it."""
        key = self._keys[name]
        if key.requests is not None:
            key.requests.take(-1.0)
        if key.tokens is not None:
            key.tokens.take(-tokens)

    def refused(self, name: str | None, now_s: float) -> None:
        """A request whose body is refused costs one too: it had to be read."""
        if (bucket := self._of(name, now_s).requests) is not None:
            bucket.take(1.0)

    def spend(self, name: str | None, tokens: int) -> None:
        """Output tokens of a key's requests have come."""
        bucket = self._keys[name].tokens
        if bucket is not None:
            bucket.take(tokens)

    def leave(self, name: str | None) -> None:
        """One of its requests is no longer here."""
        self._keys[name].here -= 1

    def _of(self, name: str | None, now_s: float) -> _Key:
        if name not in self._keys:
            limits = self._limits(name)

            def bucket(per_minute: float | None) -> _Bucket | None:
                return None if per_minute is None else _Bucket(per_minute / 60.0 / self._replicas, now_s)

            self._keys[name] = _Key(bucket(limits.requests_per_minute), bucket(limits.tokens_per_minute))
        return self._keys[name]
