"""Both roles sized together under real Ray Serve: on real engines, and on emulated ones for scale and faults."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from autoscale.report import Report
from autoscale.trace import TraceRequest
from deployments.ports import free_ports
from serve_app.bench import LoadGenerator
from serve_app.cluster import DeployError
from serve_app.validate import ConfigError
from tests.engines.endpoint import total

pytestmark = [pytest.mark.ray, pytest.mark.vllm]

ROOT = Path(__file__).parents[2]
QUICK = {
    "guard": {"cooldown_out_s": 2.0, "cooldown_in_s": 5.0, "hysteresis_in_frac": 0.2},
    "gate": {"observation_s": 5.0},
    "interval_s": 1.0,
    "window_s": 6.0,
}


def wait_until(holds: Callable[[], bool], within_s: float, what: Callable[[], Any] = lambda: "") -> None:
    deadline = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < deadline, what()
        time.sleep(0.25)


class Seen:
    """What the coordinator says of an application."""

    def __init__(self, name: str) -> None:
        from serve_app.ray_control import Control

        self._name = name
        self._control = Control

    @property
    def control(self) -> Any:
        return self._control(self._name)

    def status(self) -> dict[str, Any]:
        with suppress(DeployError):
            return self.control.status()  # type: ignore[no-any-return]
        return {}

    def counts(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Ready and serving replicas of both roles, of one instant."""
        status = self.status()
        running = [set(status.get("running", {}).get(f"{role}:g0", ())) for role in ("prefill", "decode")]
        admitted = set(status["plan"]["admitted"]) if running[0] or running[1] else set()
        ready, serving = [len(names) for names in running], [len(names & admitted) for names in running]
        return (ready[0], ready[1]), (serving[0], serving[1])

    def ready(self) -> tuple[int, int]:
        return self.counts()[0]

    def serving(self) -> tuple[int, int]:
        return self.counts()[1]


def load(url: str, model: str, shape: TraceRequest, requests: int, concurrency: int) -> Report:
    generator = LoadGenerator(url, model, seed=1)
    return Report.of(asyncio.run(generator.keep_in_flight([shape] * requests, concurrency)))


class TestOnRealEngines:
    def test_a_second_decode_comes_and_goes_with_the_load_and_nothing_is_lost(self, make_document: Any) -> None:
        from serve_app.sdk import deploy

        document = make_document()
        application = document["applications"][0]
        application["name"] = "real"
        application["autoscaling_policy"] = {"policy_function": "autoscale.ray_policy:JointPolicy"}
        args = application["args"]
        args["groups"][0]["prefill"]["max_replicas"] = 1
        args["groups"][0]["decode"]["max_replicas"] = 2
        args["autoscale"] = {
            **QUICK,
            "pd_ratio": "1:2",
            "policy": {"kind": "heteroscale", "target": 60.0},
            "slo": {"ttft_s": 30.0, "tpot_s": 5.0},
        }
        shape = TraceRequest(at_s=0.0, input_tokens=300, output_tokens=32)
        with deploy(document) as app:
            seen = Seen("real")
            # Serve says RUNNING a tick before the policy has seen both replicas.
            wait_until(lambda: seen.ready() == (1, 1), 30, seen.status)
            failed = ok = 0
            deadline = time.monotonic() + 240
            while seen.serving() != (1, 2):
                report = load(app.url, "tiny", shape, requests=60, concurrency=4)
                failed, ok = failed + report.requests_failed, ok + report.requests_ok
                assert time.monotonic() < deadline, seen.status()
            # Down again while a trickle goes on.
            deadline = time.monotonic() + 120
            while seen.ready() != (1, 1):
                report = load(app.url, "tiny", shape, requests=1, concurrency=1)
                failed, ok = failed + report.requests_failed, ok + report.requests_ok
                assert time.monotonic() < deadline, seen.status()
                time.sleep(2.0)
            report = load(app.url, "tiny", shape, requests=10, concurrency=2)
            assert failed + report.requests_failed == 0
            assert ok > 60
            status = seen.status()
            assert status["is_hooked"]
            lines = [json.loads(line) for line in Path(status["log_path"]).read_text().splitlines()]
            victims = {name for line in lines if "plan" in line for name in line["plan"]["victims"]}
            assert len(victims) == 1
            from autoscale.decision_log import load_lines, replay

            assert set(replay(load_lines(Path(status["log_path"])))) == {None}


