"""What the coordinator answers, stores and refuses; Ray's store and names are a dictionary here."""

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autoscale.decide.status import CYCLE, SETTINGS, CycleRecord, PlanRecord
from autoscale.extension import DEFERRED
from autoscale.forecast.forecaster import ForecastState
from autoscale.forecast.history import History, Point
from autoscale.types import ControllerState, Decision, Latency, Plan, PoolKey, Traffic
from deployments.config import ServiceConfig
from kvtransfer.topology import Role

pytestmark = pytest.mark.ray

CONFIG = {
    "pd_ratio": "1:2",
    "policy": {"kind": "heteroscale", "signal": "decode_tps", "target": 100.0},
    "slo": {"ttft_s": 1.0, "tpot_s": 0.05},
}
POOL = {"replicas": 1, "max_replicas": 8, "placement": {"accelerator_type": "H100"}}
SERVICE = {
    "model": {"id": "m", "source": "org/m"},
    "groups": [{"name": "g0", "prefill": POOL, "decode": POOL}],
    "autoscale": CONFIG,
}


@pytest.fixture(name="world")
def _world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Ray's key-value store, the actor's name, which actors are alive, when Serve deployed, and where the log goes."""
    from deployments.actors import coordinator as module
    from router import ray_kv

    log = tmp_path / "serve" / "tandem_decisions_app.jsonl"
    world = SimpleNamespace(kv={}, actor="tandem-1", alive={"p1", "d1"}, deployed_s=5.0, log=log)
    monkeypatch.setattr(ray_kv, "get", world.kv.get)
    monkeypatch.setattr(ray_kv, "put", world.kv.__setitem__)
    monkeypatch.setattr(module.serve, "get_deployment_actor_context", lambda: SimpleNamespace(app_name="app"))
    context = SimpleNamespace(get_actor_name=lambda: world.actor)

    def status() -> Any:
        return SimpleNamespace(applications={"app": SimpleNamespace(last_deployed_time_s=world.deployed_s)})

    monkeypatch.setattr(module.serve, "status", status)
    monkeypatch.setattr(module.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(module, "is_alive", lambda app, deployment, name: name in world.alive)
    monkeypatch.setattr(module, "serve_logs_folder", lambda: world.log.parent)
    return world


def coordinator(**options: Any) -> Any:
    from deployments.actors.coordinator import Coordinator

    pools = ServiceConfig.model_validate(SERVICE, context=DEFERRED).pool_limits().model_dump(mode="json")
    return Coordinator(
        services=[SERVICE], pools={"m": pools}, topology=None, start_hosts={"per_node": 0, "pools": []}, **options
    )


def config_of(settings: dict[str, Any]) -> dict[str, Any]:
    return settings["services"]["m"]["config"]  # type: ignore[no-any-return]


def cycle(*admitted: str, ticked_s: float = 1.0, forecast: ForecastState | None = None) -> dict[str, Any]:
    """A cycle as the policy sends it."""
    record = PlanRecord(
        plan=Plan(
            counts={},
            admitted=admitted,
            withdrawn=(),
            reinstated=(),
            victims=(),
            decision=Decision(wanted=None, reason="test"),
            held_back=(),
            state=ControllerState(ticked_s=ticked_s),
        ),
        running={PoolKey("g0", Role.PREFILL): ("p1",), PoolKey("g0", Role.DECODE): ("d1", "d2")},
        draining={},
        latency=Latency(),
        traffic=Traffic(),
    )
    made = CycleRecord(
        services={"m": record},
        nodes=None,
        places=None,
        policy_call_p99_s=0.0,
        is_hooked=True,
        forecasts={} if forecast is None else {"m": forecast},
    )
    return CYCLE.dump_python(made, mode="json")  # type: ignore[no-any-return]


async def test_a_router_hears_at_once_of_a_plan_that_it_has_not_seen(world: Any) -> None:
    told = coordinator()
    await told.sync(cycle("p1", "d1"), [])
    version, admitted = await told.watch(-1)
    assert admitted == {"prefill:g0": ["p1"], "decode:g0": ["d1"]}
    waiting = asyncio.create_task(told.watch(version))
    await told.sync(cycle("p1", "d1"), [])  # nothing new
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await told.sync(cycle("p1", "d1", "d2"), [])
    assert (await asyncio.wait_for(waiting, 30.0))[1] == {"prefill:g0": ["p1"], "decode:g0": ["d1", "d2"]}


async def test_without_a_policy_that_answers_no_replica_is_held(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from deployments.actors import coordinator as module

    told = coordinator()
    assert await told.watch(-1) == (0, None)
    await told.sync(cycle("p1", "d1"), [])
    now_s = module.time.monotonic()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s + 61.0))
    assert await told.watch(-1) == (1, None)


async def test_a_tuning_holds_from_the_next_sync_and_a_wrong_one_changes_nothing(world: Any) -> None:
    told = coordinator()
    assert await told.tune("m", {"policy": {"target": 50.0}}, "test") is None
    assert await told.tune("m", {"pd_ratio": "1:3"}, "test") is None
    said = await told.sync(cycle("p1", "d1"), [])
    assert (said["version"], config_of(said)["policy"]["target"], config_of(said)["pd_ratio"]) == (2, 50.0, "1:3")
    for wrong in ({"pd_ratio": "0:3"}, {"policy": {"target": -1.0}}, {"nonsense": 1}):
        refusal = await told.tune("m", wrong, "test")
        assert refusal
        assert len(refusal.splitlines()) < 5
    assert (await told.sync(cycle("p1", "d1"), []))["version"] == 2
    assert await told.tune("m", {}, "back") is None
    assert (await told.status())["services"]["m"]["tuned"] == {}


async def test_a_slow_import_of_a_tuned_policy_keeps_no_other_caller_waiting(
    world: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deployments.actors import coordinator as module

    (tmp_path / "own_slow.py").write_text("import time\ntime.sleep(2.0)\nfrom tests.autoscale.own import Fixed\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    told = coordinator()
    tuning = asyncio.create_task(told.tune("m", {"policy": {"kind": "own_slow:Fixed"}}, "test"))
    await asyncio.sleep(0.1)
    await told.status()
    assert not tuning.done()
    assert await tuning is None
    assert config_of(await told.join())["policy"] == {"kind": "own_slow:Fixed", "decode": 2.0, "fault": ""}
    monkeypatch.setattr(module, "_CHECK_S", 0.2)
    (tmp_path / "own_slower.py").write_text("import time\ntime.sleep(2.0)\n")
    refusal = await told.tune("m", {"policy": {"kind": "own_slower:Fixed"}}, "test")
    assert "the check took longer than 0.2 s" in refusal


async def test_a_coordinator_starts_without_the_package_of_a_policy_that_a_door_has_checked(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = {"kind": "no_such_package:Mine", "target": 3}
    monkeypatch.setitem(SERVICE, "autoscale", {**CONFIG, "policy": policy})
    told = coordinator()
    assert config_of(await told.join())["policy"] == policy
    assert "cannot be imported" in await told.tune("m", {"policy": {"target": 4}}, "test")
    assert await told.tune("m", {"is_paused": True}, "pause") is None
    assert await told.tune("m", {"policy": CONFIG["policy"]}, "test") is None


async def test_a_restarted_coordinator_has_its_states_and_tunings_again(world: Any) -> None:
    first = coordinator()
    await first.tune("m", {"policy": {"target": 50.0}}, "test")
    await first.sync(cycle("p1", "d1", ticked_s=7.0), ["{}"])
    joined = await coordinator().join()
    assert joined["states"]["m"]["ticked_s"] == 7.0
    assert config_of(joined)["policy"]["target"] == 50.0


async def test_the_load_of_a_service_outlives_the_policy_the_coordinator_and_a_redeployment(world: Any) -> None:
    first = coordinator()
    assert (await first.join())["forecasts"] == {}
    own = ForecastState(step_s=60.0, history=History(points=(Point(60.0, 3.0, 900.0, 200.0),)))
    await first.sync(cycle("p1", "d1", forecast=own), [])  # no line: a decision is no news, and the load is stored
    settings = await first.sync(cycle("p1", "d1"), ["{}"])
    assert settings["forecasts"] == {}  # the policy that sent it has it
    assert own == SETTINGS.validate_python(await first.join()).forecasts["m"]
    world.alive.clear()
    world.deployed_s, world.actor = 6.0, "tandem-2"
    joined = await coordinator().join()
    assert joined["states"] == {}
    assert own == SETTINGS.validate_python(joined).forecasts["m"]
    # The load of a day is not stored with each decision.
    assert [len(value) > 100 and b"900.0" in value for value in world.kv.values()].count(True) == 1


async def test_a_stored_load_of_another_form_begins_anew(world: Any, caplog: pytest.LogCaptureFixture) -> None:
    await coordinator().sync(cycle("p1", "d1", forecast=ForecastState(step_s=60.0)), [])
    (key,) = [key for key in world.kv if b"forecast" in key]
    world.kv[key] = b'{"step_s": "often"}'
    assert (await coordinator().join())["forecasts"] == {}
    assert "its forecasts begin anew" in caplog.text


async def test_tunings_outlive_the_death_of_all_replicas_and_of_the_coordinator(world: Any) -> None:
    first = coordinator()
    await first.tune("m", {"policy": {"target": 50.0}}, "test")
    await first.sync(cycle("p1", "d1"), ["{}"])
    world.alive.clear()
    assert config_of(await coordinator().join())["policy"]["target"] == 50.0


async def test_settings_are_kept_for_the_next_deployment_where_the_user_wants_it(
    world: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = coordinator(keeps_settings=True)
    await first.tune("m", {"policy": {"target": 50.0}, "is_paused": True}, "test")
    await first.cordon("node-a", True)
    await first.sync(cycle("p1", "d1"), ["{}"])
    world.alive.clear()
    world.deployed_s, world.actor = 6.0, "tandem-2"
    joined = await coordinator(keeps_settings=True).join()
    assert joined["states"] == {}
    config = config_of(joined)
    assert (config["policy"]["target"], config["is_paused"]) == (50.0, True)
    assert joined["cordoned"] == ["node-a"]
    monkeypatch.setitem(
        SERVICE, "autoscale", {**CONFIG, "pd_ratio": "1:2", "policy": {"kind": "static", "prefill": 1, "decode": 2}}
    )
    world.deployed_s, world.actor = 7.0, "tandem-3"
    joined = await coordinator(keeps_settings=True).join()
    assert config_of(joined)["is_paused"] is True
    assert "policy of m was tuned before, does not fit the deployment, and is dropped" in caplog.text
    coordinator()  # a deployment that keeps no settings
    world.deployed_s, world.actor = 8.0, "tandem-4"
    assert config_of(await coordinator(keeps_settings=True).join())["is_paused"] is False


async def test_an_application_that_is_deployed_again_starts_as_its_config_says(world: Any) -> None:
    first = coordinator()
    await first.tune("m", {"policy": {"target": 50.0}}, "test")
    await first.sync(cycle("p1", "d1"), ["{}"])
    world.alive.clear()
    world.deployed_s = 6.0
    joined = await coordinator().join()
    assert joined["states"] == {}
    assert config_of(joined)["policy"]["target"] == 100.0


async def test_the_log_begins_anew_with_its_config_when_it_is_full(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from deployments.actors import coordinator as module

    monkeypatch.setattr(module, "_LOG_BYTES", 2000)
    told = coordinator()
    for number in range(60):
        await told.sync(cycle("p1", "d1"), [json.dumps({"line": number, "more": "x" * 60})])
    lines = [json.loads(line) for line in world.log.read_text().splitlines()]
    before = [json.loads(line) for line in world.log.with_suffix(".1.jsonl").read_text().splitlines()]
    assert lines[-1]["line"] == 59
    assert "config" in json.dumps(lines[0])
    assert [line["line"] for line in (*before, *lines) if "line" in line][-9:] == list(range(51, 60))


async def test_a_log_that_cannot_be_written_does_not_stop_a_sync(world: Any) -> None:
    world.log.parent.parent.joinpath("serve").write_text("a file where a folder should be")
    said = await coordinator().sync(cycle("p1", "d1"), ["{}"])
    assert said["version"] == 0


async def test_a_service_for_which_requests_wait_is_reported_at_once_and_forgotten_soon(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deployments.actors import coordinator as module

    told = coordinator()
    waiting = asyncio.create_task(told.awaited([]))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await told.wake("m")
    assert await asyncio.wait_for(waiting, 30.0) == ["m"]
    now_s = module.time.monotonic()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now_s + 6.0))
    assert await told.awaited(["m"]) == []


async def test_cordons_outlive_the_coordinator(world: Any) -> None:
    first = coordinator()
    await first.sync(cycle("p1", "d1"), [])
    await first.cordon("switch-a", True)
    await first.cordon("switch-b", True)
    await first.cordon("switch-b", False)
    joined = await coordinator().join()
    assert joined["cordoned"] == ["switch-a"]
    assert (await coordinator().status())["cordoned"] == ["switch-a"]
