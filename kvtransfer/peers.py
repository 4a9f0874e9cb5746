"""The links between one decode replica and the prefill replicas that it pulls KV from: which are broken (pure).

A link breaks for one pair alone: both its ends are healthy, and others go on using them. So it is this decode replica
that stays away, and that tries again: one prompt at a time, after a second, and twice as long each time that fails.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

_FIRST_PAUSE_S = 1.0
_MOST_PAUSE_S = 60.0
# A probe that nobody heard of for so long shows nothing: another may go.
_PROBE_S = 60.0
# Who has answered since is taken to be there still.
_RECENT_S = 60.0
# So often one prompt looks whether there is a replica that nothing was heard of.
_LOOK_S = 60.0
# Nothing heard of a replica for so long: it has gone.
_FORGET_S = 600.0


@dataclass(slots=True)
class _Broken:
    until_s: float
    probes: int = 0  # that have failed
    probed_until_s: float | None = None  # one is on its way


class Peers:
    """Which prefill replicas this decode replica cannot pull from, and which of them it is to try."""

    def __init__(self) -> None:
        self._heard_s: dict[str, float] = {}
        self._broken: dict[str, _Broken] = {}
        self._look_s: float | None = None

    def heard(self, peer: str, now_s: float) -> None:
        """A prefill replica has answered; its link may be broken all the same."""
        self._heard_s[peer] = now_s

    def failed(self, peer: str, now_s: float) -> bool:
        """Its KV could not be pulled, or not in time; whether that is news."""
        self._heard_s[peer] = now_s
        broken = self._broken.get(peer)
        if broken is None:
            self._broken[peer] = _Broken(until_s=now_s + _FIRST_PAUSE_S)
            return True
        if broken.probed_until_s is None:
            return False  # sent before
        broken.probes = min(broken.probes + 1, 30)
        broken.until_s, broken.probed_until_s = now_s + min(_FIRST_PAUSE_S * 2.0**broken.probes, _MOST_PAUSE_S), None
        return True

    def pulled(self, peer: str, now_s: float) -> bool:
        """KV has come from it; whether that mends a broken link."""
        self._heard_s[peer] = now_s
        return self._broken.pop(peer, None) is not None

    def unknown(self, peer: str, now_s: float) -> None:
        """A prompt that was to show whether it works has shown nothing."""
        broken = self._broken.get(peer)
        if broken is not None and broken.probed_until_s is not None:
            broken.until_s, broken.probed_until_s = now_s + _FIRST_PAUSE_S, None

    def broken(self, now_s: float) -> frozenset[str]:
        """Those that no prompt is to go to."""
        for peer in [peer for peer, heard_s in self._heard_s.items() if now_s - heard_s > _FORGET_S]:
            del self._heard_s[peer]
            self._broken.pop(peer, None)
        return frozenset(self._broken)

    def is_cut_off(self, now_s: float) -> bool:
        """Whether every prefill replica that has answered of late is behind a broken link."""
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
        """Whether the next prompt is to go to whoever else there is, though it may wait in vain for that."""
        if self._look_s is None or now_s < self._look_s:
            return False
        self._look_s = now_s + _LOOK_S
        return True

    def probe(self, now_s: float) -> str | None:
        """One to send the next prompt to all the same, once its pause is over; one prompt at a time."""
        for peer, broken in self._broken.items():
            is_free = broken.probed_until_s is None or now_s >= broken.probed_until_s
            if is_free and now_s >= broken.until_s:
                broken.probed_until_s = now_s + _PROBE_S
                return peer
        return None


class StuckPulls:
    """Which pulls take too long, by when each was first seen on its way."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._since_s: dict[str, float] = {}

    def see(self, running: Mapping[str, str], now_s: float) -> frozenset[str]:
        """The engines that something is pulled from for too long.

        Args:
            running: by pull the engine that it is from.
            now_s: when.
        """
        self._since_s = {pull: self._since_s.get(pull, now_s) for pull in running}
        return frozenset(running[pull] for pull, since_s in self._since_s.items() if now_s - since_s > self._timeout_s)


def merged(reports: Collection[Mapping[str, str]]) -> dict[str, str]:
    """What the workers of one engine say together."""
    return {pull: engine for report in reports for pull, engine in report.items()}
