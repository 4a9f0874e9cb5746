"""Controller.tick: turns a snapshot into a plan by stages; only this file defines their order (pure)."""

from collections.abc import Callable

from autoscale.decide.again import ask_again
from autoscale.decide.config import AutoscaleConfig
from autoscale.decide.containment import PolicyCall, Run, directly
from autoscale.decide.draft import Draft, emit, unchanged
from autoscale.decide.floor import note_floors, raise_to_floors
from autoscale.decide.follow_ratio import follow_ratio, note_ratio
from autoscale.decide.gate import admit, leave
from autoscale.decide.guard import exchange, guard
from autoscale.decide.placing import place
from autoscale.decide.reconcile import reconcile
from autoscale.decide.slots import Slots
from autoscale.decide.starts import note_starts
from autoscale.decide.wish import bring_back, decide, hold, sleep
from autoscale.types import Plan, Snapshot
from kvtransfer.topology import Topology

Stage = Callable[[Draft], None]
STAGES: tuple[Stage, ...] = (
    *(reconcile, follow_ratio, hold, decide, sleep, bring_back, raise_to_floors, note_ratio),  # what is wanted
    *(guard, exchange, place, ask_again, note_floors, leave, admit),  # what is possible
    note_starts,
)


class Controller:
    """The control plane of one service, for a live cluster, a replayed log and a simulation alike.

    It has no memory: its state comes with the snapshot, and the plan carries the next state.
    """

    def __init__(self, config: AutoscaleConfig, run: Run = directly) -> None:
        """``run``: calls the policy; the live shell gives one that limits the time of the call."""
        self.config = config
        self._policy = PolicyCall(config, run)

    def tick(self, snapshot: Snapshot, slots: Slots | None = None) -> Plan:
        """The plan for one snapshot.

        ``slots``: free room on the snapshot's nodes, from which placed replicas are taken; ``None``: computed here.
        """
        if snapshot.is_recovering:
            return unchanged(snapshot, "Serve's controller is recovering its replicas")
        if slots is None and snapshot.nodes is not None:
            slots = Slots(Topology(snapshot.nodes))
        draft = Draft(config=self.config, policy=self._policy, snapshot=snapshot, slots=slots)
        for stage in STAGES:
            stage(draft)
        return emit(draft)
