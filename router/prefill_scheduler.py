"""Which waiting prompt goes to which prefill replica, and when: the queue of one group (pure).

A prompt is *bound* to a replica only when that replica has room for it, not when it arrives. Until then it may go to
any replica, and the order of ``router.prefill_order`` holds for all prompts of the group. A replica has room while its
bound prompts have fewer tokens than the *window*, or while it has fewer than ``_LEAST_PROMPTS``. So no replica is idle
while a prompt waits that it may compute, and its next prompt is there before its last one ends.
"""

import itertools
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from router.config import PrefillQueueConfig
from router.prefill_load import PrefillLoad
from router.prefill_order import ORDERS, WaitingPrompt

# Prompts that a replica may have whatever their length. With 1, a replica would be idle after each prompt of more than
# the window, until the answer has travelled to decode and the next prompt to the replica.
_LEAST_PROMPTS = 2


class Binding(NamedTuple):
    """A prompt that goes to a replica now."""

    prompt: WaitingPrompt
    replica_id: str


@dataclass(slots=True)
class _Room:
    """Prompts that are bound to one replica, and their tokens to compute."""

    prompts: int = 0
    tokens: int = 0


class PrefillScheduler:
    """The waiting prompts of one group, and the prompts that its prefill replicas have."""

    def __init__(self, config: PrefillQueueConfig) -> None:
        """An empty queue without replicas."""
        self._load = PrefillLoad()
        self._order = ORDERS[config.strategy](self._load, config.timeout_frac)
        self._window_tokens = config.window_tokens
        self._numbers = itertools.count()
        self._prompts: dict[str, WaitingPrompt] = {}  # waiting prompts by name
        self._bound: dict[str, tuple[WaitingPrompt, str, int]] = {}  # prompt, its replica, its tokens to compute there
        # By replica; the first replica is the one whose last prompt ended longest ago.
        self._rooms: dict[str, _Room] = {}
        self._open: dict[str, _Room] = {}  # the replicas with room
        self._busy = 0  # number of replicas with prompts

    @property
    def waiting(self) -> int:
        """Number of waiting prompts."""
        return len(self._order)

    def set_replicas(self, names: Collection[str], now_s: float) -> None:
        """Set the replicas that may get prompts. Prompts of a replica that has gone are bound no more."""
        self._load.pass_time(self._busy, len(self._rooms), now_s)
        for name in [name for name in self._rooms if name not in names]:
            self._busy -= self._rooms.pop(name).prompts > 0
            self._open.pop(name, None)
        for name in names:
            if name not in self._rooms:
                self._rooms[name] = self._open[name] = _Room()
        self._bound = {key: bound for key, bound in self._bound.items() if bound[1] in self._rooms}

    def add(self, prompt: WaitingPrompt, now_s: float) -> None:
        """Let a prompt wait for a replica."""
        self._load.arrive(prompt.tokens, now_s)
        self._prompts[prompt.prompt_id] = prompt
        self._order.add(prompt, next(self._numbers))

    def has_replica(self, prompt: WaitingPrompt) -> bool:
        """Whether a replica of the group may compute the prompt, now or later."""
        return any(name not in prompt.exclude for name in self._rooms)

    def bind(self, now_s: float) -> list[Binding]:
        """The prompts that go to a replica now."""
        bindings: list[Binding] = []
        passed_over: list[tuple[WaitingPrompt, int]] = []  # no replica with room may compute them
        while self._open and len(self._order):
            together: str | None = None  # the replica of the first of these prompts
            for prompt in self._order.next(now_s):
                number = self._order.remove(prompt)
                if together is None or together in prompt.exclude:
                    together = self._choose(prompt)
                if together is None:
                    passed_over.append((prompt, number))
                    continue
                self._bind(prompt, together, now_s)
                bindings.append(Binding(prompt, together))
        for prompt, number in passed_over:
            self._order.add(prompt, number)
        return bindings

    def end(self, prompt_id: str, now_s: float, *, is_computed: bool = True) -> None:
        """A prompt neither waits nor is bound any more; an unknown one changes nothing.

        ``is_computed``: whether a replica has computed it.
        """
        if (prompt := self._prompts.pop(prompt_id, None)) is not None:
            self._order.remove(prompt)
            return
        if (bound := self._bound.pop(prompt_id, None)) is None:
            return
        _, name, tokens = bound
        self._load.pass_time(self._busy, len(self._rooms), now_s)
        if is_computed:
            self._load.compute()
        room = self._rooms.pop(name)
        self._rooms[name] = room  # now the last one
        room.prompts -= 1
        room.tokens -= tokens
        self._busy -= not room.prompts
        self._open.pop(name, None)
        if self._has_room(room):
            self._open[name] = room

    def drop(self, caller: str, now_s: float) -> list[str]:
        """Remove all prompts of a decode replica that is gone. Returns the names of those that waited."""
        waiting = [name for name, prompt in self._prompts.items() if prompt.caller == caller]
        bound = [name for name, (prompt, _, _) in self._bound.items() if prompt.caller == caller]
        for name in (*waiting, *bound):
            self.end(name, now_s, is_computed=False)
        return waiting

    def _choose(self, prompt: WaitingPrompt) -> str | None:
        """The replica with room that has the least to compute, this prompt included; ``None``: it may go to none."""
        allowed = self._open if not prompt.exclude else [name for name in self._open if name not in prompt.exclude]
        if not prompt.overlap_tokens:
            return min(allowed, key=lambda name: self._open[name].tokens, default=None)
        overlap = prompt.overlap_tokens
        return min(allowed, key=lambda name: self._open[name].tokens - overlap.get(name, 0), default=None)

    def _bind(self, prompt: WaitingPrompt, name: str, now_s: float) -> None:
        del self._prompts[prompt.prompt_id]
        tokens = max(1, prompt.tokens - prompt.overlap_tokens.get(name, 0))
        self._bound[prompt.prompt_id] = (prompt, name, tokens)
        room = self._rooms[name]
        if not room.prompts:
            self._load.pass_time(self._busy, len(self._rooms), now_s)
            self._busy += 1
        room.prompts += 1
        room.tokens += tokens
        if not self._has_room(room):
            self._open.pop(name, None)

    def _has_room(self, room: _Room) -> bool:
        return room.tokens < self._window_tokens or room.prompts < _LEAST_PROMPTS
