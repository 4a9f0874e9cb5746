"""The part of the decision log that `tandem explain` reads."""

import json
from pathlib import Path
from typing import Any

from serve_app.cli.placement import _history


def line(now_s: float, desired: dict[str, int], service: str = "a") -> str:
    plan: dict[str, Any] = {"state": {"desired": desired}, "decision": {"reason": f"reason at {now_s:.0f}"}}
    return json.dumps({"service": service, "snapshot": {"now_s": now_s}, "plan": plan})


def test_the_history_has_the_changes_of_one_service(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text("\n".join([line(1.0, {"p": 1}), line(2.0, {"p": 9}, "b"), line(3.0, {"p": 1}), line(4.0, {"p": 3})]))
    (change,) = _history(log, "a")
    assert "p +2: reason at 4" in change


def test_a_line_that_is_not_whole_is_left_out(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    whole = "\n".join([line(1.0, {"p": 1}), line(2.0, {"p": 2})])
    log.write_bytes(whole.encode() + b'\n\xff\n{"service": "a", "pl')
    (change,) = _history(log, "a")
    assert "p +1: reason at 2" in change


def test_a_log_of_another_machine_is_named(tmp_path: Path) -> None:
    (hint,) = _history(tmp_path / "log.jsonl", "a")
    assert f"{tmp_path / 'log.jsonl'} on the head node" in hint
