"""Power and energy of plans."""

import math
from pathlib import Path

import pytest

from autoscale.operators.activity import Kind
from autoscale.operators.demand import BadCostError
from autoscale.operators.energy import PowerModel, data_sheet_power, load_power, mean_power_w, request_energy_j
from autoscale.operators.evaluation import Assumptions
from autoscale.operators.gpu import gpu_named
from autoscale.operators.model_level import plan_model_level
from autoscale.operators.queueing import wait_in_services
from tests.autoscale.operators.conftest import CONTENTION, MakeTable
from tests.autoscale.operators.roofline import HandCosts

POWER = PowerModel(idle_w=100.0, active_w=dict.fromkeys(Kind, 300.0), peak_w=400.0)


def test_eq_9_by_hand(make_table: MakeTable, turns: Assumptions) -> None:
    """Three instances, a: 100 W x 1 x 3 x (W + T) + 300 W x T, with T = 0.1 s and W = T C / (3 x 0.44)."""
    plan = plan_model_level(make_table(slo_s=0.2), turns)
    wait_s = 0.1 * float(wait_in_services(3, 0.56))
    assert request_energy_j(plan, POWER)["a"] == pytest.approx(100 * 3 * (wait_s + 0.1) + 300 * 0.1)


def test_a_meter_shows_idle_power_and_busy_shares(make_table: MakeTable, turns: Assumptions) -> None:
    """Three GPUs idle at 100 W, and 1.68 GPUs are busy on average: 300 + 1.68 x 300 W."""
    assert mean_power_w(plan_model_level(make_table(slo_s=0.2), turns), POWER) == pytest.approx(300 + 504)
    idle = plan_model_level(make_table(rate=0.0), turns)
    assert mean_power_w(idle, POWER) == 100.0
    hot = PowerModel(idle_w=100.0, active_w=dict.fromkeys(Kind, 9000.0), peak_w=400.0)
    assert mean_power_w(plan_model_level(make_table(slo_s=0.2), turns), hot) == 1200.0


def test_power_of_gpus(tmp_path: Path) -> None:
    sheet = data_sheet_power(gpu_named("A100"))
    assert sheet.idle_w + sheet.active_w[Kind.PRODUCT] == gpu_named("A100").peak_power_w
    h100 = load_power(CONTENTION / "h100_80gb_power.csv")
    assert h100.idle_w == pytest.approx(142.4, abs=0.2)
    assert 500 < h100.active_w[Kind.PRODUCT] < 600
    assert h100.active_w[Kind.NORM] < h100.active_w[Kind.PRODUCT]
    path = tmp_path / "power.csv"
    for text in ("kind,power_w\nidle,nan\n", "kind,power_w\nidle,100\n", "a,b\n1,2\n"):
        path.write_text(text)
        with pytest.raises(BadCostError):
            load_power(path)
    assert math.isfinite(h100.peak_w)


def test_eq_9_counts_the_gpus_of_a_replica(make_table: MakeTable, turns: Assumptions) -> None:
    """One replica on two GPUs, without load: 100 W x 2 x 1 x T + 300 W x T, with T = 0.05 s."""
    costs = HandCosts(fixed_s={"a": 0.1}, each_s={"a": 0.0}, sizes=(2,))
    plan = plan_model_level(make_table(costs, rate=0.0), turns)
    assert request_energy_j(plan, POWER) == {"a": pytest.approx(100 * 2 * 0.05 + 300 * 0.05)}
