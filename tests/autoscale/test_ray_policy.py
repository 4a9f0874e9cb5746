"""Serve's calls of the policy: they never block and never raise, and what is unknown changes no count."""

import gc
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from autoscale.decide.config import AutoscaleConfig
from autoscale.decide.controller import Controller
from autoscale.decide.decision_log import parse_line
from autoscale.decide.status import SETTINGS, CycleRecord, ServiceSettings, Settings
from autoscale.decide.tuning import Pools
from autoscale.observe.collectors import RayCollectorConfig
from autoscale.policies.heteroscale import Signal
from autoscale.types import Plan, PolicyFault, PoolKey, PoolLimits, Snapshot
from kvtransfer.topology import Role

pytestmark = pytest.mark.ray

NAMES = ("prefill:g0", "decode:g0")


def contexts(decode_tps: float = 50.0, at_s: float | None = None, *, ready: tuple[int, int] = (1, 1)) -> dict[Any, Any]:
    """The part of what Serve hands to an application-level policy that ours reads."""
    now_s = time.time() if at_s is None else at_s
    told = {}
    for name, number in zip(NAMES, ready, strict=True):
        replicas = [HashableReplica(f"{name[0]}{index}") for index in range(number)]
        series = {
            "decode_tokens": [SimpleNamespace(timestamp=now_s, value=decode_tps * now_s)],
            "queued_prefill_tokens": [SimpleNamespace(timestamp=now_s, value=0.0)],
        }
        told[SimpleDeployment(name)] = SimpleNamespace(
            app_name="app",
            running_replicas=replicas,
            raw_metrics={metric: dict.fromkeys(replicas, points) for metric, points in series.items()},
            target_num_replicas=max(1, number),
            capacity_adjusted_min_replicas=1,
            capacity_adjusted_max_replicas=8,
        )
    return told


def endpoint_context(report: dict[str, float], at_s: float) -> dict[Any, Any]:
    """What Serve hands over of the endpoint, which has one replica."""
    replica = HashableReplica("i0")
    points = {name: {replica: [SimpleNamespace(timestamp=at_s, value=value)]} for name, value in report.items()}
    context = SimpleNamespace(app_name="app", running_replicas=[replica], raw_metrics=points, target_num_replicas=1)
    return {SimpleDeployment("ingress"): context}


class HashableReplica(str):
    """A replica id as Serve has it."""

    @property
    def unique_id(self) -> str:
        return str(self)


class SimpleDeployment(str):
    """A deployment id as Serve has it."""

    app_name = "app"

    @property
    def name(self) -> str:
        return str(self)


@pytest.fixture
def policy(make_autoscale: Callable[..., AutoscaleConfig]) -> Iterator[Any]:
    """A policy that has a configuration and no coordinator: the thread of its client is not started."""
    from autoscale.ray_link import Link
    from autoscale.ray_policy import JointPolicy

    policy = JointPolicy()
    policy._link = Link("app", policy._complain)
    policy._link.controllers = {"m": Controller(make_autoscale(interval_s=0.2, window_s=5.0, stale_s=60.0))}
    limits = PoolLimits(lowest_replicas=1, highest_replicas=8)
    policy._link.pools = {"m": Pools({PoolKey("g0", role): limits for role in Role})}
    policy._link.client._looked_s = float("inf")
    yield policy
    policy._thread.shutdown(wait=False, cancel_futures=True)


def test_the_endpoints_report_is_the_demand_and_the_endpoint_gets_no_count(policy: Any) -> None:
    seen: list[Snapshot] = []
    controller = policy._link.controllers["m"]
    tick = controller.tick
    controller.tick = lambda snapshot, slots=None: seen.append(snapshot) or tick(snapshot, slots)
    begun_s = time.time()
    deadline = time.monotonic() + 60
    while not seen or seen[-1].traffic.requests_per_s != pytest.approx(20.0):
        now_s = time.time()
        report = {"offered_requests:m": 20.0 * (now_s - begun_s), "offered_requests:other": 1e6 * now_s}
        counts, _ = policy({**contexts(), **endpoint_context(report, now_s)})
        assert "ingress" not in counts
        assert time.monotonic() < deadline, seen[-1].traffic if seen else None
        time.sleep(0.05)
    assert seen[-1].traffic.served_per_s is not None


