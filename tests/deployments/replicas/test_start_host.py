"""What a start host notes, and when it ends; Ray's store and the end of the process are fakes."""

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from router import ray_kv

pytestmark = pytest.mark.vllm


@pytest.fixture(name="world")
def _world(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ray's key-value store, whether the process has an actor, and how often it has ended."""
    from deployments.replicas import start_host

    world = SimpleNamespace(kv={}, actor=None, ended=0, is_broken=False)

    def get(key: bytes) -> bytes | None:
        if world.is_broken:
            raise RuntimeError("the store restarts")
        value: bytes | None = world.kv.get(key)
        return value

    def end(code: int) -> None:
        world.ended += 1
        world.actor = "none, but the thread ends"

    context = SimpleNamespace(get_node_id=lambda: "node", get_actor_id=lambda: world.actor)
    monkeypatch.setattr(ray_kv, "get", get)
    monkeypatch.setattr(ray_kv, "put", world.kv.__setitem__)
    monkeypatch.setattr(ray_kv, "delete", lambda key: world.kv.pop(key, None))
    monkeypatch.setattr(start_host.ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(start_host, "BEAT_S", 0.01)
    monkeypatch.setattr(start_host, "_ORPHAN_S", 0.1)
    monkeypatch.setattr(start_host.os, "_exit", end)
    monkeypatch.setattr(start_host, "own_runtime_env", lambda: "{}")
    return world


def until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10.0
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def waiting() -> Any:
    from deployments.replicas.start_host import _Waiting

    thread = _Waiting("kind")
    thread.start()
    return thread


def coordinator(world: Any) -> threading.Event:
    """A coordinator that asks for hosts until the event is set."""
    from deployments.serve_seam.host_notes import keeper_key

    has_ended = threading.Event()

    def run() -> None:
        beat = 0
        while not has_ended.wait(0.005):
            beat += 1
            world.kv[keeper_key("kind")] = str(beat).encode()

    threading.Thread(target=run, daemon=True).start()
    return has_ended


def notes(world: Any) -> list[bytes]:
    return [value for key, value in list(world.kv.items()) if b":hosts:" in key]


def test_a_host_notes_that_it_waits_until_a_replica_takes_it(world: Any) -> None:
    has_ended, thread = coordinator(world), waiting()
    until(lambda: notes(world) > [b"3"])
    thread.take("app")
    thread.join(10.0)
    assert notes(world) == []
    assert world.ended == 0
    assert b"{}" in world.kv.values()  # the environment, for the hosts after it
    has_ended.set()


def test_a_host_ends_when_no_coordinator_asks_for_hosts(world: Any) -> None:
    has_ended, thread = coordinator(world), waiting()
    until(lambda: bool(notes(world)))
    has_ended.set()
    thread.join(10.0)
    assert world.ended == 1


def test_a_worker_of_an_engine_is_no_host_and_never_ends_for_lack_of_a_coordinator(world: Any) -> None:
    world.actor = "the engine's worker"  # it has the environment of its replica
    thread = waiting()
    thread.join(10.0)
    assert notes(world) == []
    assert world.ended == 0


def test_a_host_goes_on_when_rays_store_was_away(world: Any) -> None:
    has_ended, thread = coordinator(world), waiting()
    until(lambda: bool(notes(world)))
    world.is_broken = True
    time.sleep(0.05)
    world.is_broken = False
    latest = notes(world)
    until(lambda: notes(world) != latest)
    assert thread.is_alive()
    thread.take("app")
    thread.join(10.0)
    has_ended.set()
