"""Spreads leaders and followers over the groups of a service (pure).

A leader is a replica of the ratio's larger role (decode if both are equal); a follower is a replica of the other role.
``placement.place`` states the rules and calls the methods in their order.
"""

from collections.abc import Collection, Mapping, Sequence

from autoscale.decide.group import Group
from autoscale.decide.supply import Supply
from autoscale.headcount import EPSILON_REPLICAS
from autoscale.ratio import PdRatio, whole
from autoscale.types import PoolKey
from kvtransfer.topology import Role


class Spread:
    """All groups of a service, and the supply of room for their replicas.

    Methods that take ``counts`` get the wanted standard replicas of each role over all groups (see
    ``autoscale.headcount``). A replica is added while any are missing, and removed while no fewer remain than are
    wanted.
    """

    def __init__(self, groups: Sequence[Group], ratio: PdRatio, supply: Supply) -> None:
        self._groups, self._supply = groups, supply
        self._leader, self._follower = ratio.leader, ratio.follower

    def reserve(self, overdue: Collection[PoolKey]) -> None:
        """Take room for replicas that Serve is starting; give up those that have waited for a node for too long.

        Another group starts the replicas that are given up. If none can, the same group starts them in the next cycle:
        it may have other nodes by then. Stuck ones keep the room of the possible node for which they wait by now.
        """
        for group in self._groups:
            for role, pool in group.pools.items():
                missing = 0 if pool.held_replicas is None else group.placed(role) - pool.held_replicas
                if missing > 0 and pool.key in overdue:
                    group.close(role)
                    missing = group.stuck[role] if self._supply.has_offer(pool) else 0
                for _ in range(missing):
                    # Budgets count the replica already. If no node has room for it, it goes on waiting.
                    self._supply.reserve(pool)

    def fit_leaders(self, counts: Mapping[Role, float], spare_followers: float) -> float:
        """Add or remove leaders, and add followers that new leaders need; returns the wanted number of followers.

        This number may exceed that of ``counts`` by at most ``spare_followers``.
        """
        most = counts[self._follower] + spare_followers
        followers = self._least_followers(counts, most)
        missing = counts[self._leader] - self._standard(self._leader)
        while missing > EPSILON_REPLICAS:
            enough = followers  # the fewest followers with which some group takes a leader
            while (grown := self._grow(enough)) is None and enough < most:
                enough = min(most, enough + 1.0)
            if grown is None:
                break
            followers = enough
            missing -= grown.leader_capacity
        self._shrink(counts)
        # Move leaders until the groups need no more followers than they get; no leader needs to move twice. What they
        # get is rounded up to whole replicas, perhaps to the largest one.
        beyond = max(group.follower_capacity for group in self._groups)
        for _ in range(sum(group.leaders for group in self._groups)):
            if self._needed_followers() < followers + beyond - EPSILON_REPLICAS or not self._relieve():
                break
            self._shrink(counts)  # the group to which a leader moved may have faster ones
        return self._least_followers(counts, most)

    def _shrink(self, counts: Mapping[Role, float]) -> None:
        """Remove leaders that are not needed."""
        surplus = self._standard(self._leader) - counts[self._leader]
        while surplus > EPSILON_REPLICAS:
            spare_followers = self._standard(self._follower) - counts[self._follower]
            able = [group for group in self._groups if group.allows(group.leader, -1)]
            giving = [
                group
                for group in able
                if group.leader_capacity <= surplus + EPSILON_REPLICAS
                # A replica of an aggregated group takes its work of the other role along.
                and (not group.is_aggregated or group.capacity_of(self._follower) <= spare_followers + EPSILON_REPLICAS)
            ]
            if not giving:
                return
            group = max(giving, key=Group.rank_to_shrink)
            group.leaders -= 1
            surplus -= group.leader_capacity

    def _standard(self, role: Role) -> float:
        """Standard replicas of a role in all groups."""
        return sum(group.standard(role) for group in self._groups)

    def _needed_followers(self) -> float:
        """Standard followers that the leaders of all groups need."""
        return sum(group.fewest_to_serve() * group.follower_capacity for group in self._groups)

    def _least_followers(self, counts: Mapping[Role, float], most: float) -> float:
        """The wanted followers, or more (up to ``most``) if groups that serve or lowest counts require them."""
        staying = sum(group.fewest_that_stay() * group.follower_capacity for group in self._groups)
        return max(counts[self._follower], min(most, staying))

    def _paired(self, followers: float) -> float:
        """``followers`` of all groups, less those whose work aggregated groups do; at least those that stay anyway."""
        aggregated = [group for group in self._groups if group.is_aggregated]
        if not aggregated:
            return followers
        staying = sum(group.fewest_that_stay() * group.follower_capacity for group in self._groups)
        return max(followers - sum(group.standard(self._follower) for group in aggregated), staying)

    def _grow(self, followers: float) -> Group | None:
        """Add a leader, and its followers as far as all groups together may have ``followers``.

        Returns the group that took the leader.
        """
        unassigned = followers - self._standard(self._follower)
        free = self._paired(followers) - self._needed_followers()
        for group in sorted(self._groups, key=Group.rank_to_grow):
            available = free + group.fewest_to_serve() * group.follower_capacity
            if group.is_aggregated and unassigned <= EPSILON_REPLICAS:
                why_not: str | None = "it would do work of both roles, and only one needs more"
            else:
                why_not = self._grow_group(group, available, unassigned)
            group.passed_over = why_not or ""
            if why_not is None:
                return group
        return None

    def _grow_group(self, group: Group, available: float, unassigned: float) -> str | None:
        """Add a leader and its followers to a group; returns why the group takes none, or ``None``.

        ``available``: standard followers that other groups do not need; ``unassigned``: standard followers that no
        group has yet, negative if the groups have too many.
        """
        if not group.allows(group.leader, 1):
            return group.why_full(group.leader)
        fewest = group.fewest_to_serve(1)
        if fewest > whole(available / group.follower_capacity):
            return f"no {group.follower.key.role} replica is left for it"
        unassigned_replicas = whole(unassigned / group.follower_capacity)
        followers = max(group.followers, fewest, min(group.at_ratio(1), group.followers + unassigned_replicas))
        highest = group.highest(group.follower) - group.stuck[group.follower.key.role]
        followers = min(followers, max(group.followers, highest))
        if followers < fewest:
            return group.why_full(group.follower)
        why_not = group.cannot_grow or self._supply.take(
            (group.leader, 1), (group.follower, followers - group.followers)
        )
        if why_not is None:
            group.leaders += 1
            group.followers = followers
        return why_not

    def _relieve(self) -> bool:
        """Move a leader so that fewer followers are needed; returns whether one moved.

        The leader leaves the group in which the fewest leaders must leave before one follower less is needed. It goes
        to a group that needs no further follower for one leader more, and whose leaders are not slower.
        """
        crowded = [
            group
            for group in self._groups
            if group.allows(group.leader, -1) and group.fewest_to_serve() > group.follower.limits.lowest_replicas
        ]
        donor = min(crowded, key=Group.leaders_to_relieve, default=None)
        if donor is None:
            return False
        for taker in sorted(self._groups, key=Group.rank_to_grow):
            if taker is donor or taker.is_aggregated or not taker.allows(taker.leader, 1) or taker.cannot_grow:
                continue
            needs_no_more = taker.fewest_to_serve(1) == taker.fewest_to_serve()
            is_as_fast = taker.leader_capacity >= donor.leader_capacity - EPSILON_REPLICAS
            if needs_no_more and is_as_fast and self._supply.take((taker.leader, 1)) is None:
                donor.leaders -= 1
                taker.leaders += 1
                return True
        return False

    def fit_followers(self, counts: Mapping[Role, float], most: float) -> None:
        """Add followers to the groups furthest below the ratio, or remove them from the groups furthest above it.

        If leaders are pending, the same share of followers is pending. ``most``: the most followers that may be, if
        groups need more than ``counts``.
        """
        leaders, wanted = self._standard(self._leader), counts[self._follower]
        if leaders < counts[self._leader] - EPSILON_REPLICAS:
            wanted = min(wanted, whole(leaders * wanted / counts[self._leader]))
        missing = wanted - self._standard(self._follower)
        full = set[str]()
        while missing > EPSILON_REPLICAS:
            group = self._add_follower(full)
            if group is None:
                break
            missing -= group.follower_capacity
        while missing < -EPSILON_REPLICAS:  # too many followers
            # If followers are pending with their leaders, none leaves a group that needs it.
            giving = [
                group
                for group in self._with_spare_followers(
                    is_strict=wanted < counts[self._follower]
                    or self._standard(self._follower) <= most + EPSILON_REPLICAS
                )
                if group.follower_capacity <= EPSILON_REPLICAS - missing
            ]
            if not giving:
                break
            group = max(giving, key=Group.surplus)
            group.followers -= 1
            missing += group.follower_capacity

    def _with_spare_followers(self, *, is_strict: bool) -> list[Group]:
        """Groups that have more followers than their leaders need.

        If there is none, and not ``is_strict``: all groups that can give a follower and keep the fewest that must stay.
        """
        able = [group for group in self._groups if group.allows(group.follower, -1)]
        spare = [group for group in able if group.followers > group.fewest_to_serve()]
        if spare or is_strict:
            return spare
        return [group for group in able if group.followers > group.fewest_that_stay()]

    def _add_follower(self, full: set[str]) -> Group | None:
        """Add one follower; returns the group that took it. Adds the names of groups without room to ``full``."""
        takers = [
            group
            for group in self._groups
            if group.name not in full and group.followers < group.most_to_serve() and group.allows(group.follower, 1)
        ]
        for group in sorted(takers, key=Group.surplus):
            why_not = group.cannot_grow or self._supply.take((group.follower, 1))
            if why_not is None:
                group.followers += 1
                return group
            group.passed_over = why_not
            full.add(group.name)
        return None

    def rescue(self, counts: Mapping[Role, float]) -> None:
        """Move one leader to another group if its own group lacks followers even after ``fit_followers``.

        The other group has room for the leader, and either followers to spare or room for missing followers. While a
        leader of a group still starts, no other one moves there, and none moves to a group of slower ones.
        """
        missing = max(0.0, counts[self._follower] - self._standard(self._follower))
        for starved in self._groups:
            if starved.followers >= starved.fewest_to_serve() or not starved.allows(starved.leader, -1):
                continue
            for taker in sorted(self._groups, key=Group.rank_to_grow):
                is_as_fast = taker.leader_capacity >= starved.leader_capacity - EPSILON_REPLICAS
                is_pair = taker is not starved and not taker.is_aggregated
                if is_pair and is_as_fast and self._take_in(taker, missing):
                    starved.leaders -= 1
                    return

    def _take_in(self, taker: Group, missing: float) -> bool:
        """Add one leader, and the followers that the ratio requires; returns whether the group took them.

        ``missing``: standard followers that are missing; the group gets no more than these.
        """
        is_starting = len(taker.leader.replicas) < taker.leader.target_replicas
        new_followers = max(0, taker.at_ratio(1) - taker.followers)
        is_too_many = new_followers > whole(missing / taker.follower_capacity)
        if is_starting or taker.cannot_grow or not taker.allows(taker.leader, 1) or is_too_many:
            return False
        if new_followers and not taker.allows(taker.follower, new_followers):
            return False
        if self._supply.take((taker.leader, 1), (taker.follower, new_followers)) is not None:
            return False
        taker.leaders += 1
        taker.followers += new_followers
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
