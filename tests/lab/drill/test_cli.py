"""The command line of ``make drill``: what it refuses before it starts anything."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.cli.main import run
from tests.lab.drill.cli import commands

ROOT = Path(__file__).parents[3]


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs the command, and gives the one line with which it refuses."""

    def call(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["drill", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            run(commands)
        assert exit_.value.code == 1
        (line,) = capsys.readouterr().err.splitlines()
        return line.removeprefix("tandem: ")

    return call


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_transfer": {"lease": 5}}, r"kv_transfer.lease: no such field"),
        ({"groups": None}, r"groups: "),
        ({"ingress": []}, r"ingress: "),
        ({"http_options": "x"}, r"http_options"),
    ],
)
def test_drill_reads_its_config_before_it_lays_it_out(
    refusal: Any, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    pytest.importorskip("ray.serve.schema")
    document = yaml.safe_load((ROOT / "tests" / "lab" / "drill" / "tiny.yaml").read_text())
    top = {name: value for name, value in change.items() if name == "http_options"}
    document |= top
    document["applications"][0]["args"] |= {name: value for name, value in change.items() if name not in top}
    path = tmp_path / "drill.yaml"
    path.write_text(yaml.safe_dump(document))
    assert re.search(message, refusal(path, "--fault", "kill-decode"))


def test_a_report_that_cannot_be_written_is_refused_before_an_hour_of_drills(refusal: Any, tmp_path: Path) -> None:
    out = tmp_path / "file" / "rows.json"
    out.parent.touch()
    message = refusal("--fault", "kill-decode", "--json", out)
    assert message.endswith(": give a file that can be written")
