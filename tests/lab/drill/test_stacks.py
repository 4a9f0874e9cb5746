"""How a drill goes on from fault to fault and from stack to stack; the applications are fakes here."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from serve_app.cli.main import run
from serve_app.sdk import Status
from tests.lab.drill import drill as drill_module
from tests.lab.drill.apis import OUTPUT_TOKENS, Answer
from tests.lab.drill.cli import commands
from tests.lab.drill.drill import failures, since
from tests.lab.drill.faults import FAULTS
from tests.lab.drill.load import run_load
from tests.lab.drill.stacks import STACKS, Stack, faults_of
from tests.lab.stand.precedence import ahead_of_others
from tests.lab.stand.processes import count_running, title
from tests.serve_app.fake_endpoint import FakeEndpoint, raw, refuse

CONFIG = Path(__file__).parent / "tiny.yaml"
ANSWER = raw(b'data: {"choices": [{"token_ids": %s}]}\n\n' % str([1] * OUTPUT_TOKENS).encode(), b"data: [DONE]\n\n")
MakeProcess = Callable[[str], psutil.Process]


@pytest.fixture
def make_process() -> Iterator[MakeProcess]:
    """A process with this title, as Ray and vLLM give titles to theirs."""
    started = []

    def make(title: str) -> psutil.Process:
        popen = subprocess.Popen([title, "60"], executable="/bin/sleep")
        started.append(popen)
        process = psutil.Process(popen.pid)
        while not process.cmdline():  # it is empty for a moment after exec
            time.sleep(0.01)
        return process

    yield make
    for popen in started:
        popen.kill()
        popen.wait()


class FakeApp:
    """Has one replica less at each call of ``status``, so it is never whole again."""

    def __init__(self, url: str, processes: list[psutil.Process]) -> None:
        self.url, self._processes, self._replicas = url, processes, 1000

    def status(self) -> Status:
        self._replicas -= 1
        return Status(state="RUNNING", message="", replicas={"decode": {"RUNNING": self._replicas}})

    def is_answering(self) -> bool:
        return True

    def processes(self) -> list[psutil.Process]:
        return self._processes

    def __enter__(self) -> "FakeApp":
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("title", ["ray::ServeReplica:tandem:decode:g0", "ray::ServeReplica:tandem:Decode:tiny"])
def test_the_replicas_of_both_stacks_are_found_by_their_role(make_process: MakeProcess, title: str) -> None:
    ingress, decode = make_process("ray::ServeReplica:tandem:ingress"), make_process(title)
    FAULTS["kill-decode"]([ingress, decode])
    assert decode.wait(10) == -signal.SIGKILL
    assert ingress.is_running()


@pytest.mark.parametrize(
    ("titles", "part"),
    [
        (["VLLM::EngineCore", "VLLM::EngineCore_DP0"], "engines"),
        (["ray::ServeReplica:tandem:decode:g0", "ray::ServeReplica:tandem:ingress"], "replicas"),
    ],
)
def test_a_stopped_process_does_not_count_as_running(make_process: MakeProcess, titles: list[str], part: str) -> None:
    processes = [*map(make_process, titles), make_process("ray::ServeController")]
    assert count_running(processes) == {part: 2}
    processes[0].suspend()
    while processes[0].status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    assert count_running(processes) == {part: 1}


def test_the_peer_has_no_coordinator_that_could_be_ended() -> None:
    assert faults_of("tandem", [*FAULTS]) == [*FAULTS]
    assert faults_of("ray-serve-llm", [*FAULTS]) == [
        fault for fault in FAULTS if fault not in ("kill-coordinator", "kill-everything")
    ]


def test_counters_of_the_endpoint_and_of_decode_replicas_are_read_from_the_metrics_page(
    make_endpoint: Callable[..., FakeEndpoint],
) -> None:
    page = """# TYPE tandem_resumed counter