@pytest.fixture(scope="module")
def emulated() -> Iterator[Any]:
    """One application of emulated engines that start in seconds, for all tests below."""
    from serve_app.sdk import deploy

    document = yaml.safe_load((ROOT / "configs" / "emulated.yaml").read_text())
    document["http_options"]["port"] = free_ports(1)[0]
    application = document["applications"][0]
    application["name"] = "emulated"
    group = application["args"]["groups"][0]
    for role, start_s in (("prefill", 0.0), ("decode", 8.0)):
        group[role]["max_replicas"] = 3
        group[role]["emulator"] |= {"start_s": start_s, "profile": str(ROOT / group[role]["emulator"]["profile"])}
    application["args"]["autoscale"] = {
        **QUICK,
        "pd_ratio": "1:1",
        "policy": {"kind": "heteroscale", "target": 400.0},
        "slo": {"ttft_s": 30.0, "tpot_s": 5.0},
    }
    with deploy(document) as app:
        yield app


@pytest.fixture
def seen(emulated: Any) -> Iterator[Seen]:
    """The application at one replica each, tuned as deployed."""
    seen = Seen("emulated")
    seen.control.tune({}, "test")
    wait_until(lambda: seen.ready() == (1, 1) and seen.serving() == (1, 1), 120, seen.status)
    yield seen


def test_counts_by_hand_come_with_the_gate_and_go_softly(seen: Seen) -> None:
    seen.control.scale(2, 2)
    held = []

    def grown() -> bool:
        ready, serving = seen.counts()
        held.append(ready[0] - serving[0])
        return ready == serving == (2, 2)

    wait_until(grown, 90, seen.status)
    # 1:1 within one replica: the second prefill is ready first and within the band, so nobody had to wait.
    assert max(held) == 0
    first = set(seen.status()["plan"]["admitted"])
    seen.control.scale(1, 1)
    wait_until(lambda: len(seen.status()["plan"]["withdrawn"]) == 2, 20, seen.status)
    assert seen.ready() == (2, 2)  # away, and still there
    away = set(seen.status()["plan"]["withdrawn"])
    wait_until(lambda: seen.ready() == (1, 1), 40, seen.status)
    left = {name for names in seen.status()["running"].values() for name in names}
    assert left == first - away  # who was withdrawn is who stopped


def test_the_role_that_is_ready_first_waits_for_the_other(seen: Seen) -> None:
    seen.control.tune({"guard": {"band_replicas": 0.5}, "gate": {"band_replicas": 0.5}}, "a narrow band")
    seen.control.scale(3, 3)
    deviations = []

    def grown() -> bool:
        ready, serving = seen.counts()
        deviations.append(abs(serving[0] - serving[1]))
        return ready == serving == (3, 3)

    wait_until(grown, 120, seen.status)
    assert max(deviations) == 0
    seen.control.resume()


def test_load_scales_both_roles_and_its_end_takes_them_back(seen: Seen, emulated: Any) -> None:
    shape = TraceRequest(at_s=0.0, input_tokens=400, output_tokens=200)
    with ThreadPoolExecutor(max_workers=1) as thread:
        loaded = thread.submit(load, emulated.url, "llama-70b", shape, requests=400, concurrency=30)
        wait_until(lambda: min(seen.ready()) >= 2, 120, seen.status)
        assert loaded.result().requests_failed == 0
    wait_until(lambda: seen.ready() == (1, 1), 120, seen.status)


def kill_controller() -> float:
    """End Serve's controller with no chance to tidy up; when that was."""
    (controller,) = [
        p for p in psutil.process_iter(["cmdline"]) if "ServeController" in " ".join(p.info["cmdline"] or ())
    ]
    os.kill(controller.pid, signal.SIGKILL)
    return time.time()


def test_who_drains_when_serves_controller_dies_is_who_goes(seen: Seen, emulated: Any) -> None:
    seen.control.scale(2, 2)
    wait_until(lambda: seen.serving() == (2, 2), 90, seen.status)
    # About 45 s of decoding each, on both decode replicas.
    shape = TraceRequest(at_s=0.0, input_tokens=400, output_tokens=1800)
    with ThreadPoolExecutor() as thread:
        answers = thread.submit(load, emulated.url, "llama-70b", shape, 6, 6)
        time.sleep(3.0)
        seen.control.scale(1, 1)
        wait_until(lambda: len(seen.status()["draining"].get("decode:g0", ())) == 1, 30, seen.status)
        (away,) = seen.status()["draining"]["decode:g0"]
        (stays,) = seen.status()["running"]["decode:g0"]
        killed_s = kill_controller()
        wait_until(lambda: seen.status()["plan"]["state"]["ticked_s"] > killed_s, 60, seen.status)
        assert answers.result().requests_failed == 0
    wait_until(lambda: seen.ready() == (1, 1), 60, seen.status)
    assert seen.status()["running"]["decode:g0"] == [stays]
    assert away != stays


