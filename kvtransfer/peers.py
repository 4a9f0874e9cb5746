"""Links between one decode replica and the prefill replicas that it pulls KV from: which are broken (pure).

A *peer* is a prefill replica. A link breaks for one pair of replicas alone: both are healthy, and other replicas go on
using them. So only this decode replica avoids the link. One prompt at a time *probes* it, which means that it is
prefilled at the peer to see whether its KV arrives. The first probe is sent after ``_FIRST_PAUSE_S``, each further one
after twice the pause.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

# Pause before the first probe of a broken link, seconds; it doubles with each probe that fails.
_FIRST_PAUSE_S = 1.0
# Longest pause between two probes, seconds.
_MOST_PAUSE_S = 60.0
# Longest wait for the result of a probe, seconds; then another prompt may probe the link.
_PROBE_S = 60.0
# Time after its last answer during which a peer counts as running, seconds.
_RECENT_S = 60.0
# Time between two prompts that look for a further peer, which has not answered this decode replica yet, seconds.
_LOOK_S = 60.0
# Time since its last answer after which a peer is forgotten, seconds.
_FORGET_S = 600.0
# Largest number of failed probes that counts, so that the power of 2 stays small. The pause reaches ``_MOST_PAUSE_S``
# long before.
_MOST_PROBES = 30


@dataclass(slots=True)
class _BrokenLink:
    until_s: float  # end of the pause, from when a prompt may probe the link
    probes: int = 0  # number of failed probes
    probed_until_s: float | None = None  # time when another probe may be sent; ``None``: no probe is on its way


class Peers:
    """The links of this decode replica: which are broken, and which one to probe next."""

    def __init__(self) -> None:
        self._heard_s: dict[str, float] = {}  # time of each peer's last answer
        self._broken: dict[str, _BrokenLink] = {}
        self._look_s: float | None = None  # time of the next look for another peer; ``None``: none is needed

    def heard(self, peer: str, now_s: float) -> None:
        """Note that a peer has answered; its link may still be broken."""
        self._heard_s[peer] = now_s

    def failed(self, peer: str, now_s: float) -> bool:
        """Note that KV could not be pulled from a peer in time.

        Returns whether that is news: a new break or a failed probe, and not a prompt that was sent before the break.
        """
        self._heard_s[peer] = now_s
        broken = self._broken.get(peer)
        if broken is None:
            self._broken[peer] = _BrokenLink(until_s=now_s + _FIRST_PAUSE_S)
            return True
        if broken.probed_until_s is None:
            return False
        broken.probes = min(broken.probes + 1, _MOST_PROBES)
        pause_s = min(_FIRST_PAUSE_S * 2.0**broken.probes, _MOST_PAUSE_S)
        broken.until_s, broken.probed_until_s = now_s + pause_s, None
        return True

    def pulled(self, peer: str, now_s: float) -> bool:
        """Note that KV has come from a peer. Returns whether its link was broken until now."""
        self._heard_s[peer] = now_s
        return self._broken.pop(peer, None) is not None

    def unknown(self, peer: str, now_s: float) -> None:
        """Note that the probe of a link has ended without a result."""
        broken = self._broken.get(peer)
        if broken is not None and broken.probed_until_s is not None:
            broken.until_s, broken.probed_until_s = now_s + _FIRST_PAUSE_S, None

    def broken(self, now_s: float) -> frozenset[str]:
        """Peers behind a broken link, to which only probes go. Forgets peers that have not answered for long."""
        for peer in [peer for peer, heard_s in self._heard_s.items() if now_s - heard_s > _FORGET_S]:
            del self._heard_s[peer]
            self._broken.pop(peer, None)
        return frozenset(self._broken)

    def is_cut_off(self, now_s: float) -> bool:
        """Whether every peer that has answered lately is behind a broken link. If so, sets when to look for another."""
        broken = self.broken(now_s)
        has_healthy = any(now_s - heard_s <= _RECENT_S for peer, heard_s in self._heard_s.items() if peer not in broken)
        is_cut_off = bool(broken) and not has_healthy
        if not is_cut_off:
            self._look_s = None
        elif self._look_s is None:
            self._look_s = now_s + _LOOK_S
        return is_cut_off

    def looks_around(self, now_s: float) -> bool:
        """Reserve for one prompt the look for a peer that has not answered yet. Returns whether the prompt may look.

        Call ``is_cut_off`` first. The prompt may wait in vain, since such a peer may not exist.
        """
        if self._look_s is None or now_s < self._look_s:
            return False
        self._look_s = now_s + _LOOK_S
        return True

    def probe(self, now_s: float) -> str | None:
        """Reserve a probe for one prompt. Returns the peer to probe; ``None``: no link may be probed now."""
        for peer, broken in self._broken.items():
            is_free = broken.probed_until_s is None or now_s >= broken.probed_until_s
            if is_free and now_s >= broken.until_s:
                broken.probed_until_s = now_s + _PROBE_S
                return peer
        return None


class StuckPulls:
    """Finds pulls that take too long since they were first observed."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._since_s: dict[str, float] = {}  # time at which each running pull was first observed

    def see(self, running: Mapping[str, str], now_s: float) -> frozenset[str]:
        """Engines from which a pull takes longer than the timeout; ``running``: each running pull and its engine.

        Call it regularly: a pull's time begins at the first call that has it.
        """
        self._since_s = {pull: self._since_s.get(pull, now_s) for pull in running}
        return frozenset(running[pull] for pull, since_s in self._since_s.items() if now_s - since_s > self._timeout_s)


def merged(reports: Collection[Mapping[str, str]]) -> dict[str, str]:
    """The pulls of all workers of one engine. Each report and the result: a pull and the engine that it reads from."""
    return {pull: engine for report in reports for pull, engine in report.items()}
