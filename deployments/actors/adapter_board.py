"""The adapter board: which LoRA adapters an application wants, and which replica has loaded what.

One actor per application with adapters; Serve starts, watches and ends it with the ingress deployment. Replicas ask it
what to load, and report what they have. Adapters that were loaded at run time outlive the actor in Ray's key-value
store, but not a new deployment of the application, unless it keeps settings.
"""

import asyncio
import json
import logging
import time
from collections.abc import Mapping, Sequence

import ray
from ray import serve

from router.adapters import AdapterFault, AdapterNews, AdapterSpec, FaultKind, HeldAdapters, WantedAdapters
from router.ray_actors import Bell, keep_announced
from router.ray_adapters import adapter_board_key
from router.ray_coordinator import is_alive, load_state, save_state

logger = logging.getLogger("ray.serve")

_WATCH_S = 5.0  # longest wait of a caller for a change, seconds
_LOAD_S = 240.0  # time that all replicas have to load an adapter, seconds
# Longest wait until every process knows a change, seconds; one that has not asked for this time has ended.
_KNOWN_S = 10.0
_POLL_S = 0.05  # seconds between two checks whether every process knows a change
_KEPT = "adapters-kept"  # name under which adapters are stored for the next deployment of the application


class AdapterBoard:
    """The actor, whose public methods other processes call."""

    def __init__(self, *, configured: Mapping[str, Sequence[tuple[str, str]]], keeps_settings: bool) -> None:
        """``configured``: name and path of each adapter in the configuration, by model."""
        self._app = serve.get_deployment_actor_context().app_name
        name = ray.get_runtime_context().get_actor_name() or ""
        self._state, self._keeps_settings = f"adapters-{name}", keeps_settings
        specs = {
            model: tuple(AdapterSpec(name=name, path=path) for name, path in adapters)
            for model, adapters in configured.items()
        }
        # By time, so that versions and revisions of this board are above those of boards before it.
        self._wanted = WantedAdapters(specs, time.time_ns() // 1_000_000)
        if not keeps_settings and load_state(self._app, _KEPT):  # adapters of long ago do not come back
            save_state(self._app, _KEPT, b"{}")
        self._restore(load_state(self._app, self._state) or (load_state(self._app, _KEPT) if keeps_settings else None))
        self._known: dict[str, tuple[int, float]] = {}  # version of each process, and when it asked last
        self._changed = Bell()  # wakes callers of ``watch`` and ``load``
        self._turn = asyncio.Lock()  # one adapter is loaded at a time
        self._announcing = asyncio.get_running_loop().create_task(keep_announced(adapter_board_key(self._app), name))

    async def sync(self, report: HeldAdapters, version: int) -> AdapterNews:
        """Take a replica's report. Returns the news: at once if they are new to it, otherwise after some seconds."""
        before = self._wanted.version
        self._note(report.replica_id, version)
        self._wanted.report(report, time.monotonic())
        if self._wanted.version != before:
            self._changed.ring()
            # The replica's own report is no news to it.
            version = self._wanted.version if version == before else version
        return await self.watch(version)

    async def watch(self, version: int, process: str | None = None) -> AdapterNews:
        """The news. Returns at once if the caller's version is old (-1: it has none), otherwise after some seconds.

        ``process``: name of the caller, if it follows the board.
        """
        if process is not None:
            self._note(process, version)
        if version == self._wanted.version:
            await self._changed.wait(_WATCH_S)
        self._wanted.drop_silent(time.monotonic())
        return self._wanted.news()

    async def load(self, model: str, name: str, path: str, is_in_place: bool) -> AdapterFault | None:
        """Let all replicas of a model load an adapter. Returns why one cannot; then none keeps it."""
        async with self._turn:
            before = self._wanted.loaded[model].get(name)
            spec = self._wanted.want(model, name, path, is_in_place=is_in_place)
            if isinstance(spec, AdapterFault):
                return spec
            self._changed.ring()
            fault = await self._outcome(model, spec)
            if fault is not None:
                self._wanted.restore(model, name, before)
                self._changed.ring()
            self._store()
            await self._all_know()
            return fault

    def _note(self, process: str, version: int) -> None:
        self._known[process] = (version, time.monotonic())

    async def _all_know(self) -> None:
        """Wait until every process that follows the board knows what is wanted and loaded now."""
        version, until_s = self._wanted.version, time.monotonic() + _KNOWN_S
        while (now_s := time.monotonic()) < until_s:
            self._known = {name: known for name, known in self._known.items() if now_s - known[1] < _KNOWN_S}
            if all(known >= version for known, _ in self._known.values()):
                return
            await asyncio.sleep(_POLL_S)

    async def _outcome(self, model: str, spec: AdapterSpec) -> AdapterFault | None:
        until_s = time.monotonic() + _LOAD_S
        while True:
            self._wanted.drop_silent(time.monotonic())
            is_tried, fault = self._wanted.is_tried(model, spec), self._wanted.fault(model, spec)
            if is_tried or (fault is not None and fault.kind is not FaultKind.FAILED):
                return fault
            if time.monotonic() > until_s:
                message = f"not all replicas of {model!r} have loaded the adapter within {_LOAD_S:g} s: try again"
                return AdapterFault(kind=FaultKind.FAILED, message=message)
            await self._changed.wait(_WATCH_S)
            await self._drop_dead()

    async def _drop_dead(self) -> None:
        """Forget replicas that no longer exist."""
        for report in list(self._wanted.replicas()):
            if not await asyncio.to_thread(is_alive, self._app, report.pool, report.replica_id):
                self._wanted.drop(report.replica_id)

    async def unload(self, name: str) -> AdapterFault | None:
        """Let all replicas unload an adapter. Returns why it stays."""
        async with self._turn:
            fault = self._wanted.forget(name)
            if fault is None:
                self._changed.ring()
                self._store()
                await self._all_know()
            return fault

    def _store(self) -> None:
        loaded = {
            model: [[spec.name, spec.path, spec.revision] for spec in specs.values()]
            for model, specs in self._wanted.loaded.items()
        }
        for name in [self._state, *([_KEPT] if self._keeps_settings else [])]:
            save_state(self._app, name, json.dumps(loaded).encode())

    def _restore(self, state: bytes | None) -> None:
        for model, specs in json.loads(state or b"{}").items():
            if model not in self._wanted.loaded:  # the new configuration has no such model
                continue
            for name, path, revision in specs:
                if self._wanted.news().find(name) is None:  # otherwise the configuration has it now
                    self._wanted.loaded[model][name] = AdapterSpec(name=name, path=path, revision=revision)
