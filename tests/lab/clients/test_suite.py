"""Outcomes of a client's process, its environment, and the table that is made of them."""

import json
import sys
from pathlib import Path

import pytest

from tests.lab.clients import environments
from tests.lab.clients.checks import FAILED, MARK, PASSED, SKIPPED, Outcome, Server
from tests.lab.clients.environments import Client, NotInstalledError, load_clients, prepare
from tests.lab.clients.page import cells, write_page
from tests.lab.clients.suite import ROOT, Row, read_outcomes, run_checks

CHECKS = """
import sys, time
from tests.lab.clients.checks import Checks, Skip
checks = Checks()

@checks.add
def good() -> None:
    print("the client prints too")

@checks.add
def bad() -> None:
    value = 1
    assert value == 2

@checks.add
async def absent() -> None:
    raise Skip("the server has none")

@checks.add
def last() -> None:
    {last}

checks.run()
"""


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(url="http://127.0.0.1:9", model="tiny", tokenizer=".", key="none", folder=str(tmp_path))


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Server, last: str, limit_s: float = 60.0) -> Row:
    (tmp_path / "fake_checks.py").write_text(CHECKS.format(last=last))
    client = Client(name="fake", packages=("fake==1.0",), limit_s=limit_s, point="")
    monkeypatch.setattr(Client, "module", "fake_checks")
    monkeypatch.setattr("tests.lab.clients.suite._ENVIRONMENT", {"PYTHONPATH": str(tmp_path)})
    return run_checks(client, Path(sys.executable), server, tmp_path)


def test_each_check_has_an_outcome(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Server) -> None:
    row = run(tmp_path, monkeypatch, server, "pass")
    assert [(one.name, one.state) for one in row.outcomes] == [
        ("good", PASSED),
        ("bad", FAILED),
        ("absent", SKIPPED),
        ("last", PASSED),
    ]
    assert "value == 2" in row.outcomes[1].detail and row.outcomes[2].detail == "the server has none"
    assert row.has_failed


@pytest.mark.parametrize(
    ("last", "limit_s", "cause"), [("sys.exit(3)", 60.0, "code 3"), ("time.sleep(60)", 3.0, "time limit of 3 s")]
)
def test_a_check_that_did_not_end_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Server, last: str, limit_s: float, cause: str
) -> None:
    outcome = run(tmp_path, monkeypatch, server, last, limit_s).outcomes[-1]
    assert (outcome.name, outcome.state) == ("last", FAILED) and cause in outcome.detail


def test_a_client_that_does_not_start_has_failed() -> None:
    (outcome,) = read_outcomes(["Traceback"], "the process ended with code 1")
    assert outcome.state == FAILED and outcome.detail == "the process ended with code 1"


def test_lines_of_the_client_are_no_outcomes() -> None:
    lines = ["noise", MARK + json.dumps(["one"]), "{}", MARK + json.dumps({"name": "one", "state": PASSED})]
    assert read_outcomes(lines, "") == (Outcome(name="one", state=PASSED),)


def test_pins_have_versions_and_checks() -> None:
    for client in load_clients():
        assert all(package.count("==") == 1 for package in client.packages), client
        assert (ROOT / f"{client.module.replace('.', '/')}.py").exists(), client


def test_an_environment_is_made_again_only_for_other_pins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str]) -> None:
        commands.append(command)
        (tmp_path / "fake").mkdir(exist_ok=True)

    monkeypatch.setattr(environments, "_run", run)
    first = Client(name="fake", packages=("fake==1.0",), limit_s=1, point="")
    assert prepare(first, tmp_path) == prepare(first, tmp_path) == tmp_path / "fake" / "bin" / "python"
    assert len(commands) == 2 and commands[1][-1] == "fake==1.0"
    prepare(Client(name="fake", packages=("fake==1.1",), limit_s=1, point=""), tmp_path)
    assert len(commands) == 4


def test_a_failed_installation_says_why() -> None:
    script = "import sys; sys.exit('line one\\nERROR: No matching distribution')"
    with pytest.raises(NotInstalledError, match="not installed: ERROR: No matching distribution"):
        environments._run([sys.executable, "-c", script])


def test_page_has_each_row_and_the_cause_of_each_failure() -> None:
    ran = Row(
        client="a",
        version="1",
        seconds=4.4,
        outcomes=(Outcome(name="good", state=PASSED), Outcome(name="bad", state=FAILED, detail="x | y\n`z`")),
    )
    absent = Row(client="b", version="2", reason="not installed: no network")
    assert cells(ran) == ("a", "1", "1", "1", "0", "4")
    assert cells(absent) == ("b", "2", "0", "0", "all: not installed: no network", "0")
    clients = [Client(name=name, packages=(), limit_s=1, point=f"point {name}.") for name in "ab"]
    text = write_page([ran, absent], clients, server="Tandem")
    assert "| a | 1 | 1 | 1 | 0 | 4 |" in text and "- a, bad: `x / y 'z'`" in text and "- **b**: point b." in text
