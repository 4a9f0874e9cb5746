"""The shipped tables of contention, shares and power come from the measurements."""

from pathlib import Path

import pytest

from tests.lab.operators import derive_contention
from tests.lab.operators.derive_contention import DERIVED, pairs, powers, shares


def test_committed_tables_are_those_of_the_measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(derive_contention, "DERIVED", tmp_path)
    derive_contention.main()
    for path in sorted(tmp_path.iterdir()):
        assert path.read_text() == (DERIVED / path.name).read_text(), path.name
    assert len(list(tmp_path.iterdir())) == len(list(DERIVED.glob("*.csv")))


def _pair(own: str, other: str, ratio: float) -> dict[str, str]:
    row = {"model": "m", "operator": own, "role": "both", "tokens": "64", "interference_ratio": str(ratio)}
    neighbour = {"model": "m", "operator": other, "role": "both", "tokens": "64"}
    return row | {f"neighbour_{name}": value for name, value in neighbour.items()}


def test_joint_speed_by_hand() -> None:
    """1 / 1.25 + 1 / 5 = 1: turns of time. 2 / 1.6 = 1.25 for two of a kind."""
    rows = [_pair("o_proj", "rmsnorm", 1.25), _pair("rmsnorm", "o_proj", 5.0), _pair("rmsnorm", "rmsnorm", 1.6)]
    assert pairs(rows) == [
        ("norm", 64, "norm", 64, pytest.approx(1.25), 1.25, 1.25, 1),
        ("norm", 64, "product", 64, pytest.approx(1.0), pytest.approx(1.0), pytest.approx(1.0), 1),
    ]


def test_shares_and_power_by_hand() -> None:
    base = {"model": "m", "operator": "rope", "role": "both", "tokens": "1"}
    rows = [base | {"share_percent": "100", "median_us": "10"}, base | {"share_percent": "50", "median_us": "15"}]
    assert shares(rows) == [("pointwise", 1, 50, pytest.approx(1.5)), ("pointwise", 1, 100, pytest.approx(1.0))]
    work = {"state": "busy", "operator": "o_proj", "role": "both"}
    busy = work | {"wanted_busy_frac": "1", "busy_frac": "0.5", "mean_power_w": "300", "idle_power_w": "100"}
    idle = {"state": "idle", "mean_power_w": "100"}
    assert powers([idle, busy], 700.0) == [("idle", 100.0), ("product", 400.0), ("peak", 700.0)]
