"""Follows what a decode engine pulls from prefill, and mends links that break while both of their ends are healthy.

vLLM computes a prompt itself whose KV it cannot pull, which costs the client time alone. But it keeps a link that has
ended for ever, so each later prompt of that pair would be computed twice and be kept on prefill for a lease, and it
waits for ever where a link falls silent.
"""

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from deployments.engine_host import ANSWER_S
from deployments.handoff import PrefillResult
from deployments.metrics import LINK_FAILURES, LINK_REPAIRS
from deployments.worker_extension import METHOD_FORGET_PEER, METHOD_PULLS
from kvtransfer.peers import Peers, StuckPulls, merged

logger = logging.getLogger(__name__)

_POLL_S = 0.5
# vLLM takes 0.02 s, on a loaded machine a second.
_HANDSHAKE_S = 2.0


@dataclass(slots=True)
class _Pull:
    """One hand-over; ``is_here``: its first token has come. ``is_left``: nobody waits for it any more."""

    params: dict[str, Any]
    peer: str
    is_here: bool = False
    is_left: bool = False


class PullWatch:
    """Asks the engine's workers what has become of their pulls, while there are any."""

    def __init__(self, client: Any, pull_timeout_s: float) -> None:
        self.peers = Peers()
        self._client = client
        self._stuck = StuckPulls(pull_timeout_s)
        self._pulls: dict[str, _Pull] = {}
        self._unmended: dict[str, list[_Pull]] = {}  # of engines whose link could not be dropped yet: what was lost
        self._known: list[str] = []  # failures of the last report that came
        self._has_work = asyncio.Event()
        self._steps: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Begin to watch, on the running event loop: workers note what fails from now on."""
        with suppress(NotImplementedError):  # an emulated engine pulls nothing
            await self._client.collective_rpc(METHOD_PULLS)
        self._task = asyncio.create_task(self._run())

    def begin(self, result: PrefillResult) -> None:
        """The engine is about to be told of this KV."""
        params = result.kv_transfer_params
        if "remote_engine_id" in params:
            self._pulls[params["remote_request_id"]] = _Pull(params=params, peer=result.replica_id)
            self._has_work.set()

    def here(self, result: PrefillResult) -> None:
        """Its request's first token has come: it was pulled, or computed in its place."""
        if pull := self._pulls.get(result.kv_transfer_params.get("remote_request_id", "")):
            pull.is_here = True

    def left(self, result: PrefillResult) -> None:
        """Its request has ended."""
        if pull := self._pulls.get(result.kv_transfer_params.get("remote_request_id", "")):
            pull.is_left = True

    async def release(self, request_id: str, params: dict[str, Any]) -> None:
        """Free KV on prefill that this engine will not pull.

        Where the two have no link yet, the engine makes one beside its steps and passes this on at the next step, which
        an idle engine does not make: so it is given one.
        """
        await self._client.notify_kv_transfer_request_rejected(request_id, params)
        step = asyncio.create_task(self._step(f"{request_id}-step"))
        self._steps.add(step)
        step.add_done_callback(self._steps.discard)

    async def _step(self, request_id: str) -> None:
        await asyncio.sleep(_HANDSHAKE_S)
        with suppress(Exception):  # it has died, and so has its KV's reader
            await self._client.notify_kv_transfer_request_rejected(request_id, {})

    async def _run(self) -> None:
        while True:
            await self._has_work.wait()
            await asyncio.sleep(_POLL_S)
            try:
                await self._look()
            except Exception as error:  # it has died, which ends the replica, or is in a long step
                logger.debug("the engine does not say what it pulls: %s", error)
            if not self._pulls and not self._unmended:
                self._has_work.clear()

    async def _look(self) -> None:
        ended = {name: pull for name, pull in self._pulls.items() if pull.is_here or pull.is_left}
        async with asyncio.timeout(ANSWER_S):
            reports = await self._client.collective_rpc(METHOD_PULLS, args=(self._known,))
        now_s = time.monotonic()
        running, failed = merged([one[0] for one in reports]), merged([one[1] for one in reports])
        self._known = list(failed)
        for name, pull in ended.items():
            if name in failed or name in running:
                continue
            del self._pulls[name]
            if not pull.is_here:
                self.peers.unknown(pull.peer, now_s)
            elif self.peers.pulled(pull.peer, now_s):
                LINK_REPAIRS.inc()
                logger.warning("KV comes from prefill replica %s again", pull.peer)
        stuck = self._stuck.see(running, now_s)
        for engine_id in {*failed.values(), *stuck, *self._unmended}:
            names = {name for name, engine in {**running, **failed}.items() if engine == engine_id}
            lost = [self._pulls.pop(name) for name in names if name in self._pulls]
            self._stay_away(lost, "stuck" if engine_id in stuck else "failed", now_s)
            self._unmended.setdefault(engine_id, []).extend(lost)
        for engine_id in list(self._unmended):
            await self._mend(engine_id)

    def _stay_away(self, lost: list[_Pull], why: str, now_s: float) -> None:
        for peer in {pull.peer for pull in lost}:
            if self.peers.failed(peer, now_s):
                LINK_FAILURES.labels(why).inc()
                logger.warning("KV does not come from prefill replica %s (%s): prompts go elsewhere", peer, why)

    async def _mend(self, engine_id: str) -> None:
        """Let the next pull make a new link, and free what was not pulled; the next look tries again where it fails."""
        async with asyncio.timeout(ANSWER_S):
            is_dropped = all(await self._client.collective_rpc(METHOD_FORGET_PEER, args=(engine_id,)))
        if is_dropped:
            for pull in self._unmended.pop(engine_id):
                await self.release(f"{pull.params['remote_request_id']}-unread", pull.params)
