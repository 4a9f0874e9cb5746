"""Which waiting prompt goes to which prefill replica, and when: the queue of one group (pure).

A prompt is *bound* to a replica only when that replica has room for it, not when it arrives. Until then it may go to
any replica, and the order of ``router.prefill_order`` holds for all prompts of the group.

An engine computes the prompts that it has at the begin of a step, and they often end together. A next one must be there
by then, or the engine would be idle until the answers have travelled to decode and the next prompts to the engine. So
each replica has prompts that it *computes*, and *next* ones; when those that it computes have ended, it computes the
next ones. It has room while it has no next prompt, or while all of its prompts have fewer tokens than the *window*.
"""

import itertools
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from router.config import PrefillQueueConfig
from router.prefill_load import PrefillLoad
from router.prefill_order import ORDERS, WaitingPrompt


class Binding(NamedTuple):
    """A prompt that goes to a replica now."""

    prompt: WaitingPrompt
    replica_id: str


@dataclass(slots=True)
class _Replica:
    """Prompts that are bound to one replica: tokens to compute by name of the prompt."""

    computed: dict[str, int] = field(default_factory=dict)
    next: dict[str, int] = field(default_factory=dict)
    tokens: int = 0  # of both

    def bind(self, prompt_id: str, tokens: int) -> None:
        self.tokens += tokens
        (self.next if self.computed else self.computed)[prompt_id] = tokens

    def end(self, prompt_id: str) -> None:
        self.tokens -= (self.computed if prompt_id in self.computed else self.next).pop(prompt_id)
        if not self.computed:
            self.computed, self.next = self.next, {}


class PrefillScheduler:
    """The waiting prompts of one group, and the prompts that its prefill replicas have."""

    def __init__(self, config: PrefillQueueConfig) -> None:
        """An empty queue without replicas."""
        self._load = PrefillLoad()
        self._order = ORDERS[config.strategy](self._load, config.timeout_frac)
        self._window_tokens = config.window_tokens
        self._numbers = itertools.count()
        self._prompts: dict[str, WaitingPrompt] = {}  # waiting prompts by name
        # Bound prompts with their replicas and the times of their bindings, by name, oldest first.
        self._bound: dict[str, tuple[WaitingPrompt, str, float]] = {}
        self._names: frozenset[str] = frozenset()  # the replicas that may get prompts
        self._replicas: dict[str, _Replica] = {}  # these, and those that have gone and still have prompts
        # The replicas with room; the first one is the one whose last prompt ended longest ago.
        self._open: dict[str, _Replica] = {}
        self._busy = 0  # number of replicas with prompts

    @property
    def waiting(self) -> int:
        """Number of waiting prompts."""
        return len(self._order)

    def set_replicas(self, names: Collection[str], now_s: float) -> None:
        """Set the replicas that may get prompts.

        A replica that has gone keeps its prompts until they end. Routers learn of a change one after the other, so it
        may come back at once.
        """
        self._pass_time(now_s)
        self._names = frozenset(names)
        for name in [name for name in self._replicas if name not in self._names]:
            self._open.pop(name, None)
            self._forget_idle(name)
        for name in names:
            replica = self._replicas.setdefault(name, _Replica())
            if self._has_room(replica):
                self._open.setdefault(name, replica)

    def add(self, prompt: WaitingPrompt, now_s: float) -> None:
        """Let a prompt wait for a replica. One that comes again has lost its place."""
        self.end(prompt.prompt_id, now_s, is_computed=False)
        self._load.arrive(prompt.tokens, now_s)
        self._prompts[prompt.prompt_id] = prompt
        self._order.add(prompt, next(self._numbers))

    def has_replica(self, prompt: WaitingPrompt) -> bool:
        """Whether a replica of the group may compute the prompt, now or later."""
        return any(name not in prompt.exclude for name in self._names)

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
        name = bound[1]
        self._pass_time(now_s)
        if is_computed:
            self._load.compute()
        replica = self._replicas[name]
        replica.end(prompt_id)
        self._busy -= not replica.computed
        self._open.pop(name, None)
        if name not in self._names:
            self._forget_idle(name)
        elif self._has_room(replica):
            self._open[name] = replica

    def drop(self, caller: str, now_s: float) -> list[str]:
        """Remove all prompts of a decode replica that is gone. Returns the names of those that waited."""
        waiting = [name for name, prompt in self._prompts.items() if prompt.caller == caller]
        bound = [name for name, (prompt, _, _) in self._bound.items() if prompt.caller == caller]
        for name in (*waiting, *bound):
            self.end(name, now_s, is_computed=False)
        return waiting

    def expire(self, lease_s: float, now_s: float) -> None:
        """End prompts that were bound longer than ``lease_s`` ago, since the report of their end may be lost."""
        old = list(itertools.takewhile(lambda name: self._bound[name][2] < now_s - lease_s, self._bound))
        for name in old:
            self.end(name, now_s, is_computed=False)

    def _choose(self, prompt: WaitingPrompt) -> str | None:
        """The replica with room that has the least to compute, this prompt included; ``None``: it may go to none."""
        allowed = self._open if not prompt.exclude else [name for name in self._open if name not in prompt.exclude]
        if not prompt.overlap_tokens:
            return min(allowed, key=lambda name: self._open[name].tokens, default=None)
        overlap = prompt.overlap_tokens
        return min(allowed, key=lambda name: self._open[name].tokens - overlap.get(name, 0), default=None)

    def _bind(self, prompt: WaitingPrompt, name: str, now_s: float) -> None:
        del self._prompts[prompt.prompt_id]
        self._bound[prompt.prompt_id] = (prompt, name, now_s)
        replica = self._replicas[name]
        if not replica.computed:
            self._pass_time(now_s)
            self._busy += 1
        replica.bind(prompt.prompt_id, max(1, prompt.tokens - prompt.overlap_tokens.get(name, 0)))
        if not self._has_room(replica):
            self._open.pop(name, None)

    def _pass_time(self, now_s: float) -> None:
        self._load.pass_time(self._busy, len(self._names), now_s)

    def _forget_idle(self, name: str) -> None:
        """Forget a replica that has gone once it has no prompt."""
        if not self._replicas[name].computed:
            del self._replicas[name]

    def _has_room(self, replica: _Replica) -> bool:
        return not replica.next or replica.tokens < self._window_tokens
