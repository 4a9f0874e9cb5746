"""How leaders and followers spread over the groups of a service (pure)."""

from collections.abc import Collection, Mapping, Sequence

from autoscale.decide.group import Group
from autoscale.decide.supply import Supply
from autoscale.ratio import PdRatio, whole
from autoscale.types import PoolKey
from kvtransfer.topology import Role


class Spread:
    """All groups of a service, and the room that they can take."""

    def __init__(self, groups: Sequence[Group], ratio: PdRatio, supply: Supply) -> None:
        self._groups, self._supply = groups, supply
        self._leader, self._follower = ratio.leader, ratio.follower

    def reserve(self, overdue: Collection[PoolKey]) -> None:
        """Take room for replicas that Serve starts already; give up those that have waited for a node for too long.

        Replicas that are given up are started in other groups. If there is no other group, they are started in the same
        one in the next cycle: it may have other nodes by then.
        """
        for group in self._groups:
            for role, pool in group.pools.items():
                missing = 0 if pool.held_replicas is None else group.placed(role) - pool.held_replicas
                if missing > 0 and pool.key in overdue:
                    group.close(role)
                    continue
                for _ in range(missing):
                    self._supply.take_room([(pool, 1)])  # budgets count it already

    def fit_leaders(self, counts: Mapping[Role, int], spare_followers: int) -> int:
        """Add or remove leaders, and add the followers that new leaders need; returns the followers to place."""
        most = counts[self._follower] + spare_followers
        followers = self._least_followers(counts, most)
        missing = counts[self._leader] - sum(group.leaders for group in self._groups)
        for _ in range(missing):
            # The fewest followers with which some group takes a leader.
            more = next((more for more in range(followers, most + 1) if self._grow(more)), None)
            if more is None:
                break
            followers = more
        for _ in range(-missing):
            giving = [group for group in self._groups if group.can(group.leader, -1)]
            if not giving:
                break
            max(giving, key=Group.standing).counts[self._leader] -= 1
        for _ in range(counts[self._leader]):
            if sum(group.needed() for group in self._groups) <= followers or not self._relieve():
                break
        return self._least_followers(counts, most)

    def _least_followers(self, counts: Mapping[Role, int], most: int) -> int:
        """The wanted followers, or more if groups that serve need one each, or must keep some."""
        return max(counts[self._follower], min(most, sum(group.least() for group in self._groups)))

    def _grow(self, followers: int) -> bool:
        """Add one leader, with its due followers as far as they are available; returns whether a group took it."""
        unassigned = followers - sum(group.followers for group in self._groups)
        needed = sum(group.needed() for group in self._groups)
        for group in sorted(self._groups, key=Group.rank):
            lacking = self._grow_group(group, followers - needed + group.needed(), unassigned)
            group.passed_over = lacking or ""
            if lacking is None:
                return True
        return False

    def _grow_group(self, group: Group, most_needed: int, unassigned: int) -> str | None:
        """Add a leader to a group; returns why it takes none, or ``None``.

        The group may need ``most_needed`` followers, since other groups need the others; no group has ``unassigned``.
        """
        if not group.can(group.leader, 1):
            return group.full(group.leader)
        least = group.needed(1)
        if least > most_needed:
            return f"no {self._follower} replica is left for it"
        followers = max(group.followers, least, min(group.due(1), group.followers + unassigned))
        highest = group.highest(group.follower) - group.stuck[self._follower]
        followers = min(followers, max(group.followers, highest))
        if followers < least:
            return group.full(group.follower)
        lacking = group.cannot_grow or self._supply.take(
            (group.leader, 1), (group.follower, followers - group.followers)
        )
        if lacking is None:
            group.counts[self._leader] += 1
            group.counts[self._follower] = followers
        return lacking

    def _relieve(self) -> bool:
        """Move a leader from a group that lacks followers to a group that needs no more followers for it."""
        crowded = [
            group
            for group in self._groups
            if group.can(group.leader, -1) and group.needed() > group.follower.limits.lowest_replicas
        ]
        donor = min(crowded, key=Group.until_relieved, default=None)
        for taker in sorted(self._groups, key=Group.rank):
            if donor is None or taker is donor or not taker.can(taker.leader, 1) or taker.cannot_grow:
                continue
            if taker.needed(1) == taker.needed() and self._supply.take((taker.leader, 1)) is None:
                donor.counts[self._leader] -= 1
                taker.counts[self._leader] += 1
                return True
        return False

    def fit_followers(self, counts: Mapping[Role, int]) -> None:
        """Add followers where they are furthest below the ratio; remove them where they are furthest above.

        If leaders are pending, the same share of followers is pending.
        """
        leaders, wanted = sum(group.leaders for group in self._groups), counts[self._follower]
        if leaders < counts[self._leader]:
            wanted = min(wanted, whole(leaders * wanted / counts[self._leader]))
        missing = wanted - sum(group.followers for group in self._groups)
        full = set[str]()
        for _ in range(missing):
            if not self._add_follower(full):
                break
        for _ in range(-missing):
            giving = self._with_spare_followers(is_strict=wanted < counts[self._follower])
            if not giving:
                break
            max(giving, key=Group.surplus).counts[self._follower] -= 1

    def _with_spare_followers(self, *, is_strict: bool) -> list[Group]:
        """Groups that can give a follower and stay in the band; if none can and not strict, those that leave it."""
        able = [group for group in self._groups if group.can(group.follower, -1)]
        spare = [group for group in able if group.followers > group.needed()]
        if spare or is_strict:
            return spare
        # A group that serves keeps one of each role.
        return [group for group in able if group.followers > group.least()]

    def _add_follower(self, full: set[str]) -> bool:
        """Add one follower; returns whether a group took it. Groups without room are added to ``full``."""
        takers = [
            group
            for group in self._groups
            if group.name not in full and group.followers < group.most() and group.can(group.follower, 1)
        ]
        for group in sorted(takers, key=Group.surplus):
            lacking = group.cannot_grow or self._supply.take((group.follower, 1))
            if lacking is None:
                group.counts[self._follower] += 1
                return True
            group.passed_over = lacking
            full.add(group.name)
        return False

    def rescue(self, counts: Mapping[Role, int]) -> None:
        """Move one leader from a group that has lost its followers for good to another group.

        The other group has followers to spare, or room for the leader and for missing followers. The next leader moves
        only when the last one runs.
        """
        missing = max(0, counts[self._follower] - sum(group.followers for group in self._groups))
        for starved in self._groups:
            if starved.followers >= starved.needed() or not starved.can(starved.leader, -1):
                continue
            for taker in sorted(self._groups, key=Group.rank):
                if taker is not starved and self._take_in(taker, missing):
                    starved.counts[self._leader] -= 1
                    return

    def _take_in(self, taker: Group, missing: int) -> bool:
        """Add one leader and its due followers to a group; returns whether it took them."""
        is_waiting = len(taker.leader.replicas) < taker.leader.target_replicas
        more = max(0, taker.due(1) - taker.followers)
        if is_waiting or taker.cannot_grow or not taker.can(taker.leader, 1) or more > missing:
            return False
        if more and not taker.can(taker.follower, more):
            return False
        if self._supply.take((taker.leader, 1), (taker.follower, more)) is not None:
            return False
        taker.counts[self._leader] += 1
        taker.counts[self._follower] += more
        taker.passed_over = ""
        return True

    def give_up(self) -> None:
        """Remove prefill from groups without decode, where it is useless; decode alone computes prompts itself."""
        for group in self._groups:
            if group.counts[Role.DECODE] == 0:
                least = group.pools[Role.PREFILL].limits.lowest_replicas - group.stuck[Role.PREFILL]
                group.counts[Role.PREFILL] = min(group.counts[Role.PREFILL], max(0, least))
