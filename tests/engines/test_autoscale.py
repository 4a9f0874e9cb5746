"""Both roles sized together under real Ray Serve: on real engines, and on emulated ones for scale and faults."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from autoscale.report import Report
from autoscale.traces.trace import TraceRequest
from autoscale.types import PoolKey
from kvtransfer.topology import Role
from serve_app.checks.yaml_checks import ConfigError
from serve_app.load.generator import LoadGenerator
from serve_app.local.cluster import DeployError
from tests.engines.endpoint import WAIT_S, forked_yaml, total
from tests.lab.stand.processes import title

pytestmark = [pytest.mark.ray, pytest.mark.vllm]

ROOT = Path(__file__).parents[2]
PREFILL, DECODE = PoolKey("g0", Role.PREFILL), PoolKey("g0", Role.DECODE)
QUICK = {
    "guard": {"cooldown_out_s": 2.0, "cooldown_in_s": 5.0, "hysteresis_in_frac": 0.2},
    "gate": {"observation_s": 5.0},
    "interval_s": 1.0,
    "window_s": 6.0,
}


def wait_until(holds: Callable[[], bool], what: Callable[[], Any]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, what()
        time.sleep(0.25)


class Seen:
    """The state of an application, as its coordinator reports it."""

    def __init__(self, name: str) -> None:
        from serve_app.running.ray_control import Control

        self._name = name
        self._control = Control

    @property
    def control(self) -> Any:
        return self._control(self._name)

    def status(self) -> Any:
        """State of the one service; ``None`` while the coordinator does not answer."""
        with suppress(DeployError):
            return self.control.status()
        return None

    def last(self) -> Any:
        """The last plan of the service, with the replicas that were observed then."""
        return self.status().last

    def counts(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Ready and serving replicas at one instant, each as (prefill, decode)."""
        status = self.status()
        if status is None or status.last is None:
            return (0, 0), (0, 0)
        running = [set(status.last.running.get(pool, ())) for pool in (PREFILL, DECODE)]
        admitted = set(status.last.plan.admitted)
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
    def test_a_second_decode_replica_comes_and_goes_with_the_load_and_no_request_fails(
        self, make_document: Any
    ) -> None:
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
            wait_until(lambda: seen.ready() == (1, 1), seen.status)
            failed = ok = 0
            deadline = time.monotonic() + WAIT_S
            while seen.serving() != (1, 2):
                report = load(app.url, "tiny", shape, requests=60, concurrency=4)
                failed, ok = failed + report.requests_failed, ok + report.requests_ok
                assert time.monotonic() < deadline, seen.status()
            # It shrinks again while single requests go on.
            deadline = time.monotonic() + WAIT_S
            while seen.ready() != (1, 1):
                report = load(app.url, "tiny", shape, requests=1, concurrency=1)
                failed, ok = failed + report.requests_failed, ok + report.requests_ok
                assert time.monotonic() < deadline, seen.status()
                time.sleep(2.0)
            report = load(app.url, "tiny", shape, requests=10, concurrency=2)
            assert failed + report.requests_failed == 0
            assert ok > 60
            from serve_app.running.ray_control import status_of

            status = status_of(app.name)
            assert status.is_hooked
            # The bandwidth of the link, from what vLLM's connector says of its pulls: here memory of this machine.
            link_bytes_per_s = seen.last().plan.state.link_bytes_per_s
            assert link_bytes_per_s is not None
            assert 1e5 < link_bytes_per_s < 1e12
            lines = [json.loads(line) for line in Path(status.log_path).read_text().splitlines()]
            victims = {name for line in lines if "plan" in line for name in line["plan"]["victims"]}
            assert len(victims) == 1
            from autoscale.decide.decision_log import load_lines, replay

            assert set(replay(load_lines(Path(status.log_path)))) == {None}


@pytest.fixture(scope="module")
def emulated() -> Iterator[Any]:
    """One application of emulated engines that start in seconds, for all tests below."""
    from serve_app.sdk import deploy

    document = forked_yaml("emulated")
    application = document["applications"][0]
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
    wait_until(lambda: seen.ready() == (1, 1) and seen.serving() == (1, 1), seen.status)
    yield seen


