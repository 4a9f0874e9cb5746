"""Drafts that have gone through the steps before the one that is tested."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from autoscale.decide.config import AutoscaleConfig
from autoscale.decide.containment import PolicyCall
from autoscale.decide.controller import STAGES
from autoscale.decide.draft import Draft
from autoscale.ratio import PdRatio
from autoscale.types import ControllerState, Decision, Snapshot
from kvtransfer.topology import Role

MakeDraft = Callable[..., Draft]


class Wish(PolicyCall):
    """The call of a policy that always wants the same counts."""

    def __init__(self, wanted: Mapping[Role, float] | None, config: AutoscaleConfig) -> None:
        super().__init__(config)
        self._decision = Decision(wanted=wanted, reason="a wish", is_step=True)

    def _answer(self, snapshot: Snapshot, ratio: PdRatio) -> Decision:
        return self._decision


@pytest.fixture
def make_draft(make_autoscale: Callable[..., AutoscaleConfig], make_snapshot: Callable[..., Snapshot]) -> MakeDraft:
    """One group of two prefill and two decode replicas, all admitted; the policy wants ``wish``."""

    def make(
        before: Callable[[Draft], None],
        *,
        wish: tuple[float, float] | None = None,
        counts: tuple[int, int] = (2, 2),
        state: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> Draft:
        snapshot = make_snapshot(*counts, **fields)
        names = tuple(replica.replica_id for pool in snapshot.pools for replica in pool.replicas)
        desired = {pool.key: len(pool.replicas) for pool in snapshot.pools}
        ticked = ControllerState(ticked_s=snapshot.now_s - 5.0, desired=desired, admitted=names)
        snapshot = replace(snapshot, state=replace(ticked, **(state or {})))
        wanted = None if wish is None else dict(zip(Role, wish, strict=True))
        made = make_autoscale(**(config or {}))
        draft = Draft(
            config=made,
            policy=Wish(wanted, made),
            snapshot=snapshot,
            slots=None,
        )
        for stage in STAGES[: STAGES.index(before)]:
            stage(draft)
        return draft

    return make
