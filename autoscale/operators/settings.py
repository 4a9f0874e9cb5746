"""The decision variables of an operator, and the decisions for all operators of a model (pure)."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSetting:
    """Decisions for one operator (Eq. 4-6).

    Attributes:
        replicas: R_v.
        batch: B_v, requests that one service computes.
        parallel: P_v, GPUs of one replica.
        sm_share_percent: M_v, share of the SMs of each of its GPUs; 100: no limit.
    """

    replicas: int
    batch: int
    parallel: int
    sm_share_percent: int = 100

    def __post_init__(self) -> None:
        if self.replicas < 1 or self.batch < 1 or self.parallel < 1 or not 1 <= self.sm_share_percent <= 100:
            raise ValueError(f"{self}: each number is 1 or more, and sm_share_percent at most 100")


# One setting for each operator.
Settings = Mapping[str, OperatorSetting]


def replica_gpus(settings: Settings) -> int:
    """The paper's objective, Eq. 8: the sum of P_v R_v, which is the number of GPUs if none is shared."""
    return sum(setting.parallel * setting.replicas for setting in settings.values())
