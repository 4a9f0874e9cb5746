"""Spreads leaders and followers over the groups of a service (pure)."""

from collections.abc import Collection, Mapping, Sequence

from autoscale.decide.group import Group
from autoscale.decide.supply import Supply
from autoscale.ratio import PdRatio, whole
from autoscale.types import PoolKey
from kvtransfer.topology import Role


class Spread:
    """All groups of a service, and the supply of room for their replicas."""

    def __init__(self, groups: Sequence[Group], ratio: PdRatio, supply: Supply) -> None:
        self._groups, self._supply = groups, supply
        self._leader, self._follower = ratio.leader, ratio.follower

    def reserve(self, overdue: Collection[PoolKey]) -> None:
        """Take room for replicas that Serve is starting; give up those that have waited for a node for too long.

        Other groups start the replicas that are given up. Without another group, the same one starts them in the next
        cycle: it may have other nodes by then.
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
        """Add or remove leaders, and add the followers that new leaders need; returns the wanted followers."""
        most = counts[self._follower] + spare_followers
        followers = self._least_followers(counts, most)
        missing = counts[self._leader] - sum(group.leaders for group in self._groups)
        for _ in range(missing):
            # As few more followers as possible, so that some group takes a leader.
            needed = next((needed for needed in range(followers, most + 1) if self._grow(needed)), None)
            if needed is None:
                break
            followers = needed
        for _ in range(-missing):
            giving = [group for group in self._groups if group.can(group.leader, -1)]
            if not giving:
                break
            max(giving, key=Group.rank_to_shrink).counts[self._leader] -= 1
        for _ in range(counts[self._leader]):
            if sum(group.needed() for group in self._groups) <= followers or not self._relieve():
                break
        return self._least_followers(counts, most)

    def _least_followers(self, counts: Mapping[Role, int], most: int) -> int:
        """The wanted followers, or more (up to ``most``) if groups that serve or lowest counts require them."""
        return max(counts[self._follower], min(most, sum(group.least() for group in self._groups)))

    def _grow(self, followers: int) -> bool:
        """Add one leader and its due followers, as far as there are ``followers``; returns whether a group took it."""
        unassigned = followers - sum(group.followers for group in self._groups)
        needed = sum(group.needed() for group in self._groups)
        for group in sorted(self._groups, key=Group.rank_to_grow):
            lacking = self._grow_group(group, followers - needed + group.needed(), unassigned)
            group.passed_over = lacking or ""
            if lacking is None:
                return True
        return False

    def _grow_group(self, group: Group, most_needed: int, unassigned: int) -> str | None:
        """Add a leader to a group; returns why the group takes none, or ``None``.

        ``most_needed``: followers that other groups do not need; ``unassigned``: followers that no group has yet.
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
        """Move a leader from a group that lacks followers to one that needs no more followers for it."""
        crowded = [
            group
            for group in self._groups
            if group.can(group.leader, -1) and group.needed() > group.follower.limits.lowest_replicas
        ]
        donor = min(crowded, key=Group.until_relieved, default=None)
        for taker in sorted(self._groups, key=Group.rank_to_grow):
            if donor is None or taker is donor or not taker.can(taker.leader, 1) or taker.cannot_grow:
                continue
            if taker.needed(1) == taker.needed() and self._supply.take((taker.leader, 1)) is None:
                donor.counts[self._leader] -= 1
                taker.counts[self._leader] += 1
                return True
        return False

    def fit_followers(self, counts: Mapping[Role, int]) -> None:
        """Add followers to groups furthest below the ratio, or remove them from groups furthest above.

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
        """Groups that can give a follower and stay in the band; if none can and not strict, all that can give one."""
        able = [group for group in self._groups if group.can(group.follower, -1)]
        spare = [group for group in able if group.followers > group.needed()]
        return spare if spare or is_strict else [group for group in able if group.followers > group.least()]

    def _add_follower(self, full: set[str]) -> bool:
        """Add one follower; returns whether a group took it. Adds the names of groups without room to ``full``."""
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
        """Move one leader from a group that lacks followers for good to another group.

        The other group has followers to spare, or room for the leader and for missing followers. The next leader moves
        only once the last one runs.
        """
        missing = max(0, counts[self._follower] - sum(group.followers for group in self._groups))
        for starved in self._groups:
            if starved.followers >= starved.needed() or not starved.can(starved.leader, -1):
                continue
            for taker in sorted(self._groups, key=Group.rank_to_grow):
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
        """Remove prefill from groups without decode, where it is useless; decode without prefill serves alone."""
        for group in self._groups:
            if group.counts[Role.DECODE] == 0:
                least = group.pools[Role.PREFILL].limits.lowest_replicas - group.stuck[Role.PREFILL]
                group.counts[Role.PREFILL] = min(group.counts[Role.PREFILL], max(0, least))
