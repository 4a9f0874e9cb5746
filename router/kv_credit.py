"""Whether a decode replica will have room for the KV of a prompt by the time that prefill has computed it (pure)."""

# Weight of each new time in the mean times: they follow about the last 20 prompts.
_WEIGHT = 0.05


class KvCredit:
    """The KV that a decode replica has promised to prompts on their way through prefill.

    A promise begins before the prompt waits for a prefill replica, and ends with its first token on decode. While KV is
    pulled it is both promised and in use, so the credit errs on the safe side.
    """

    def __init__(self) -> None:
        self._promised: dict[str, int] = {}  # tokens by request
        self._promised_tokens = 0
        self._began_s: dict[str, float] = {}  # time of each answer's first token
        self._prefill_s: float | None = None  # mean time from a promise to the end of prefill
        self._answer_s: float | None = None  # mean time from the first to the last token of an answer

    def is_enough(self, tokens: int, *, kv_tokens: int, kv_usage_frac: float) -> bool:
        """Whether the KV of one more prompt will have room.

        It has if all promises and this prompt fit into the free KV, and into that which answers free until then: each
        answer frees its KV within ``answer_s``, so in ``prefill_s`` the share prefill_s / answer_s of the KV in use.

        Args:
            tokens: length of the prompt.
            kv_tokens: tokens of KV that the engine can keep; 0: unknown, and then every prompt has room.
            kv_usage_frac: share of it in use, 0..1.
        """
        if not kv_tokens:
            return True
        used = kv_usage_frac * kv_tokens
        freed_frac = min(1.0, self._prefill_s / self._answer_s) if self._prefill_s and self._answer_s else 0.0
        return self._promised_tokens + tokens <= kv_tokens - used + freed_frac * used

    def promise(self, request_id: str, tokens: int) -> None:
        """Promise KV to a prompt."""
        self.withdraw(request_id)
        self._promised[request_id] = tokens
        self._promised_tokens += tokens

    def withdraw(self, request_id: str) -> bool:
        """End a promise. Returns whether there was one."""
        tokens = self._promised.pop(request_id, None)
        self._promised_tokens -= tokens or 0
        return tokens is not None

    def observe_prefill(self, seconds: float) -> None:
        """A prompt took this time from its promise to the end of prefill."""
        self._prefill_s = _mean(self._prefill_s, seconds)

    def begin(self, request_id: str, now_s: float) -> bool:
        """An answer has its first token. Returns whether that has ended a promise."""
        self._began_s[request_id] = now_s
        return self.withdraw(request_id)

    def end(self, request_id: str, now_s: float) -> bool:
        """An answer has ended, complete or not. Returns whether that has ended a promise."""
        began_s = self._began_s.pop(request_id, None)
        if began_s is not None:
            self._answer_s = _mean(self._answer_s, now_s - began_s)
        return self.withdraw(request_id)


def _mean(mean: float | None, value: float) -> float:
    return value if mean is None else mean + _WEIGHT * (value - mean)