def test_a_killed_serve_controller_takes_up_where_the_last_one_was(seen: Seen) -> None:
    seen.control.tune({"policy": {"target": 777.0}}, "to be remembered")
    seen.control.scale(2, 2)
    wait_until(lambda: seen.serving() == (2, 2), 90, seen.status)
    seen.control.tune({"gate": {"observation_s": 15.0}}, "time to kill in")
    seen.control.scale(1, 1)
    wait_until(lambda: len(seen.status()["plan"]["withdrawn"]) == 2, 20, seen.status)
    away = set(seen.status()["plan"]["withdrawn"])
    killed_s = kill_controller()
    wait_until(lambda: seen.status()["plan"]["state"]["ticked_s"] > killed_s, 60, seen.status)
    assert seen.ready() == (2, 2)
    assert set(seen.status()["plan"]["withdrawn"]) == away
    assert seen.status()["config"]["policy"]["target"] == 777.0
    wait_until(lambda: seen.ready() == (1, 1), 60, seen.status)
    left = {name for names in seen.status()["running"].values() for name in names}
    assert not left & away


def test_a_policy_changed_while_serves_controller_is_dead_decides_when_it_is_back(seen: Seen) -> None:
    before = {name for names in seen.status()["running"].values() for name in names}
    kill_controller()
    periods = [{"begins": "* * * * *", "decode": 2}]
    seen.control.tune({"policy": {"kind": "periodic", "periods": periods}}, "two of each, whatever comes")
    wait_until(lambda: seen.serving() == (2, 2), 90, seen.status)
    # Nobody was restarted for it.
    assert before < {name for names in seen.status()["running"].values() for name in names}


def test_replicas_that_never_become_ready_are_given_up_in_both_roles(seen: Seen) -> None:
    # Decode starts in 8 s and more, so within 4 s nobody is.
    periods = [{"begins": "* * * * *", "decode": 2}]
    changes = {"policy": {"kind": "periodic", "periods": periods}, "no_room_s": 4.0, "no_room_retry_s": 20.0}
    seen.control.tune(changes, "less time than a start takes")
    wait_until(lambda: "decode:g0" in seen.status()["plan"]["state"]["capped"], 60, seen.status)
    given_up = seen.status()["plan"]["state"]["desired"]
    assert given_up == {"prefill:g0": 1, "decode:g0": 1}
    seen.control.tune({"policy": {"kind": "heteroscale", "target": 400.0}}, "no more of it")
    wait_until(lambda: not seen.status()["plan"]["state"]["capped"], 60, seen.status)


def test_a_killed_coordinator_comes_back_with_what_it_knew(seen: Seen, emulated: Any) -> None:
    seen.control.tune({"policy": {"target": 555.0}}, "to be remembered")
    before = seen.status()["plan"]["admitted"]
    (coordinator,) = [p for p in psutil.process_iter(["cmdline"]) if "Coordinator" in " ".join(p.info["cmdline"] or ())]
    os.kill(coordinator.pid, signal.SIGKILL)
    # Requests go on meanwhile.
    shape = TraceRequest(at_s=0.0, input_tokens=100, output_tokens=4)
    assert load(emulated.url, "llama-70b", shape, requests=20, concurrency=2).requests_failed == 0
    wait_until(lambda: seen.status().get("config", {}).get("policy", {}).get("target") == 555.0, 90, seen.status)
    wait_until(lambda: seen.status()["plan"]["state"]["ticked_s"] > time.time() - 3, 30, seen.status)
    assert seen.status()["plan"]["admitted"] == before


def test_what_cannot_be_tuned_is_refused_and_changes_nothing(seen: Seen) -> None:
    before = seen.status()["config"]
    for changes, said in (
        ({"pd_ratio": "1:9"}, "between 1:5 and 9:1"),
        ({"bogus": 1}, "no such field"),
        ({"override": {"prefill": 9, "decode": 1}}, "lies outside 1P1D to 3P3D"),
    ):
        with pytest.raises(ConfigError, match=said):
            seen.control.tune(changes, "test")
    assert seen.status()["config"] == before


def test_paused_means_no_decision(seen: Seen) -> None:
    seen.control.pause()
    wait_until(lambda: seen.status()["plan"]["decision"]["reason"] == "paused by hand", 10, seen.status)
    seen.control.resume()
    wait_until(lambda: seen.status()["plan"]["decision"]["reason"] != "paused by hand", 10, seen.status)


def test_the_endpoint_shows_the_autoscaler(seen: Seen, emulated: Any) -> None:
    assert total(emulated, "tandem_replicas", state="serving", role="decode", group="g0") == 1
    assert total(emulated, "tandem_replicas", state="held") == 0
    assert total(emulated, "tandem_pd_ratio", of="configured") == 1
    assert total(emulated, "tandem_autoscale_hooked") == 1
    assert total(emulated, "tandem_autoscale_decision_age_seconds") < 10


def test_an_application_that_is_not_there_has_nothing_to_tune(emulated: Any) -> None:
    from serve_app.ray_control import Control

    with pytest.raises(DeployError, match="application nobody has no coordinator"):
        Control("nobody")