def ticked(policy: Any, **kwargs: Any) -> dict[str, int]:
    """Call the policy as Serve does until it has taken a tick."""
    policy._last = {}
    deadline = time.monotonic() + 60
    while not policy._last:
        _, state = policy(contexts(**kwargs))
        assert state == {}
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return {str(name): count for name, count in policy(contexts(**kwargs))[0].items()}


def tell(policy: Any, answer: dict[str, Any]) -> None:
    """Let the policy take an answer of the coordinator."""
    policy._link.client._read(answer)
    policy._link.poll()


def published(policy: Any) -> CycleRecord:
    """The newest cycle, as the coordinator gets it."""
    from autoscale.ray_coordinator_client import _record

    policy._link.client._drain()
    return _record(policy._link.client._newest, policy._link.client._forecasts)


def test_a_call_returns_the_counts_of_the_last_tick(policy: Any) -> None:
    assert policy(contexts())[0] == {}  # nothing is known yet, so Serve keeps its targets
    assert ticked(policy) == {"prefill:g0": 1, "decode:g0": 1}


def test_no_contexts_are_no_error(policy: Any) -> None:
    assert policy({}) == ({}, {})


def test_the_signals_of_a_tick_are_published_with_its_plan(policy: Any) -> None:
    signals: dict[Any, float] = {}
    deadline = time.monotonic() + 60
    while Signal.DECODE_TPS not in signals:
        ticked(policy, decode_tps=50.0)
        signals = published(policy).services["m"].signals
        assert time.monotonic() < deadline, signals
    assert signals[Signal.DECODE_TPS] == pytest.approx(50.0, rel=0.01)


def test_the_coordinator_is_called_in_a_thread_that_ends_with_its_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    from autoscale import ray_coordinator_client
    from autoscale.ray_policy import JointPolicy

    callers: list[threading.Thread] = []
    monkeypatch.setattr(
        ray_coordinator_client, "find_coordinator", lambda app: callers.append(threading.current_thread())
    )
    policy = JointPolicy()
    deadline = time.monotonic() + 60
    while not callers:
        assert policy(contexts()) == ({}, {})
        assert time.monotonic() < deadline
        time.sleep(0.02)
    (thread,) = callers
    assert thread is not threading.current_thread()
    del policy
    gc.collect()  # the policy and its link refer to each other
    thread.join(timeout=60)
    assert not thread.is_alive()


def test_an_error_of_the_thread_is_logged_and_the_thread_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from autoscale import ray_coordinator_client
    from autoscale.ray_policy import JointPolicy

    calls: list[str] = []

    def unknown(app: str) -> None:
        calls.append(app)
        if len(calls) == 1:
            raise ValueError(f"nothing is known of {app}")

    monkeypatch.setattr(ray_coordinator_client, "find_coordinator", unknown)
    monkeypatch.setattr(ray_coordinator_client, "_LOOKUP_S", 0.0)
    policy = JointPolicy()
    deadline = time.monotonic() + 60
    while not policy._complaints or len(calls) < 3:
        assert policy(contexts()) == ({}, {})
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert policy._complaints == {"ValueError: nothing is known of app"}