def test_counts_set_by_hand_grow_through_the_gate_and_shrink_by_withdrawal(seen: Seen) -> None:
    seen.control.scale(2, 2)
    held = []

    def grown() -> bool:
        ready, serving = seen.counts()
        held.append(ready[0] - serving[0])
        return ready == serving == (2, 2)

    wait_until(grown, seen.status)
    # The band is one replica around 1:1. The second prefill replica is ready first, and need not wait for decode.
    assert max(held) == 0
    first = set(seen.last().plan.admitted)
    seen.control.scale(1, 1)
    wait_until(lambda: len(seen.last().plan.withdrawn) == 2, seen.status)
    assert seen.ready() == (2, 2)  # withdrawn, but still running
    away = set(seen.last().plan.withdrawn)
    wait_until(lambda: seen.ready() == (1, 1), seen.status)
    left = {name for names in seen.last().running.values() for name in names}
    assert left == first - away  # the withdrawn replicas are those that stopped


def test_the_role_that_is_ready_first_waits_for_the_other(seen: Seen) -> None:
    seen.control.tune({"guard": {"band_replicas": 0.5}, "gate": {"band_replicas": 0.5}}, "a narrow band")
    seen.control.scale(3, 3)
    deviations = []

    def grown() -> bool:
        ready, serving = seen.counts()
        deviations.append(abs(serving[0] - serving[1]))
        return ready == serving == (3, 3)

    wait_until(grown, seen.status)
    assert max(deviations) == 0
    seen.control.resume()


def test_both_roles_grow_with_the_load_and_shrink_after_it(seen: Seen, emulated: Any) -> None:
    shape = TraceRequest(at_s=0.0, input_tokens=400, output_tokens=200)
    deadline = time.monotonic() + WAIT_S
    while min(seen.ready()) < 2:
        assert load(emulated.url, "llama-70b", shape, requests=60, concurrency=30).requests_failed == 0
        assert time.monotonic() < deadline, seen.status()
    wait_until(lambda: seen.ready() == (1, 1), seen.status)


def kill(app: Any, kind: str) -> float:
    """Kill the one process of the cluster with this in its title; the time of the kill, seconds since the epoch."""
    (process,) = [one for one in app.processes() if kind in title(one)]
    process.kill()
    return time.time()


def test_a_replica_that_drains_when_serves_controller_dies_is_still_the_one_that_stops(
    seen: Seen, emulated: Any
) -> None:
    seen.control.scale(2, 2)
    wait_until(lambda: seen.serving() == (2, 2), seen.status)
    # Both decode replicas get requests that decode for about 45 s each.
    shape = TraceRequest(at_s=0.0, input_tokens=400, output_tokens=1800)
    with ThreadPoolExecutor() as thread:
        answers = thread.submit(load, emulated.url, "llama-70b", shape, 6, 6)
        time.sleep(3.0)
        seen.control.scale(1, 1)
        wait_until(lambda: len(seen.last().draining.get(DECODE, ())) == 1, seen.status)
        (away,) = seen.last().draining[DECODE]
        (stays,) = seen.last().running[DECODE]
        killed_s = kill(emulated, "ServeController")
        wait_until(lambda: seen.last().plan.state.ticked_s > killed_s, seen.status)
        assert answers.result().requests_failed == 0
    wait_until(lambda: seen.ready() == (1, 1), seen.status)
    assert seen.last().running[DECODE] == (stays,)
    assert away != stays


def test_a_new_serve_controller_goes_on_from_the_state_of_the_killed_one(seen: Seen, emulated: Any) -> None:
    seen.control.tune({"policy": {"target": 777.0}}, "to be remembered")
    seen.control.scale(2, 2)
    wait_until(lambda: seen.serving() == (2, 2), seen.status)
    seen.control.tune({"gate": {"observation_s": 15.0}}, "time to kill in")
    seen.control.scale(1, 1)
    wait_until(lambda: len(seen.last().plan.withdrawn) == 2, seen.status)
    away = set(seen.last().plan.withdrawn)
    killed_s = kill(emulated, "ServeController")
    wait_until(lambda: seen.last().plan.state.ticked_s > killed_s, seen.status)
    assert seen.ready() == (2, 2)
    assert set(seen.last().plan.withdrawn) == away
    assert seen.status().config.policy.target == 777.0
    wait_until(lambda: seen.ready() == (1, 1), seen.status)
    left = {name for names in seen.last().running.values() for name in names}
    assert not left & away