tandem_resumed_total{replica="a"} 2.0
tandem_resumed_total{replica="b"} 1.0
# TYPE tandem_prefill_failures counter
tandem_prefill_failures_total{replica="c"} 5.0
# TYPE tandem_link_failures counter
tandem_link_failures_total{replica="c",why="stuck"} 1.0
tandem_link_failures_total{replica="c",why="failed"} 2.0
# TYPE tandem_prefill_path counter
tandem_prefill_path_total{path="local",reason="kv_late",replica="c"} 4.0
tandem_prefill_path_total{path="local",reason="short",replica="c"} 50.0
"""
    app: Any = SimpleNamespace(metrics_url=f"{make_endpoint(ANSWER, page).url}/metrics")
    counters = STACKS["tandem"].counters(app)
    failed = {"prefill_failures": 5, "link_failures": 3, "link_repairs": 0, "kv_late": 4}
    assert since({}, counters) == {"retried": 0, "resumed": 3, **failed}
    # A replica that has ended since takes nothing away.
    before = {("resumed", "a"): 1, ("resumed", "gone"): 100}
    assert since(before, counters)["resumed"] == 2


async def test_further_prompts_come_beside_the_others_and_are_always_the_same(
    make_endpoint: Callable[..., FakeEndpoint],
) -> None:
    endpoint = make_endpoint(ANSWER)
    load = {"rate": 5.0, "seconds": 1.0, "seed": 1, "salt": "x"}
    answers = await run_load(endpoint.url, "m", **load, more=[(0.5, 3000), (0.5, 50)])
    assert [answer.is_ended for answer in answers] == [True] * 7
    lengths = sorted(len(body["prompt"]) for body in endpoint.bodies)
    assert lengths == [40, 40, 40, 50, 400, 400, 3000]
    again = make_endpoint(ANSWER)
    await run_load(again.url, "m", **load, more=[(0.5, 3000), (0.5, 50)])
    assert sorted(map(str, (body["prompt"] for body in again.bodies))) == sorted(
        map(str, (body["prompt"] for body in endpoint.bodies))
    )


async def test_the_load_and_its_faults_run_before_other_threads(make_endpoint: Callable[..., FakeEndpoint]) -> None:
    with ahead_of_others():
        first = os.sched_getscheduler(0)
    policies: list[int] = []

    def look() -> None:
        policies.append(os.sched_getscheduler(0))

    await run_load(
        make_endpoint(ANSWER).url, "m", rate=5.0, seconds=0.4, seed=1, salt="x", faults=[(0.1, look)], on_answer=look
    )
    assert policies == [first] * 3
    assert os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK == os.SCHED_OTHER


def test_prompts_go_over_broken_links_until_kv_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[tuple[str, str], int]] = [
        {("link_failures", "a"): 0, ("link_repairs", "a"): 0},
        {("link_failures", "a"): 2, ("link_repairs", "a"): 0},
        {("link_failures", "a"): 2, ("link_repairs", "a"): 1},
    ]
    stack = Stack(start=lambda *_: FakeApp("", []), counters=lambda _: seen.pop(0))
    monkeypatch.setitem(STACKS, "tandem", stack)
    asked: list[int] = []

    async def ask() -> list[Answer]:
        asked.append(len(seen))
        return []

    app: Any = FakeApp("", [])
    drill_module._wait_for_links(app, "tandem", {}, ask)
    assert asked == [2, 1]
    seen[:] = [{}]
    drill_module._wait_for_links(app, "tandem", {}, ask)  # of a stack that counts nothing
    assert asked == [2, 1]


def test_a_drill_starts_in_a_process_that_has_not_imported_ray() -> None:
    code = """
import sys
from pathlib import Path
from dataclasses import replace
from tests.lab.drill import drill
from serve_app.local.cluster import driver_environment

def start(*_):
    driver_environment()  # as every cluster does
    print("started")
    raise SystemExit

