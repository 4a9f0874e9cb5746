"""Bounds of admission as a user configures them (pure)."""

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from kvtransfer.strict_config import StrictConfig


class Priority(IntEnum):
    """Order of requests: a larger number is a lower priority. ``X-Tandem-Priority`` names it in lower case."""

    HIGH = 0
    NORMAL = 1
    LOW = 2


class KeyLimits(StrictConfig):
    """Limits of one API key, or of all requests together if there are no keys."""

    requests_per_minute: float | None = Field(None, gt=0.0)
    """Requests per minute over all replicas of the endpoint; each replica allows an equal part. Left out, no limit."""
    tokens_per_minute: float | None = Field(None, gt=0.0)
    """Prompt and output tokens per minute over all replicas of the endpoint; each replica allows an equal part. A long
    prompt may exceed the limit; then requests are refused until the excess is paid back. Left out, no limit."""
    max_requests: int | None = Field(None, ge=1)
    """Requests that one replica of the endpoint holds at a time. Left out, no limit."""
    share: float = Field(1.0, gt=0.0, le=1000.0)
    """Weight of the key among keys whose requests wait: a key with 2 gets twice the tokens of a key with 1."""
    highest_priority: Literal["high", "normal", "low"] = "high"
    """Highest priority that requests of the key get. With the default, any client may choose any priority; lower it if
    clients do not trust each other."""


class ObjectivesConfig(StrictConfig):
    """Longest times that clients should wait; a request that would wait longer is refused."""

    from_slo: bool = False
    """True: ttft_s, ttft_s_per_input_token and tpot_s of the service's autoscale.slo, as deployed, hold for admission
    too, except those that are set here. False: an SLO refuses no request."""
    ttft_s: float | None = Field(None, gt=0.0, le=250.0)
    """Time to first token, seconds: a request that would wait longer is refused, or dropped before its prompt is
    computed. Without it, and without from_slo, no request waits at the endpoint."""
    ttft_s_per_input_token: float = Field(0.0, ge=0.0)
    """Time to first token per prompt token, seconds. If this gives a prompt more time than ttft_s, the prompt has that
    time instead. 0: ttft_s holds for all prompts."""
    tpot_s: float | None = Field(None, gt=0.0, le=8.0)
    """Time per output token, seconds: admission limits the answers at a time so that they keep it. Without it the
    number of answers has no limit."""
    max_queued_tokens: int | None = Field(None, ge=1)
    """Prompt tokens that may wait at one replica of the endpoint, counted as 4 bytes of text each. If a request exceeds
    it, the last ones in the order are dropped. A prompt that is longer may wait if no request is before it. Left out,
    the queue has no limit."""

    @model_validator(mode="after")
    def _check_objectives(self) -> Self:
        for name in ("tpot_s", "max_queued_tokens"):
            value = getattr(self, name)
            if value is not None and self.ttft_s is None and not self.from_slo:
                raise ValueError(
                    f"{name} is {value:g} and ttft_s is not given, without which no request waits at the endpoint: "
                    "give both, or from_slo"
                )
        return self

    def objectives(self, slo: Mapping[str, float]) -> dict[str, Any]:
        """The values of these fields; with ``from_slo``, those of the service's ``slo`` for fields that are not set."""
        values = {name: getattr(self, name) for name in ObjectivesConfig.model_fields}
        if not self.from_slo:
            return values
        set_here = {name for name, value in values.items() if name in self.model_fields_set and value is not None}
        return values | {name: value for name, value in slo.items() if name not in set_here}


class AdmissionConfig(ObjectivesConfig):
    """Bounds of admission; they hold for each replica of the endpoint alone, unless a field says otherwise."""

    max_requests: int = Field(2000, ge=1, le=100_000)
    """Requests that one replica of the endpoint holds at a time, waiting or being answered. 5 % of them are reserved
    for high priority, and 5 % more for high and normal priority."""
    key: KeyLimits = KeyLimits()
    keys: dict[str, KeyLimits] = Field(default_factory=dict)
    """Limits by an API key's name; they replace `key` for it."""

    def of_service(self, objectives: ObjectivesConfig | None, slo: Mapping[str, float]) -> "AdmissionConfig":
        """The same bounds with the objectives of one service, and with its ``slo`` if ``from_slo`` is set.

        ``objectives``: the service's own; ``None``: those of the application hold.
        """
        return self.model_copy(update=(objectives or self).objectives(slo))

    def limits(self, key: str | None) -> KeyLimits:
        """The limits of a key; ``None``: the limits of requests without a key."""
        return self.key if key is None else self.keys.get(key, self.key)
