"""Parts die under load on real engines, and no token of any answer is lost, repeated or wrong."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
# `make drill` runs the other faults.
FAULTS = [
    "break-nixl",
    "kill-controller",
    "kill-decode-engine",
    "kill-engine-worker",
    "hang-engine",
    "hang-decode",
    "kill-ingress",
    "node-loss",
    "spot-notice",
    "kill-everything",
]


@pytest.fixture(name="rows", scope="module")
def _rows(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    from tests.lab.drill.drill import drill

    document = yaml.safe_load((ROOT / "tests" / "lab" / "drill" / "tiny.yaml").read_text())
    document["applications"][0]["args"]["model"]["source"] = str(tiny_model)
    config = tmp_path_factory.mktemp("drill") / "drill.yaml"
    config.write_text(yaml.safe_dump(document))
    rows = drill(config, FAULTS, rate=2.0, seconds=15.0, say=print)
    return {row["fault"]: row for row in rows}


@pytest.mark.parametrize("fault", FAULTS)
def test_no_answer_is_lost_and_everything_runs_again(rows: dict[str, dict[str, Any]], fault: str) -> None:
    from tests.lab.drill.drill import failures
    from tests.lab.drill.faults import FRONT_FAULTS

    row = rows[fault]
    # A stream of a lost decode replica that did not go on, or a link that was not made anew, is a failure too.
    assert failures(row) == [], json.dumps(row)
    if fault not in FRONT_FAULTS:
        assert row["cut_at_front"] == 0


def test_a_new_serve_controller_finds_the_replicas_and_replaces_none(rows: dict[str, dict[str, Any]]) -> None:
    assert rows["kill-controller"]["replicas_ended"] == 0


def test_a_cut_link_ends_no_replica(rows: dict[str, dict[str, Any]]) -> None:
    assert rows["break-nixl"]["replicas_ended"] == 0
