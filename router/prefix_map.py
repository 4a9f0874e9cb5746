"""Which replicas of a pool hold which pieces of prompts, as one router knows it (pure).

A piece is *reported* if the replica itself said that it holds it. A piece that this router has sent to a replica counts
as held at once, before a report can come, but only for a stated time. Without reports this is all that a router knows.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from router.prompt_keys import PromptKeys


@dataclass(slots=True, eq=False)
class _Replica:
    """What one replica holds; each key is in one of the two, the least recently used first.

    Attributes:
        bit: the replica's bit in ``PrefixMap._holders``.
        capacity_pieces: most pieces that are remembered.
        reported: keys that the replica has reported.
        sent: other keys that this router has sent, with the end of their time, seconds; it ascends.
    """

    bit: int
    capacity_pieces: int
    reported: OrderedDict[int, None] = field(default_factory=OrderedDict)
    sent: OrderedDict[int, float] = field(default_factory=OrderedDict)


class PrefixMap:
    """Keys of prompt pieces by replica; see ``router.prompt_keys``.

    Of each replica at most its capacity is remembered. The least recently used pieces leave first, and the last piece
    of a prompt before the first: the pieces before a piece are of use without it, as in the engine.

    Attributes:
        expected_tokens, found_tokens: sums over the calls of ``found``: cached tokens that this map expected, and those
            of them that the engine had.
        false_hits: number of prompts of which the engine had fewer tokens than expected, by a piece or more.
    """

    def __init__(self, *, capacity_pieces: int, sent_s: float) -> None:
        """An empty map.

        Args:
            capacity_pieces: KV of a replica, in pieces, unless ``set_capacity`` says otherwise.
            sent_s: time for which pieces that were sent count as held without a report, seconds.
        """
        self._capacity_pieces = capacity_pieces
        self._sent_s = sent_s
        self._replicas: dict[str, _Replica] = {}
        self._names: list[str] = []  # by the number of the replica's bit; "" if the bit is free
        self._holders: dict[int, int] = {}  # bits of the replicas that hold a key
        self._expiries: deque[tuple[float, str]] = (
            deque()
        )  # end of the time of sent keys, and their replica; it ascends
        self.expected_tokens = 0
        self.found_tokens = 0
        self.false_hits = 0

    def set_capacity(self, replica_id: str, pieces: int) -> None:
        """Set the KV of a replica, in pieces."""
        replica = self._replica(replica_id)
        replica.capacity_pieces = pieces
        self._trim(replica)

    def pieces(self, replica_id: str) -> int:
        """Number of pieces that a replica is taken to hold."""
        replica = self._replicas.get(replica_id)
        return 0 if replica is None else len(replica.reported) + len(replica.sent)

    def store(self, replica_id: str, keys: Sequence[int]) -> None:
        """A replica reports that it holds these pieces, in the order of their prompt."""
        replica = self._replica(replica_id)
        for key in reversed(keys):
            if replica.sent.pop(key, None) is None and key not in replica.reported:
                self._holders[key] = self._holders.get(key, 0) | replica.bit
            replica.reported[key] = None
            replica.reported.move_to_end(key)
        self._trim(replica)

    def remove(self, replica_id: str, keys: Sequence[int]) -> None:
        """A replica reports that it no longer holds these pieces; unknown ones change nothing."""
        replica = self._replicas.get(replica_id)
        if replica is not None:
            for key in keys:
                self._remove(replica, key)

    def clear(self, replica_id: str) -> None:
        """Forget a replica: it is gone, or its engine has begun anew."""
        replica = self._replicas.pop(replica_id, None)
        if replica is not None:
            for key in (*replica.reported, *replica.sent):
                self._remove(replica, key)
            self._names[replica.bit.bit_length() - 1] = ""

    def sent(self, replica_id: str, prompt: PromptKeys, now_s: float) -> None:
        """This router has sent a prompt to a replica, which will hold its pieces soon. ``now_s`` never falls."""
        self.expire(now_s)
        replica = self._replica(replica_id)
        until_s = now_s + self._sent_s
        reported, sent, holders, bit = replica.reported, replica.sent, self._holders, replica.bit
        for key in reversed(prompt.keys):
            if key in reported:
                reported.move_to_end(key)
                continue
            if key in sent:
                sent.move_to_end(key)
            else:
                holders[key] = holders.get(key, 0) | bit
            sent[key] = until_s
        self._expiries.append((until_s, replica_id))
        self._trim(replica)

    def expire(self, now_s: float) -> None:
        """Forget the pieces that were sent and have not been reported in time; ``sent`` calls this."""
        while self._expiries and self._expiries[0][0] <= now_s:
            replica = self._replicas.get(self._expiries.popleft()[1])
            if replica is not None:
                while replica.sent and next(iter(replica.sent.values())) <= now_s:
                    self._remove(replica, next(iter(replica.sent)))

    def overlap_tokens(self, prompt: PromptKeys) -> dict[str, int]:
        """Leading tokens of a prompt that each replica holds; replicas without any are left out."""
        if not prompt.keys:
            return {}
        holders = self._holders
        mask, pieces = holders.get(prompt.keys[0], 0), 0  # bits of the replicas that hold all pieces so far
        # A prefix that all replicas hold has one overlap for most of them, which is set for all at once.
        is_common = mask.bit_count() == len(self._replicas)
        levels: list[tuple[int, int]] = []  # replicas that hold no more than a number of pieces
        for key in prompt.keys:
            now = holders.get(key, 0) & mask
            if now != mask:
                levels.append((mask ^ now, pieces))
                mask = now
                if not mask:
                    break
            pieces += 1
        if mask:
            levels.append((mask, pieces))
        levels = [(replicas, count) for replicas, count in levels if count]
        overlaps: dict[str, int] = {}
        if is_common and levels:
            common = max(levels, key=lambda level: level[0].bit_count())
            levels.remove(common)
            overlaps = dict.fromkeys(self._replicas, prompt.leading_tokens(common[1]))
        for replicas, count in levels:
            self._note(overlaps, replicas, prompt.leading_tokens(count))
        return overlaps

    def found(self, replica_id: str, prompt: PromptKeys, *, expected_tokens: int, found_tokens: int) -> None:
        """An engine had ``found_tokens`` of a prompt, where this map had expected ``expected_tokens``.

        A *false hit* is a difference of a piece or more. The pieces that were not found are then forgotten.
        """
        self.expected_tokens += expected_tokens
        self.found_tokens += min(found_tokens, expected_tokens)
        if expected_tokens - found_tokens >= prompt.piece_tokens:
            self.false_hits += 1
            self.remove(replica_id, prompt.keys[int(found_tokens / prompt.piece_tokens) :])

    def _replica(self, replica_id: str) -> _Replica:
        """The replica of a name, which is new if it was unknown."""
        replica = self._replicas.get(replica_id)
        if replica is None:
            if "" not in self._names:
                self._names.append("")
            number = self._names.index("")
            self._names[number] = replica_id
            replica = self._replicas[replica_id] = _Replica(1 << number, self._capacity_pieces)
        return replica

    def _trim(self, replica: _Replica) -> None:
        """Forget the least recently used pieces beyond the capacity: reported ones first, as those sent are newer."""
        excess = len(replica.reported) + len(replica.sent) - replica.capacity_pieces
        for _ in range(excess):
            self._remove(replica, next(iter(replica.reported or replica.sent)))

    def _remove(self, replica: _Replica, key: int) -> None:
        if replica.sent.pop(key, None) is None:
            if key not in replica.reported:
                return
            del replica.reported[key]
        holders = self._holders[key] & ~replica.bit
        if holders:
            self._holders[key] = holders
        else:
            del self._holders[key]

    def _note(self, overlaps: dict[str, int], replicas: int, tokens: int) -> None:
        """Note the overlap of the replicas whose bits are set."""
        while replicas:
            bit = replicas & -replicas
            overlaps[self._names[bit.bit_length() - 1]] = tokens
            replicas ^= bit
