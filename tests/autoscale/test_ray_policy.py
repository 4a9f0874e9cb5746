"""Serve's calls of the policy: they never block and never raise, and what is unknown changes no count."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from autoscale.decide.config import AutoscaleConfig
from autoscale.decide.controller import Controller
from autoscale.decide.decision_log import parse_line
from autoscale.decide.status import SETTINGS, ServiceSettings, Settings
from autoscale.decide.tuning import Pools
from autoscale.types import Plan, PoolKey, PoolLimits, Snapshot
from kvtransfer.topology import Role

pytestmark = pytest.mark.ray

NAMES = ("prefill:g0", "decode:g0")


def contexts(decode_tps: float = 50.0, at_s: float | None = None, *, ready: tuple[int, int] = (1, 1)) -> dict[Any, Any]:
    """The part of what Serve hands to an application-level policy that ours reads."""
    now_s = time.time() if at_s is None else at_s
    told = {}
    for name, count in zip(NAMES, ready, strict=True):
        replicas = [HashableReplica(f"{name[0]}{index}") for index in range(count)]
        series = {
            "decode_tokens": [SimpleNamespace(timestamp=now_s, value=decode_tps * now_s)],
            "queued_prefill_tokens": [SimpleNamespace(timestamp=now_s, value=0.0)],
        }
        told[SimpleDeployment(name)] = SimpleNamespace(
            app_name="app",
            running_replicas=replicas,
            raw_metrics={metric: dict.fromkeys(replicas, points) for metric, points in series.items()},
            target_num_replicas=max(1, count),
            capacity_adjusted_min_replicas=1,
            capacity_adjusted_max_replicas=8,
        )
    return told


class HashableReplica(str):
    """A replica id as Serve has it."""

    @property
    def unique_id(self) -> str:
        return str(self)


class SimpleDeployment(str):
    """A deployment id as Serve has it."""

    @property
    def name(self) -> str:
        return str(self)


@pytest.fixture
def policy(make_autoscale: Callable[..., AutoscaleConfig]) -> Iterator[Any]:
    """A policy that has a configuration and finds no coordinator."""
    from autoscale.ray_link import Link
    from autoscale.ray_policy import JointPolicy

    policy = JointPolicy()
    policy._link = Link("app")
    policy._link.controllers = {"m": Controller(make_autoscale(interval_s=0.2, window_s=5.0, stale_s=60.0))}
    limits = PoolLimits(lowest_replicas=1, highest_replicas=8)
    policy._link.pools = {"m": Pools({PoolKey("g0", role): limits for role in Role})}
    policy._link._looked_s = float("inf")
    yield policy
    policy._thread.shutdown(wait=False, cancel_futures=True)


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


def test_a_call_returns_the_counts_of_the_last_tick(policy: Any) -> None:
    assert policy(contexts())[0] == {}  # nothing is known yet, so Serve keeps its targets
    assert ticked(policy) == {"prefill:g0": 1, "decode:g0": 1}


def test_no_contexts_are_no_error(policy: Any) -> None:
    assert policy({}) == ({}, {})


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
    lines = link._lines
    assert '"why": "start"' in lines[0]
    assert '"snapshot"' in lines[1]
    assert link.unlogged_configs == 0


def test_traffic_has_a_line_of_its_own_after_a_minute_without_news(policy: Any) -> None:
    same = {"decode_tps": 100.0, "ready": (3, 3)}
    for _ in range(3):
        ticked(policy, **same)

    def lines_of_next_ticks(count: int) -> list[str]:
        policy._link._lines = lines = []
        ticked_s, ticks, deadline = policy._last["m"].state.ticked_s, 0, time.monotonic() + 60
        while ticks < count:
            policy(contexts(**same))
            if policy._last["m"].state.ticked_s != ticked_s:
                ticked_s, ticks = policy._last["m"].state.ticked_s, ticks + 1
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return lines

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
    link._read(SETTINGS.dump_python(answer, mode="json"))
    assert link.pools == {"m": redeployed}


def take(policy: Any, counts: tuple[int, int]) -> None:
    """Let the policy take a tick with these counts."""
    from autoscale.ray_link import Ticked

    plan = policy._last["m"]
    counted = replace(plan, counts=dict(zip(plan.counts, counts, strict=True)))
    policy._take(Ticked({"m": (Snapshot(now_s=0.0, pools=()), counted)}, [], None, None, {}), policy._link)


def test_a_lower_count_waits_until_the_coordinator_holds_the_plan(policy: Any) -> None:
    ticked(policy, ready=(3, 3))
    policy._ticked_s = float("inf")  # no other tick
    link = policy._link
    link._version = 1
    take(policy, (2, 4))

    def answers() -> dict[str, int]:
        return {str(name): count for name, count in policy(contexts(ready=(3, 3)))[0].items()}

    assert answers() == {"prefill:g0": 3, "decode:g0": 4}  # a higher count at once, a lower one later
    answer: Future[dict[str, Any]] = Future()
    link._handle = coordinator(lambda update: answer)
    assert answers() == {"prefill:g0": 3, "decode:g0": 4}
    answer.set_result(settings(link._version))
    assert answers() == {"prefill:g0": 2, "decode:g0": 4}
    # A call that fails does not count as an answer.
    lost: Future[dict[str, Any]] = Future()
    lost.set_exception(ActorDiedError())
    link._handle = coordinator(lambda update: lost)
    take(policy, (1, 4))
    for _ in range(3):
        assert answers() == {"prefill:g0": 2, "decode:g0": 4}
    # Nor does the answer of a restarted coordinator when the policy joins.
    joined: Future[dict[str, Any]] = Future()
    joined.set_result(settings(link._version))
    link._handle, link._reply = coordinator(lambda update: Future()), joined
    assert answers() == {"prefill:g0": 2, "decode:g0": 4}


def test_a_lower_count_comes_through_though_every_other_call_takes_another_plan(policy: Any) -> None:
    ticked(policy, ready=(3, 3))
    policy._ticked_s = float("inf")  # ticks are ours
    link = policy._link
    link._version = 1

    def acknowledged(update: Any) -> Future[dict[str, Any]]:
        done: Future[dict[str, Any]] = Future()
        done.set_result(settings(link._version))
        return done

    link._handle = coordinator(acknowledged)
    for _ in range(6):
        policy(contexts(ready=(3, 3)))
        take(policy, (2, 2))
        policy(contexts(ready=(3, 3)))
    assert {str(name): count for name, count in policy(contexts(ready=(3, 3)))[0].items()} == {
        "prefill:g0": 2,
        "decode:g0": 2,
    }