def test_a_policy_set_while_serves_controller_is_dead_decides_once_it_is_back(seen: Seen, emulated: Any) -> None:
    before = {name for names in seen.last().running.values() for name in names}
    kill(emulated, "ServeController")
    periods = [{"begins": "* * * * *", "decode": 2}]
    seen.control.tune({"policy": {"kind": "periodic", "periods": periods}}, "two of each, whatever comes")
    wait_until(lambda: seen.serving() == (2, 2), seen.status)
    # No replica was restarted for it.
    assert before < {name for names in seen.last().running.values() for name in names}


def test_replicas_that_never_become_ready_are_given_up_in_both_roles(seen: Seen) -> None:
    # A decode replica takes 8 s or more to start, so within 4 s none is ready.
    periods = [{"begins": "* * * * *", "decode": 2}]
    changes = {"policy": {"kind": "periodic", "periods": periods}, "no_room_s": 4.0, "no_room_retry_s": 20.0}
    seen.control.tune(changes, "less time than a start takes")
    wait_until(lambda: DECODE in seen.last().plan.state.capped, seen.status)
    given_up = seen.last().plan.state.desired
    assert given_up == {PREFILL: 1, DECODE: 1}
    seen.control.tune({"policy": {"kind": "heteroscale", "target": 400.0}}, "no more of it")
    wait_until(lambda: not seen.last().plan.state.capped, seen.status)


def test_a_killed_coordinator_comes_back_with_its_state(seen: Seen, emulated: Any) -> None:
    seen.control.tune({"policy": {"target": 555.0}}, "to be remembered")
    before = seen.last().plan.admitted
    kill(emulated, "Coordinator")
    # Requests go on meanwhile.
    shape = TraceRequest(at_s=0.0, input_tokens=100, output_tokens=4)
    assert load(emulated.url, "llama-70b", shape, requests=20, concurrency=2).requests_failed == 0
    wait_until(lambda: (status := seen.status()) is not None and status.config.policy.target == 555.0, seen.status)
    wait_until(lambda: seen.last().plan.state.ticked_s > time.time() - 3, seen.status)
    assert seen.last().plan.admitted == before


def test_a_forbidden_tuning_is_refused_and_changes_nothing(seen: Seen) -> None:
    before = seen.status().config
    for changes, said in (
        ({"pd_ratio": "1:9"}, "between 1:5 and 9:1"),
        ({"bogus": 1}, "no such field"),
        ({"override": {"prefill": 9, "decode": 1}}, "lies outside 1P1D to 3P3D"),
    ):
        with pytest.raises(ConfigError, match=said):
            seen.control.tune(changes, "test")
    assert seen.status().config == before


def test_a_paused_autoscaler_says_so_until_it_is_resumed(seen: Seen) -> None:
    seen.control.pause()
    wait_until(lambda: seen.last().plan.decision.reason == "paused by hand", seen.status)
    seen.control.resume()
    wait_until(lambda: seen.last().plan.decision.reason != "paused by hand", seen.status)


def test_the_metrics_page_shows_the_autoscaler(seen: Seen, emulated: Any) -> None:
    assert total(emulated, "tandem_replicas", state="serving", role="decode", group="g0") == 1
    assert total(emulated, "tandem_replicas", state="held") == 0
    assert total(emulated, "tandem_pd_ratio", of="configured") == 1
    assert total(emulated, "tandem_autoscale_hooked") == 1
    assert total(emulated, "tandem_autoscale_decision_age_seconds") < 60


def test_an_application_that_does_not_run_cannot_be_controlled(emulated: Any) -> None:
    from serve_app.running.ray_control import Control

    with pytest.raises(DeployError, match="application nobody has no coordinator"):
        Control("nobody")
