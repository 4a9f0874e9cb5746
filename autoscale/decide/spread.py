"""Spreads leaders and followers over the groups of a service (pure).

A leader is a replica of the ratio's larger role (decode if both are equal); a follower is a replica of the other role.
``placement.place`` states the rules and calls the methods in their order.
"""

from collections.abc import Collection, Mapping, Sequence

from autoscale.decide.group import Group
from autoscale.decide.supply import Supply
from autoscale.ratio import PdRatio, whole
from autoscale.types import PoolKey
from kvtransfer.topology import Role


class Spread:
    """All groups of a service, and the supply of room for their replicas.

    Methods that take ``counts`` get the wanted replicas of each role over all groups.
    """

    def __init__(self, groups: Sequence[Group], ratio: PdRatio, supply: Supply) -> None:
        self._groups, self._supply = groups, supply
        self._leader, self._follower = ratio.leader, ratio.follower

    def reserve(self, overdue: Collection[PoolKey]) -> None:
        """Take room for replicas that Serve is starting; give up those that have waited for a node for too long.

        Another group starts the replicas that are given up. If none can, the same group starts them in the next cycle:
        it may have other nodes by then.
        """
        for group in self._groups:
            for role, pool in group.pools.items():
                missing = 0 if pool.held_replicas is None else group.placed(role) - pool.held_replicas
                if missing > 0 and pool.key in overdue:
                    group.close(role)
                    continue
                for _ in range(missing):
                    # Budgets count the replica already. If no node has room for it, it goes on waiting.
                    self._supply.take_room([(pool, 1)])

    def fit_leaders(self, counts: Mapping[Role, int], spare_followers: int) -> int:
        """Add or remove leaders, and add followers that new leaders need; returns the wanted number of followers.

        This number may exceed that of ``counts`` by at most ``spare_followers``.
        """
        most = counts[self._follower] + spare_followers
        followers = self._least_followers(counts, most)
        missing = counts[self._leader] - sum(group.leaders for group in self._groups)
        for _ in range(missing):
            # The fewest followers with which some group takes a leader: ``_grow`` adds it when it returns True.
            enough = next((number for number in range(followers, most + 1) if self._grow(number)), None)
            if enough is None:
                break
            followers = enough
        for _ in range(-missing):  # too many leaders
            giving = [group for group in self._groups if group.allows(group.leader, -1)]
            if not giving:
                break
            max(giving, key=Group.rank_to_shrink).counts[self._leader] -= 1
        # Move leaders until the groups need no more followers than they get; no leader needs to move twice.
        for _ in range(counts[self._leader]):
            if sum(group.fewest_to_serve() for group in self._groups) <= followers or not self._relieve():
                break
        return self._least_followers(counts, most)

    def _least_followers(self, counts: Mapping[Role, int], most: int) -> int:
        """The wanted followers, or more (up to ``most``) if groups that serve or lowest counts require them."""
        return max(counts[self._follower], min(most, sum(group.fewest_that_stay() for group in self._groups)))

    def _grow(self, followers: int) -> bool:
        """Add a leader, and its followers as far as all groups together may have ``followers``.

        Returns whether a group took the leader.
        """
        unassigned = followers - sum(group.followers for group in self._groups)
        needed = sum(group.fewest_to_serve() for group in self._groups)
        for group in sorted(self._groups, key=Group.rank_to_grow):
            needed_by_others = needed - group.fewest_to_serve()
            why_not = self._grow_group(group, followers - needed_by_others, unassigned)
            group.passed_over = why_not or ""
            if why_not is None:
                return True
        return False

    def _grow_group(self, group: Group, available: int, unassigned: int) -> str | None:
        """Add a leader and its followers to a group; returns why the group takes none, or ``None``.

        ``available``: followers that other groups do not need; ``unassigned``: followers that no group has yet,
        negative if the groups have too many.
        """
        if not group.allows(group.leader, 1):
            return group.why_full(group.leader)
        fewest = group.fewest_to_serve(1)
        if fewest > available:
            return f"no {self._follower} replica is left for it"
        followers = max(group.followers, fewest, min(group.at_ratio(1), group.followers + unassigned))
        highest = group.highest(group.follower) - group.stuck[self._follower]
        followers = min(followers, max(group.followers, highest))
        if followers < fewest:
            return group.why_full(group.follower)
        why_not = group.cannot_grow or self._supply.take(
            (group.leader, 1), (group.follower, followers - group.followers)
        )
        if why_not is None:
            group.counts[self._leader] += 1
            group.counts[self._follower] = followers
        return why_not

    def _relieve(self) -> bool:
        """Move a leader so that fewer followers are needed; returns whether one moved.

        The leader leaves the group in which the fewest leaders must leave before one follower less is needed. It goes
        to a group that needs no further follower for one leader more.
        """
        crowded = [
            group
            for group in self._groups
            if group.allows(group.leader, -1) and group.fewest_to_serve() > group.follower.limits.lowest_replicas
        ]
        donor = min(crowded, key=Group.leaders_to_relieve, default=None)
        for taker in sorted(self._groups, key=Group.rank_to_grow):
            if donor is None or taker is donor or not taker.allows(taker.leader, 1) or taker.cannot_grow:
                continue
            needs_no_more = taker.fewest_to_serve(1) == taker.fewest_to_serve()
            if needs_no_more and self._supply.take((taker.leader, 1)) is None:
                donor.counts[self._leader] -= 1
                taker.counts[self._leader] += 1
                return True
        return False

    def fit_followers(self, counts: Mapping[Role, int]) -> None:
        """Add followers to the groups furthest below the ratio, or remove them from the groups furthest above it.

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
        for _ in range(-missing):  # too many followers
            # If followers are pending with their leaders, none leaves a group that needs it.
            giving = self._with_spare_followers(is_strict=wanted < counts[self._follower])
            if not giving:
                break
            max(giving, key=Group.surplus).counts[self._follower] -= 1

    def _with_spare_followers(self, *, is_strict: bool) -> list[Group]:
        """Groups that have more followers than their leaders need.

        If there is none, and not ``is_strict``: all groups that can give a follower and keep the fewest that must stay.
        """
        able = [group for group in self._groups if group.allows(group.follower, -1)]
        spare = [group for group in able if group.followers > group.fewest_to_serve()]
        if spare or is_strict:
            return spare
        return [group for group in able if group.followers > group.fewest_that_stay()]

    def _add_follower(self, full: set[str]) -> bool:
        """Add one follower; returns whether a group took it. Adds the names of groups without room to ``full``."""
        takers = [
            group
            for group in self._groups
            if group.name not in full and group.followers < group.most_to_serve() and group.allows(group.follower, 1)
        ]
        for group in sorted(takers, key=Group.surplus):
            why_not = group.cannot_grow or self._supply.take((group.follower, 1))
            if why_not is None:
                group.counts[self._follower] += 1
                return True
            group.passed_over = why_not
            full.add(group.name)
        return False

    def rescue(self, counts: Mapping[Role, int]) -> None:
        """Move one leader to another group if its own group lacks followers even after ``fit_followers``.

        The other group has room for the leader, and either followers to spare or room for missing followers. While a
        leader of a group still starts, no other one moves there.
        """
        missing = max(0, counts[self._follower] - sum(group.followers for group in self._groups))
        for starved in self._groups:
            if starved.followers >= starved.fewest_to_serve() or not starved.allows(starved.leader, -1):
                continue
            for taker in sorted(self._groups, key=Group.rank_to_grow):
                if taker is not starved and self._take_in(taker, missing):
                    starved.counts[self._leader] -= 1
                    return

    def _take_in(self, taker: Group, missing: int) -> bool:
        """Add one leader, and at most ``missing`` followers that the ratio requires; returns whether it took them."""
        is_starting = len(taker.leader.replicas) < taker.leader.target_replicas
        new_followers = max(0, taker.at_ratio(1) - taker.followers)
        if is_starting or taker.cannot_grow or not taker.allows(taker.leader, 1) or new_followers > missing:
            return False
        if new_followers and not taker.allows(taker.follower, new_followers):
            return False
        if self._supply.take((taker.leader, 1), (taker.follower, new_followers)) is not None:
            return False
        taker.counts[self._leader] += 1
        taker.counts[self._follower] += new_followers
        taker.passed_over = ""
        return True

    def drop_useless_prefill(self) -> None:
        """Remove prefill beyond the lowest count from groups without decode.

        Decode without prefill stays, since it computes prompts itself.
        """
        for group in self._groups:
            if group.counts[Role.DECODE] == 0:
                lowest = max(0, group.pools[Role.PREFILL].limits.lowest_replicas - group.stuck[Role.PREFILL])
                group.counts[Role.PREFILL] = min(group.counts[Role.PREFILL], lowest)
