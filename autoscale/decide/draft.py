"""Draft: the values of a tick, which its stages fill in one after the other, and the plan made from them (pure)."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autoscale.decide.config import AutoscaleConfig
from autoscale.decide.containment import PolicyCall
from autoscale.decide.placement import Placed
from autoscale.decide.slots import Slots
from autoscale.floors import Floor
from autoscale.headcount import Census
from autoscale.ratio import PdRatio
from autoscale.room import Room
from autoscale.types import ControllerState, Decision, Note, Plan, PoolKey, PoolStats, Snapshot
from kvtransfer.topology import Role


@dataclass(slots=True, kw_only=True)
class Draft:
    """Input and results of the stages of one tick.

    A field below a stage's name gets its value in that stage. Earlier access is an AttributeError, so a wrong order of
    stages fails at once.

    Attributes:
        config: the configuration; from ``follow_ratio`` on, with the ratio of this tick.
        snapshot: input; its state is the state after the last tick.
        slots: free room of nodes, from which placed replicas are taken.
        notes: why less was done than the policy wanted; the plan's ``held_back``.
        state: the snapshot's state, brought up to date; later stages turn it into the plan's state.
        census: standard replicas of each role that should serve, run, are withdrawn or must stop.
        pools: pools of the snapshot, with all limits applied.
        room: limits of both roles' counts over all pools.
        overdue: pools with replicas that have waited for a node for too long.
        floors: floors that are in force, or for which replicas start already.
        ratio_change: why the ratio that follows the requests has changed in this tick; ``None``: it has not.
        hold: why the policy's wish is ignored; ``None``: it is followed.
        may_leave: whether running replicas may leave: latency, without the TTFT from before the last replica entered,
            meets its objective, or people, limits or claims want fewer.
        may_give_up: whether replicas that start may leave too: the whole latency meets its objective, or people or
            claims want fewer.
        is_missed: whether latency misses its objective while replicas are withdrawn, so that they come back.
        decision: the policy's wish, or what replaces it.
        falls_asleep: whether all replicas stop in this tick, since no request comes.
        stuck: standard replicas of each role that lowest counts require but that have waited for a node for too long.
        current: standard replicas of each role that should serve now, without stuck ones.
        floor_counts: counts at the ratio that the floors require at once, as far as the room allows; 0: they are met.
        wanted: standard replicas of each role that should serve from now on.
        final_counts: as ``wanted``, with the replicas that start only when leaving replicas have freed their GPUs.
        is_exchange: whether one role gives GPUs to the other although latency misses its objective.
        placed: the placement of ``wanted``; the state's counts, if no count or place changes.
        again: pools whose replicas that wait for a node ask for another one.
        counts: replicas of each pool for Serve, with warm and withdrawn ones.
        admitted: replicas that get requests.
        held: running replicas that get no requests: they wait for the other role, or are warm.
    """

    config: AutoscaleConfig
    policy: PolicyCall
    snapshot: Snapshot
    slots: Slots | None
    notes: list[Note] = field(default_factory=list)
    # reconcile
    state: ControllerState = field(init=False)
    census: Census = field(init=False)
    pools: list[PoolStats] = field(init=False)
    room: Room = field(init=False)
    overdue: frozenset[PoolKey] = field(init=False)
    floors: tuple[Floor, ...] = field(init=False)
    # follow_ratio
    ratio_change: str | None = field(init=False)
    # hold
    hold: str | None = field(init=False)
    may_leave: bool = field(init=False)
    may_give_up: bool = field(init=False)
    is_missed: bool = field(init=False)
    # decide
    decision: Decision = field(init=False)
    # sleep
    falls_asleep: bool = field(init=False)
    # raise_to_floors
    stuck: Mapping[Role, float] = field(init=False)
    current: Mapping[Role, float] = field(init=False)
    floor_counts: Mapping[Role, float] = field(init=False)
    # guard
    wanted: Mapping[Role, float] = field(init=False)
    final_counts: Mapping[Role, float] = field(init=False)
    # exchange
    is_exchange: bool = field(init=False)
    # place
    placed: Placed = field(init=False)
    # ask_again
    again: list[PoolKey] = field(init=False)
    # admit
    counts: dict[PoolKey, int] = field(init=False)
    admitted: list[str] = field(init=False)
    held: list[str] = field(init=False)

    @property
    def now_s(self) -> float:
        """The instant of the tick."""
        return self.snapshot.now_s

    @property
    def ratio(self) -> PdRatio:
        """The decision's ratio, or else the configured one."""
        return self.decision.ratio or self.config.ratio


def emit(draft: Draft) -> Plan:
    """The plan of a draft that has gone through all stages."""
    state, decision, placed = draft.state, draft.decision, draft.placed
    has_new = not frozenset(state.admitted).issuperset(draft.admitted)
    # The snapshot's state: in the new one, replicas that came back are withdrawn no more.
    withdrawn = draft.snapshot.state.withdrawn
    admitted = frozenset(draft.admitted) if withdrawn else frozenset[str]()
    # With the time at which replicas were added, ``wish`` tells the TTFT of earlier requests apart.
    state = replace(
        state,
        ticked_s=draft.now_s,
        admitted=tuple(draft.admitted),
        held=tuple(draft.held),
        settled_s=draft.now_s + draft.config.window_s if has_new else state.settled_s,
        memory=state.memory if decision.memory is None else decision.memory,
    )
    return Plan(
        counts=draft.counts,
        admitted=state.admitted,
        withdrawn=tuple(state.withdrawn),
        reinstated=tuple(name for name in withdrawn if name in admitted),
        victims=state.victims,
        decision=decision,
        held_back=tuple(draft.notes),
        state=state,
        pending=placed.pending if any(placed.pending.values()) else {},
        passed_over=placed.passed_over,
        nodes=placed.nodes,
        again=tuple(draft.again),
    )


def unchanged(snapshot: Snapshot, reason: str) -> Plan:
    """The plan that changes nothing. Timers start anew, since no tick observed the time until now."""
    state = replace(
        snapshot.state,
        withdrawn=dict.fromkeys(snapshot.state.withdrawn, snapshot.now_s),
        missing_since_s={},
        unplaced_since_s={},
        idle_since_s=None,
        ticked_s=snapshot.now_s,
    )
    return Plan(
        counts={pool.key: pool.target_replicas for pool in snapshot.pools},
        admitted=state.admitted,
        withdrawn=tuple(state.withdrawn),
        victims=state.victims,
        decision=Decision(wanted=None, reason=reason),
        state=state,
    )
