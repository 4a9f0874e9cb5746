"""Factories of the tests on pressure tests."""

from autoscale.pressure.steps import Step, StepResult
from autoscale.room import PoolRoom, Room
from autoscale.types import PoolLimits
from kvtransfer.topology import Role


def room(
    prefill: tuple[int, int] = (1, 9), decode: tuple[int, int] = (1, 9), gpus: float = 0.0, budget: int | None = None
) -> Room:
    """The bounds of both roles, and a budget."""
    bounds = {Role.PREFILL: prefill, Role.DECODE: decode}
    pools = [
        PoolRoom(role=role, limits=PoolLimits(lowest_replicas=low, highest_replicas=high, gpus_per_replica=gpus))
        for role, (low, high) in bounds.items()
    ]
    return Room.of(pools, budget)


def counts(prefill: int, decode: int) -> dict[Role, int]:
    """Replicas of each role."""
    return {Role.PREFILL: prefill, Role.DECODE: decode}


def result(step: Step, *, requests: int = 400, missed: int = 0, failed: int = 0, **fields: object) -> StepResult:
    """The result of a step with 400 requests."""
    return StepResult(step=step, requests=requests, missed=missed, failed=failed, **fields)  # type: ignore[arg-type]
