"""Power and energy of a plan: Eq. 9, and what a meter would show (pure)."""

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from autoscale.operators.activity import Kind
from autoscale.operators.demand import BadCostError
from autoscale.operators.gpu import Gpu
from autoscale.operators.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerModel:
    """Power of one GPU: a constant, and more while an operator runs.

    Attributes:
        idle_w: alpha, power of a GPU with its context open.
        active_w: beta by kind of operator, power on top of that while it runs.
        peak_w: the power limit.
    """

    idle_w: float
    active_w: Mapping[Kind, float]
    peak_w: float


def data_sheet_power(gpu: Gpu) -> PowerModel:
    """A GPU for which nothing was measured: every operator takes it from its idle to its peak power."""
    active_w = dict.fromkeys(Kind, gpu.peak_power_w - gpu.idle_power_w)
    return PowerModel(idle_w=gpu.idle_power_w, active_w=active_w, peak_w=gpu.peak_power_w)


def request_energy_j(plan: Plan, power: PowerModel) -> dict[str, float]:
    """E_v of each operator for one request, joule: Eq. 9 as printed, alpha P R (W + T) + beta T.

    The first term charges a request with all replicas for as long as it is at the operator. So with more than one
    request in the model it counts the same idle power more than once: use it to compare plans of one demand, and
    ``mean_power_w`` for what a meter shows.
    """
    judged, table = plan.evaluation, plan.table
    energies = {}
    for place, (one, option) in enumerate(zip(table.operators, plan.choice, strict=True)):
        setting = plan.settings[one.name]
        service_s, wait_s = float(judged.service_s[place]), float(judged.wait_s[place])
        active_w = power.active_w[one.activities[option].kind]
        idle_j = power.idle_w * setting.parallel * setting.replicas * (wait_s + service_s)
        energies[one.name] = idle_j + active_w * service_s
    return energies


def mean_power_w(plan: Plan, power: PowerModel) -> float:
    """Mean power of all GPUs of a plan, watt: each idles, and takes more for the share of time that operators run."""
    table, rate = plan.table, plan.table.demand.passes_per_s
    active_w = sum(
        rate * float(one.gpu_s[option]) * power.active_w[one.activities[option].kind]
        for one, option in zip(table.operators, plan.choice, strict=True)
    )
    return min(plan.gpus * power.peak_w, plan.gpus * power.idle_w + active_w)


def load_power(path: Path) -> PowerModel:
    """Read a table with columns kind, power_w: one row for each kind (beta), one for idle (alpha), one for peak.

    Raises:
        BadCostError: the file cannot be read, a value is no number from 0, or a row is missing.
    """
    try:
        with path.open(newline="", encoding="utf-8") as lines:
            powers = {row["kind"]: float(row["power_w"]) for row in csv.DictReader(lines)}
        if not all(0.0 <= value < math.inf for value in powers.values()):
            raise BadCostError(f"{path}: a power is no number from 0: {powers}")
        active_w = {kind: powers[kind.value] for kind in Kind}
        return PowerModel(idle_w=powers["idle"], active_w=active_w, peak_w=powers["peak"])
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise BadCostError(f"{path}: cannot be read: {error!r}") from None