drill.STACKS["tandem"] = replace(drill.STACKS["tandem"], start=start)
drill.drill(Path(sys.argv[1]), ["kill-decode"], rate=1.0, seconds=1.0, say=print)
"""
    without = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    ended = subprocess.run(
        [sys.executable, "-c", code, str(CONFIG)], env=without, capture_output=True, text=True, timeout=300
    )
    assert ended.stdout == "started\n", ended.stderr


def test_rows_of_a_fault_stand_together_and_a_broken_application_is_started_anew(
    make_endpoint: Callable[..., FakeEndpoint],
    make_process: MakeProcess,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    starts: list[str] = []

    def stack(name: str, answer: Any) -> Stack:
        def start(*_: object) -> Any:
            starts.append(name)
            titles = ["ray::ServeController", "ray::ServeReplica:tandem:ingress"]
            return FakeApp(make_endpoint(answer).url, [make_process(title) for title in titles])

        return Stack(start=start, counters=lambda _: {})

    monkeypatch.setitem(STACKS, "tandem", stack("tandem", ANSWER))
    monkeypatch.setitem(STACKS, "ray-serve-llm", stack("ray-serve-llm", refuse(500)))
    monkeypatch.setattr(drill_module, "_RECOVERY_S", 0.1)
    out = tmp_path / "rows.json"
    faults = ["--fault", "kill-ingress", "--fault", "kill-controller"]
    stacks = ["--stack", "tandem", "--stack", "ray-serve-llm"]
    load = ["--rate", "10", "--seconds", "0.3", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["drill", str(CONFIG), *faults, *stacks, *load])
    with pytest.raises(SystemExit) as exit_:
        run(commands)
    assert exit_.value.code == 1  # ours has lost nothing, but it was never whole again
    rows = json.loads(out.read_text())
    results = [(row["fault"], row["stack"], row["failed_undisturbed"], row["lost"], row["recovered_s"]) for row in rows]
    assert results == [
        ("kill-ingress", "tandem", 0, 0, None),
        ("kill-ingress", "ray-serve-llm", 7, 0, None),  # the right answers are unknown
        ("kill-controller", "tandem", 0, 0, None),
        ("kill-controller", "ray-serve-llm", 7, 0, None),
    ]
    assert starts == ["tandem", "tandem", "ray-serve-llm", "ray-serve-llm"]


def test_an_impossible_fault_is_reported_and_the_others_are_drilled(
    make_endpoint: Callable[..., FakeEndpoint],
    make_process: MakeProcess,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    def start(*_: object) -> Any:
        return FakeApp(make_endpoint(ANSWER).url, [make_process("ray::ServeReplica:tandem:ingress")])

    for name in ("tandem", "ray-serve-llm"):
        monkeypatch.setitem(STACKS, name, Stack(start=start, counters=lambda _: {}))
    monkeypatch.setattr(drill_module, "_RECOVERY_S", 0.1)
    out = tmp_path / "rows.json"
    faults = ["--fault", "kill-engine-worker", "--fault", "kill-ingress"]  # there is no engine
    stacks = ["--stack", "tandem", "--stack", "ray-serve-llm"]
    load = ["--rate", "10", "--seconds", "0.3", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["drill", str(CONFIG), *faults, *stacks, *load])
    with pytest.raises(SystemExit) as exit_:
        run(commands)
    assert exit_.value.code == 1
    assert [(row["fault"], row["stack"]) for row in json.loads(out.read_text())] == [
        ("kill-ingress", "tandem"),
        ("kill-ingress", "ray-serve-llm"),
    ]
    message = capsys.readouterr().err.replace("\n", " ")
    assert "tandem: kill-engine-worker showed nothing" in message
    assert "ray-serve-llm: kill-engine-worker showed nothing" in message


@pytest.mark.parametrize(("counters", "runs"), [({("retried", ""): 0, ("resumed", ""): 0}, 3), ({}, 1)])
def test_a_fault_that_met_no_request_is_run_again_if_requests_are_counted(
    make_endpoint: Callable[..., FakeEndpoint],
    make_process: MakeProcess,
    monkeypatch: pytest.MonkeyPatch,
    counters: dict[tuple[str, str], int],
    runs: int,
) -> None:
    class Healing(FakeApp):
        """Replaces its replica of the endpoint each time that it has ended."""

        def status(self) -> Status:
            return Status(state="RUNNING", message="", replicas={"ingress": {"RUNNING": 1}})

        def processes(self) -> list[psutil.Process]:
            if not any(title(one) for one in self._processes):
                self._processes = [make_process("ray::ServeReplica:tandem:ingress")]
            return self._processes

    app = Healing(make_endpoint(ANSWER).url, [])
    monkeypatch.setitem(STACKS, "tandem", Stack(start=lambda *_: app, counters=lambda _: counters))
    said: list[str] = []
    (row,) = drill_module.drill(CONFIG, ["kill-ingress"], rate=10.0, seconds=0.3, say=said.append)
    assert row["recovered_s"] is not None
    assert sum("SIGKILL" in line for line in said) == runs
    (line,) = failures(row)
    assert line.endswith(", so this shows nothing: run it again")
