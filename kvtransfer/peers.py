"""Links between one decode replica and the prefill replicas that it pulls KV from: which are broken (pure).

A link breaks for one pair alone: both ends are healthy, and other replicas go on using them. So only this decode
replica avoids the link. One prompt at a time probes it: after ``_FIRST_PAUSE_S``, then each time after twice the pause.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

# Pause before the first probe of a broken link, seconds; it doubles with each probe that fails.
_FIRST_PAUSE_S = 1.0
# Longest pause between two probes, seconds.
_MOST_PAUSE_S = 60.0
# Longest wait for the result of a probe, seconds; then another prompt may probe the link.
_PROBE_S = 60.0
# Time since its last answer for which a replica counts as running, seconds.
_RECENT_S = 60.0
# Time between two prompts that look for a replica that has not answered yet, seconds.
_LOOK_S = 60.0
# Time since its last answer after which a replica is forgotten, seconds.
_FORGET_S = 600.0
# Largest number of failed probes that counts for the pause, which reaches ``_MOST_PAUSE_S`` long before.
_MOST_PROBES = 30


@dataclass(slots=True)
class _Broken:
    until_s: float  # end of the pause, from when a prompt may probe the link
    probes: int = 0  # number of failed probes
    probed_until_s: float | None = None  # time when another probe may be sent; ``None``: no probe is on its way


class Peers:
    """Prefill replicas that this decode replica cannot pull from, and the next one to probe."""

    def __init__(self) -> None:
        self._heard_s: dict[str, float] = {}  # time of each replica's last answer
        self._broken: dict[str, _Broken] = {}
        self._look_s: float | None = None  # time of the next look for another replica; ``None``: no need to

    def heard(self, peer: str, now_s: float) -> None:
        """Note that a prefill replica has answered; its link may still be broken."""
        self._heard_s[peer] = now_s

    def failed(self, peer: str, now_s: float) -> bool:
        """Note that a replica's KV could not be pulled in time. Returns whether it is a new break or a failed probe."""
        self._heard_s[peer] = now_s
        broken = self._broken.get(peer)
        if broken is None:
            self._broken[peer] = _Broken(until_s=now_s + _FIRST_PAUSE_S)
            return True
        if broken.probed_until_s is None:
            return False  # the prompt was sent before the link broke
        broken.probes = min(broken.probes + 1, _MOST_PROBES)
        broken.until_s, broken.probed_until_s = now_s + min(_FIRST_PAUSE_S * 2.0**broken.probes, _MOST_PAUSE_S), None
        return True

    def pulled(self, peer: str, now_s: float) -> bool:
        """Note that KV has come from a replica. Returns whether its link was broken until now."""
        self._heard_s[peer] = now_s
        return self._broken.pop(peer, None) is not None

    def unknown(self, peer: str, now_s: float) -> None:
        """Note that the probe of a link has ended without a result."""
        broken = self._broken.get(peer)
        if broken is not None and broken.probed_until_s is not None:
            broken.until_s, broken.probed_until_s = now_s + _FIRST_PAUSE_S, None

    def broken(self, now_s: float) -> frozenset[str]:
        """Replicas behind a broken link: only probes go there. Forgets replicas that have not answered for long."""
        for peer in [peer for peer, heard_s in self._heard_s.items() if now_s - heard_s > _FORGET_S]:
            del self._heard_s[peer]
            self._broken.pop(peer, None)
        return frozenset(self._broken)

    def is_cut_off(self, now_s: float) -> bool:
        """Whether every prefill replica that has answered lately is behind a broken link."""
        broken = self.broken(now_s)
        is_cut_off = bool(broken) and not any(
            now_s - heard_s <= _RECENT_S for peer, heard_s in self._heard_s.items() if peer not in broken
        )
        if not is_cut_off:
            self._look_s = None
        elif self._look_s is None:
            self._look_s = now_s + _LOOK_S
        return is_cut_off

    def looks_around(self, now_s: float) -> bool:
        """Reserve for one prompt the look for a replica that has not answered yet. Returns whether it may look.

        The prompt may wait in vain.
        """
        if self._look_s is None or now_s < self._look_s:
            return False
        self._look_s = now_s + _LOOK_S
        return True

    def probe(self, now_s: float) -> str | None:
        """Reserve a probe for one prompt. Returns the replica to probe; ``None``: every pause or probe still lasts."""
        for peer, broken in self._broken.items():
            is_free = broken.probed_until_s is None or now_s >= broken.probed_until_s
            if is_free and now_s >= broken.until_s:
                broken.probed_until_s = now_s + _PROBE_S
                return peer
        return None


class StuckPulls:
    """Pulls that take too long since they were first observed."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._since_s: dict[str, float] = {}

    def see(self, running: Mapping[str, str], now_s: float) -> frozenset[str]:
        """Engines from which a pull takes longer than the timeout; ``running``: the engine by pull."""
        self._since_s = {pull: self._since_s.get(pull, now_s) for pull in running}
        return frozenset(running[pull] for pull, since_s in self._since_s.items() if now_s - since_s > self._timeout_s)


def merged(reports: Collection[Mapping[str, str]]) -> dict[str, str]:
    """The pulls of all workers of one engine; each report has the engine by pull."""
    return {pull: engine for report in reports for pull, engine in report.items()}