def test_a_tick_that_hangs_holds_up_no_call(policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = ticked(policy)
    held, entered = threading.Event(), threading.Event()
    tick = Controller.tick

    def slow(self: Controller, snapshot: Snapshot, slots: Any = None) -> Plan:
        entered.set()
        held.wait(30)
        return tick(self, snapshot, slots)

    monkeypatch.setattr(Controller, "tick", slow)
    deadline = time.monotonic() + 60
    while not entered.is_set():
        policy(contexts())
        assert time.monotonic() < deadline
        time.sleep(0.02)
    # The tick is stuck, and every call returns all the same.
    for _ in range(50):
        assert {str(name): count for name, count in policy(contexts())[0].items()} == before
    held.set()


def test_a_tick_that_raises_changes_no_count_and_is_reported_once(
    policy: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = ticked(policy)

    def broken(self: Controller, snapshot: Snapshot, slots: Any = None) -> Plan:
        raise ValueError("a forecast went wrong")

    monkeypatch.setattr(Controller, "tick", broken)
    policy._complaints.clear()
    with caplog.at_level("WARNING", logger="ray.serve"):
        for _ in range(40):
            counts, _ = policy(contexts())
            # A deployment that is missing keeps its target.
            assert {str(name): count for name, count in counts.items()} in ({}, before)
            time.sleep(0.02)
    assert len(policy._complaints) == 1
    monkeypatch.undo()
    assert ticked(policy) == before


def test_figures_that_are_no_numbers_change_no_count(policy: Any) -> None:
    for _ in range(3):
        before = ticked(policy, decode_tps=100.0, ready=(3, 3))
    assert before == {"prefill:g0": 3, "decode:g0": 3}
    for wrong in (float("nan"), float("inf"), -1e30):
        for _ in range(3):
            assert ticked(policy, decode_tps=wrong, ready=(3, 3)) == before


def test_a_role_without_replicas_is_a_reason_to_hold(policy: Any) -> None:
    ticked(policy)
    ticked(policy, ready=(1, 0))
    assert "no decode replica" in policy._last["m"].decision.reason


def test_a_configuration_read_during_a_tick_is_logged_after_it(
    policy: Any, make_autoscale: Callable[..., AutoscaleConfig]
) -> None:
    link = policy._link
    link._config_lines.append(("m", link.controllers["m"].config, "start"))
    ticked(policy)
    link.client._drain()
    lines = link.client._lines
    assert '"why": "start"' in lines[0]
    assert '"snapshot"' in lines[1]
    assert link.unlogged_configs == 0


def test_traffic_has_a_line_of_its_own_after_a_minute_without_news(policy: Any) -> None:
    same = {"decode_tps": 100.0, "ready": (3, 3)}
    for _ in range(3):
        ticked(policy, **same)

    def lines_of_next_ticks(count: int) -> list[str]:
        client = policy._link.client
        client._drain()
        client._lines = []
        ticked_s, ticks, deadline = policy._last["m"].state.ticked_s, 0, time.monotonic() + 60
        while ticks < count:
            policy(contexts(**same))
            if policy._last["m"].state.ticked_s != ticked_s:
                ticked_s, ticks = policy._last["m"].state.ticked_s, ticks + 1
            assert time.monotonic() < deadline
            time.sleep(0.02)
        client._drain()
        return list(client._lines)

    assert lines_of_next_ticks(3) == []  # nothing is news, and the last line is young
    policy._logged_s["m"] -= 61.0
    (line,) = lines_of_next_ticks(3)
    assert parse_line(line).traffic is not None


def coordinator(sync: Callable[[Any], Future[dict[str, Any]]]) -> SimpleNamespace:
    """A coordinator that answers plans with ``sync``, and for which no request waits."""

    def called(answer: Callable[[Any], Future[Any]]) -> SimpleNamespace:
        return SimpleNamespace(remote=lambda message, *_: SimpleNamespace(future=lambda: answer(message)))

    return SimpleNamespace(sync=called(sync), awaited=called(lambda names: Future()))


def settings(version: int) -> dict[str, Any]:
    """An answer of the coordinator; it has no news if the policy already has this version."""
    return {"version": version, "services": {}, "topology": None, "cordoned": []}


def test_pools_of_a_redeployed_application_replace_the_old_ones(policy: Any) -> None:
    link, config = policy._link, policy._link.controllers["m"].config
    redeployed = Pools({PoolKey("g1", role): PoolLimits(lowest_replicas=0, highest_replicas=2) for role in Role})
    services = {"m": ServiceSettings(config=config, pools=redeployed, why="redeployed")}
    answer = Settings(version=2, services=services, topology=None, cordoned=frozenset())
    tell(policy, SETTINGS.dump_python(answer, mode="json"))
    assert link.pools == {"m": redeployed}


def take(policy: Any, counts: tuple[int, int]) -> None:
    """Let the policy take a tick with these counts."""
    from autoscale.ray_coordinator_client import Ticked

    plan = policy._last["m"]
    counted = replace(plan, counts=dict(zip(plan.counts, counts, strict=True)))
    policy._take(Ticked({"m": (Snapshot(now_s=0.0, pools=()), counted)}, [], None, None, {}), policy._link)


def test_a_lower_count_waits_until_the_coordinator_holds_the_plan(policy: Any) -> None:
    ticked(policy, ready=(3, 3))
    policy._ticked_s = float("inf")  # no other tick
    client = policy._link.client
    client._version = 1
    take(policy, (2, 4))

    def answers() -> dict[str, int]:
        client.step(0.0)
        return {str(name): count for name, count in policy(contexts(ready=(3, 3)))[0].items()}

    assert answers() == {"prefill:g0": 3, "decode:g0": 4}  # a higher count at once, a lower one later
    answer: Future[dict[str, Any]] = Future()
    client._handle = coordinator(lambda update: answer)
    assert answers() == {"prefill:g0": 3, "decode:g0": 4}
    answer.set_result(settings(client._version))
    assert answers() == {"prefill:g0": 2, "decode:g0": 4}
    # A call that fails does not count as an answer.
    lost: Future[dict[str, Any]] = Future()
    lost.set_exception(ActorDiedError())
    client._handle = coordinator(lambda update: lost)
    take(policy, (1, 4))
    for _ in range(3):
        assert answers() == {"prefill:g0": 2, "decode:g0": 4}
    # Nor does the answer of a restarted coordinator when the policy joins.
    joined: Future[dict[str, Any]] = Future()
    joined.set_result(settings(client._version))
    client._handle, client._reply = coordinator(lambda update: Future()), joined
    assert answers() == {"prefill:g0": 2, "decode:g0": 4}


def test_a_lower_count_comes_through_though_every_other_call_takes_another_plan(policy: Any) -> None:
    ticked(policy, ready=(3, 3))
    policy._ticked_s = float("inf")  # ticks are ours
    client = policy._link.client
    client._version = 1

    def acknowledged(update: Any) -> Future[dict[str, Any]]:
        done: Future[dict[str, Any]] = Future()
        done.set_result(settings(client._version))
        return done

    client._handle = coordinator(acknowledged)
    for _ in range(6):
        client.step(0.0)
        policy(contexts(ready=(3, 3)))
        take(policy, (2, 2))
        client.step(0.0)
        policy(contexts(ready=(3, 3)))
    assert {str(name): count for name, count in policy(contexts(ready=(3, 3)))[0].items()} == {
        "prefill:g0": 2,
        "decode:g0": 2,
    }


def told(*services: tuple[str, AutoscaleConfig]) -> dict[str, Any]:
    """The coordinator's answer with these services, all with the pools of the group."""
    pools = Pools({PoolKey("g0", role): PoolLimits(lowest_replicas=1, highest_replicas=8) for role in Role})
    settings = {name: ServiceSettings(config=config, pools=pools, why="test") for name, config in services}
    answer = Settings(version=next(VERSIONS), services=settings, topology=None, cordoned=frozenset())
    return SETTINGS.dump_python(answer, mode="json")


VERSIONS = count()
QUICK = {"interval_s": 0.2, "window_s": 5.0, "stale_s": 60.0}


@pytest.fixture
def blocking(make_autoscale: Callable[..., AutoscaleConfig]) -> Iterator[AutoscaleConfig]:
    """A policy that blocks until its gate opens."""
    from tests.autoscale.own import Blocking

    Blocking.calls = Blocking.most_at_once = 0
    Blocking.may_go_on.clear()
    kind = "tests.autoscale.own:Blocking"
    yield make_autoscale(policy={"kind": kind, "decode": 5}, policy_timeout_s=1.0, **QUICK)
    Blocking.may_go_on.set()


def test_a_policy_that_blocks_holds_its_service_alone_and_is_called_again_once_it_has_returned(
    policy: Any, blocking: AutoscaleConfig, make_autoscale: Callable[..., AutoscaleConfig]
) -> None:
    from tests.autoscale.own import Blocking

    other = make_autoscale(policy={"kind": "tests.autoscale.own:Fixed", "decode": 4}, **QUICK)
    tell(policy, told(("blocks", blocking), ("other", other)))
    ticked(policy, ready=(2, 2))
    plans = policy._last
    assert re.search(
        r" has been computing for [1-9][.\d]* s, longer than 1 s; the counts", plans["blocks"].decision.reason
    )
    assert plans["blocks"].counts == {PoolKey("g0", role): 2 for role in Role}
    assert plans["other"].counts == {PoolKey("g0", role): 4 for role in Role}
    # While it goes on no other call of it begins, and a tick does not wait for it again.
    began_s = time.monotonic()
    for _ in range(3):
        ticked(policy, ready=(2, 2))
    assert policy._last["blocks"].decision.fault is PolicyFault.LATE
    assert time.monotonic() - began_s < 2.5  # three ticks that waited would take 3 s
    assert (Blocking.calls, Blocking.most_at_once) == (1, 1)
    # The late decision is dropped: the next one is of the next snapshot.
    Blocking.may_go_on.set()
    time.sleep(0.1)
    ticked(policy, ready=(2, 2))
    ticked(policy, ready=(2, 2))
    assert policy._last["blocks"].decision.reason == "as configured"
    (series,) = policy._last["blocks"].state.memory.values()
    assert series[0] == pytest.approx(time.time(), abs=2.0)
    assert Blocking.most_at_once == 1


def test_a_changed_configuration_does_not_call_a_policy_that_still_computes(
    policy: Any, blocking: AutoscaleConfig
) -> None:
    from tests.autoscale.own import Blocking

    tell(policy, told(("blocks", blocking)))
    ticked(policy)
    tell(policy, told(("blocks", blocking.model_copy(update={"window_s": 6.0}))))
    ticked(policy)
    assert policy._last["blocks"].decision.fault is PolicyFault.LATE
    assert Blocking.calls == 1


def test_a_policy_that_is_late_is_logged_once(
    policy: Any, blocking: AutoscaleConfig, caplog: pytest.LogCaptureFixture
) -> None:
    tell(policy, told(("blocks", blocking)))
    with caplog.at_level("WARNING", logger="ray.serve"):
        for _ in range(3):
            ticked(policy)
    lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if "takes longer than 1 s (policy_timeout_s)" in line] == lines[-1:]


def test_a_policy_that_raises_is_logged_with_its_traceback(
    policy: Any, make_autoscale: Callable[..., AutoscaleConfig], caplog: pytest.LogCaptureFixture
) -> None:
    config = make_autoscale(policy={"kind": "tests.autoscale.own:Fixed", "fault": "zero"}, **QUICK)
    tell(policy, told(("m", config)))
    with caplog.at_level("WARNING", logger="ray.serve"):
        for _ in range(3):
            ticked(policy)
    (record,) = caplog.records
    assert "ZeroDivisionError" in record.getMessage()
    assert record.exc_info is not None and record.exc_info[2] is not None


def test_a_policy_that_serves_controller_cannot_import_holds_its_service_and_says_so(
    policy: Any, make_autoscale: Callable[..., AutoscaleConfig]
) -> None:
    answer = told(("m", make_autoscale(**QUICK)))
    answer["services"]["m"]["config"]["policy"] = {"kind": "no_such_package:Mine"}
    tell(policy, answer)
    assert ticked(policy, ready=(2, 2)) == {"prefill:g0": 2, "decode:g0": 2}
    reason = policy._last["m"].decision.reason
    assert reason.startswith("policy no_such_package:Mine cannot be imported: ModuleNotFoundError")


def test_a_policy_that_never_returns_keeps_no_process_from_ending(run_python: Callable[..., Any]) -> None:
    script = """
import json, threading
from autoscale.decide.containment import PolicyLate
from autoscale.decide.ray_policy_limit import LimitedCalls
try:
    LimitedCalls().run(threading.Event().wait, 0.1)
except PolicyLate as late:
    print(json.dumps(str(late)))
"""
    assert "longer than 0.1 s" in run_python(script)


@pytest.fixture
def collecting(make_autoscale: Callable[..., AutoscaleConfig]) -> Iterator[AutoscaleConfig]:
    """A collector that blocks until its gate opens; it is open."""
    from tests.autoscale.own import Figures

    Figures.may_go_on.set()
    collector = {"kind": "tests.autoscale.own:Figures", "requests_per_s": 77.0, "most_age_s": 0.5, "timeout_s": 0.2}
    yield make_autoscale(collector=collector, **QUICK)
    Figures.may_go_on.set()


def wait_for_faults(policy: Any, words: str) -> None:
    deadline = time.monotonic() + 60
    while words not in str(published(policy).services["m"].collector_faults):
        ticked(policy)
        assert time.monotonic() < deadline


def test_a_collector_that_blocks_delays_no_tick_and_its_old_figures_are_ignored_and_named(
    policy: Any, collecting: AutoscaleConfig, caplog: pytest.LogCaptureFixture
) -> None:
    from tests.autoscale.own import Figures

    tell(policy, told(("m", collecting)))
    deadline = time.monotonic() + 60
    ticked(policy)
    while published(policy).services["m"].traffic.requests_per_s != 77.0:
        ticked(policy)
        assert time.monotonic() < deadline
    Figures.may_go_on.clear()
    with caplog.at_level("WARNING", logger="ray.serve"):
        wait_for_faults(policy, "takes longer than 0.2 s (timeout_s)")
        wait_for_faults(policy, "its last answer is older than 0.5 s (most_age_s)")
        for _ in range(3):
            ticked(policy)
    assert published(policy).services["m"].traffic.requests_per_s != 77.0
    assert policy._last["m"].decision.fault is None
    named = [record.getMessage() for record in caplog.records if "most_age_s" in record.getMessage()]
    assert len(named) == 1


def test_a_gauge_joins_the_reports_of_its_replica_and_one_of_no_running_replica_is_named(
    policy: Any, make_autoscale: Callable[..., AutoscaleConfig]
) -> None:
    from tests.autoscale.own import Figures

    Figures.may_go_on.set()
    kind = "tests.autoscale.own:Figures"
    tell(policy, told(("m", make_autoscale(collector={"kind": kind, "replica": "stranger"}, **QUICK))))
    ticked(policy)
    wait_for_faults(policy, f"collector {kind}: no figure is of a running replica: it names stranger, and d0 runs")
    tell(policy, told(("m", make_autoscale(collector={"kind": kind, "replica": "d0"}, **QUICK))))
    deadline = time.monotonic() + 60
    while policy._signals["m"].replicas(PoolKey("g0", Role.DECODE))[0].kv_usage_frac != 0.5:
        ticked(policy)
        assert time.monotonic() < deadline
    assert published(policy).services["m"].collector_faults == ()


def test_a_service_without_another_source_has_none(policy: Any, collecting: AutoscaleConfig) -> None:
    tell(policy, told(("m", collecting)))
    ticked(policy)
    assert set(policy._sources._sources) == {"m"}
    tell(policy, told(("m", collecting.model_copy(update={"collector": RayCollectorConfig()}))))
    ticked(policy)
    assert policy._sources._sources == {}


def test_the_load_is_forecast_off_the_tick_published_and_resumed(
    policy: Any, make_autoscale: Callable[..., AutoscaleConfig]
) -> None:
    config = make_autoscale(
        interval_s=0.2, window_s=5.0, stale_s=60.0, forecast={"step_s": 1.0, "fit_points": 4, "season_s": None}
    )
    policy._link.controllers = {"m": Controller(config)}
    try:
        deadline = time.monotonic() + 300
        while (state := policy._link.client._forecasts.get("m")) is None:
            now_s = time.time()
            of = contexts(at_s=now_s)
            for context in of.values():
                for counter in ("requests", "first_tokens", "input_tokens", "requests_ended", "output_tokens"):
                    points = [SimpleNamespace(timestamp=now_s, value=20.0 * now_s)]
                    context.raw_metrics[counter] = dict.fromkeys(context.running_replicas, points)
            policy(of)
            policy._link.client._drain()
            assert time.monotonic() < deadline, policy._complaints
            time.sleep(0.05)
    finally:
        policy._forecasts.end()
    assert state.history.points[-1].requests_per_s == pytest.approx(20.0, rel=0.01)
    assert state.forecast is not None
    link = policy._link
    answer = Settings(version=3, services={}, topology=None, cordoned=frozenset(), forecasts={"m": state})
    link.controllers = {}
    tell(policy, SETTINGS.dump_python(answer, mode="json"))
    assert link.resumed_forecasts == {"m": state}
    policy(contexts())
    assert link.resumed_forecasts is None
    assert policy._forecasts._stored == {"m": state}
