"""The order of the prompts that wait for a prefill replica: by arrival, by deadline, or gathered as in DOPD (pure).

A prompt's *deadline* is its arrival plus its TTFT objective. In every order a prompt that has reached its deadline is
not overtaken by one that comes later. So a prompt waits at most for the work that has arrived by its deadline.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from router.prefill_load import PrefillLoad

# A heap may have this number of entries more than twice the waiting prompts. Then entries of prompts that have left are
# removed: rarely enough to cost little.
_STALE_ENTRIES = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WaitingPrompt:
    """A prompt that waits for a prefill replica; times are of one clock, seconds.

    Attributes:
        prompt_id: its name, different from that of every other waiting or bound prompt.
        tokens: prompt tokens to compute.
        arrived_s: time of the request's arrival at the endpoint.
        deadline_s: ``arrived_s`` plus the request's TTFT objective.
        caller: the decode replica that asks.
        exclude: prefill replicas that must not get it.
        overlap_tokens: prompt tokens that a replica need not compute, since its cache has them, by replica.
    """

    prompt_id: str
    tokens: int
    arrived_s: float
    deadline_s: float
    caller: str = ""
    exclude: frozenset[str] = frozenset()
    overlap_tokens: Mapping[str, int] = field(default_factory=dict)


class _Heap:
    """Waiting prompts by a key; prompts that wait no longer are dropped when they come up."""

    def __init__(self, key: Callable[[WaitingPrompt], float], waiting: Mapping[WaitingPrompt, int]) -> None:
        self._key = key
        self._waiting = waiting
        # (key, number of the addition, prompt): prompts with the same key leave in the order in which they came.
        self._entries: list[tuple[float, int, WaitingPrompt]] = []
        self._entered: set[WaitingPrompt] = set()  # the prompts of the entries, since a prompt may come again

    def add(self, prompt: WaitingPrompt) -> None:
        if prompt in self._entered:
            return
        if len(self._entries) > 2 * len(self._waiting) + _STALE_ENTRIES:
            self._entries = [entry for entry in self._entries if entry[2] in self._waiting]
            heapify(self._entries)
            self._entered = {entry[2] for entry in self._entries}
        self._entered.add(prompt)
        heappush(self._entries, (self._key(prompt), self._waiting[prompt], prompt))

    def first(self) -> WaitingPrompt | None:
        """The waiting prompt with the lowest key; ``None``: no prompt waits."""
        while self._entries:
            prompt = self._entries[0][2]
            if prompt in self._waiting:
                return prompt
            self._pop()
        return None

    def take(self, most_tokens: float) -> list[WaitingPrompt]:
        """Remove and return the first prompts that have at most ``most_tokens`` together, at least the first one."""
        taken: list[WaitingPrompt] = []
        tokens = 0
        while (prompt := self.first()) is not None and (not taken or tokens + prompt.tokens <= most_tokens):
            self._pop()
            taken.append(prompt)
            tokens += prompt.tokens
        return taken

    def _pop(self) -> None:
        self._entered.discard(heappop(self._entries)[2])


class PrefillOrder(ABC):
    """The waiting prompts of one group, in the order of one strategy."""

    def __init__(self, load: PrefillLoad, timeout_frac: float) -> None:
        """``load``: what has arrived at the group lately. ``timeout_frac``: see ``DopdOrder``."""
        self._load = load
        self._timeout_frac = timeout_frac
        self._waiting: dict[WaitingPrompt, int] = {}  # with the number of each one's first addition

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, prompt: object) -> bool:
        return prompt in self._waiting

    def add(self, prompt: WaitingPrompt, number: int) -> None:
        """Let a prompt wait; ``number``: the same for a prompt that waits again, so that it has its old place."""
        self._waiting[prompt] = number
        self._add(prompt)

    def remove(self, prompt: WaitingPrompt) -> int:
        """A prompt waits no longer. Returns its number."""
        return self._waiting.pop(prompt)

    @abstractmethod
    def next(self, now_s: float) -> list[WaitingPrompt]:
        """The prompts that the next replica with room gets together, at least one. At least one prompt must wait."""

    @abstractmethod
    def _add(self, prompt: WaitingPrompt) -> None:
        """Put a prompt into the order."""


class _KeyOrder(PrefillOrder):
    """One prompt at a time, by one key."""

    _key: Callable[[WaitingPrompt], float]

    def __init__(self, load: PrefillLoad, timeout_frac: float) -> None:
        super().__init__(load, timeout_frac)
        self._heap = _Heap(type(self)._key, self._waiting)

    def next(self, now_s: float) -> list[WaitingPrompt]:
        first = self._heap.first()
        assert first is not None
        return [first]

    def _add(self, prompt: WaitingPrompt) -> None:
        self._heap.add(prompt)


class FcfsOrder(_KeyOrder):
    """By arrival: first come, first served."""

    @staticmethod
    def _key(prompt: WaitingPrompt) -> float:
        return prompt.arrived_s


class EdfOrder(_KeyOrder):
    """By deadline: the earliest one first. With the same objective for all prompts this is the order of arrival."""

    @staticmethod
    def _key(prompt: WaitingPrompt) -> float:
        return prompt.deadline_s


class DopdOrder(PrefillOrder):
    """DOPD's Algorithm 1, for a replica that has room now.

    Prompts of at least ``i_next`` tokens, the mean input length lately, are long. The oldest long prompt goes next,
    unless the short ones make a batch: together they have ``i_next`` tokens, or the first of them has waited for
    ``T_timeout = alpha W_q`` (Eq. 17), or no long one waits (lines 17 to 20). A batch has at most ``i_next`` tokens,
    by value per token (Eq. 18); each request has the value 1, so the shortest go first.

    Algorithm 1 has no bound for a long prompt behind batches, and none for the longest of the short ones. Here a prompt
    that has reached its deadline goes before all of them.
    """

    def __init__(self, load: PrefillLoad, timeout_frac: float) -> None:
        """``timeout_frac``: the paper's safety factor alpha, 0..1."""
        super().__init__(load, timeout_frac)
        self._overdue = _Heap(lambda prompt: prompt.deadline_s, self._waiting)
        self._long: dict[WaitingPrompt, int] = {}
        self._short: dict[WaitingPrompt, int] = {}
        self._short_tokens = 0
        self._oldest_long = _Heap(lambda prompt: prompt.arrived_s, self._long)
        self._oldest_short = _Heap(lambda prompt: prompt.arrived_s, self._short)
        self._shortest = _Heap(lambda prompt: prompt.tokens, self._short)

    def next(self, now_s: float) -> list[WaitingPrompt]:
        """One prompt, or a batch of short ones."""
        overdue = self._overdue.first()
        if overdue is not None and overdue.deadline_s <= now_s:
            return [overdue]
        long = self._oldest_long.first()
        if long is not None and not self._has_batch(now_s):
            return [long]
        return self._shortest.take(self._load.input_tokens_mean)

    def remove(self, prompt: WaitingPrompt) -> int:
        """A prompt waits no longer. Returns its number."""
        self._long.pop(prompt, None)
        if self._short.pop(prompt, None) is not None:
            self._short_tokens -= prompt.tokens
        return super().remove(prompt)

    def _add(self, prompt: WaitingPrompt) -> None:
        number = self._waiting[prompt]
        self._overdue.add(prompt)
        if prompt.tokens >= self._load.input_tokens_mean:
            self._long[prompt] = number
            self._oldest_long.add(prompt)
            return
        self._short[prompt] = number
        self._short_tokens += prompt.tokens
        self._oldest_short.add(prompt)
        self._shortest.add(prompt)

    def _has_batch(self, now_s: float) -> bool:
        oldest = self._oldest_short.first()
        if oldest is None:
            return False
        if self._short_tokens >= self._load.input_tokens_mean:
            return True
        return now_s - oldest.arrived_s >= self._timeout_frac * self._load.wait_s


# The order of waiting prompts, by ``router.prefill_queue.strategy``.
ORDERS: dict[str, type[PrefillOrder]] = {"fcfs": FcfsOrder, "edf": EdfOrder, "dopd": DopdOrder}
