"""Follows the pulls of a decode engine from prefill, and repairs links that break while both ends are healthy.

If vLLM cannot pull a prompt's KV, it computes the prompt itself, which costs only the client's time. But it keeps a
broken link for ever: each later prompt of that pair is computed twice, and prefill keeps its KV for a lease. It also
waits for ever on a link that falls silent.
"""

import asyncio
import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from deployments.metrics import LINK_FAILURES, LINK_REPAIRS
from deployments.replicas.engine_host import ANSWER_S
from deployments.vllm_seam.worker_extension import METHOD_FORGET_PEER, METHOD_PULLS
from deployments.wire.messages import PrefillResult
from kvtransfer.peers import Peers, StuckPulls, merged

logger = logging.getLogger(__name__)

_POLL_S = 0.5  # seconds between two checks, while there are pulls
_HANDSHAKE_S = 2.0  # seconds that two engines get to make a new link: vLLM takes 0.02 s, on a loaded machine a second


@dataclass(slots=True)
class _Pull:
    """One handoff. ``is_here``: its first token has come. ``has_ended``: its request has ended."""

    params: dict[str, Any]
    peer: str
    is_here: bool = False
    has_ended: bool = False


class PullWatch:
    """Asks the engine's workers for the state of their pulls, while there are any."""

    def __init__(self, client: Any, pull_timeout_s: float) -> None:
        self.peers = Peers()
        self._client = client
        self._stuck = StuckPulls(pull_timeout_s)
        self._pulls: dict[str, _Pull] = {}
        self._unmended: dict[str, list[_Pull]] = {}  # lost pulls by engine, until its link is dropped
        self._reported: list[str] = []  # failures in the last report
        self._has_work = asyncio.Event()
        self._steps: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Start watching on the running event loop; workers note failures from now on."""
        with suppress(NotImplementedError):  # an emulated engine pulls nothing
            await self._client.collective_rpc(METHOD_PULLS)
        self._task = asyncio.create_task(self._run())

    def begin(self, result: PrefillResult) -> None:
        """Note a handoff just before the engine gets it."""
        params = result.kv_transfer_params
        if "remote_engine_id" in params:
            self._pulls[params["remote_request_id"]] = _Pull(params=params, peer=result.replica_id)
            self._has_work.set()

    def here(self, result: PrefillResult) -> None:
        """Note the first token of a request: its KV was pulled, or its prompt was computed instead."""
        if pull := self._pulls.get(result.kv_transfer_params.get("remote_request_id", "")):
            pull.is_here = True

    def left(self, result: PrefillResult) -> None:
        """Note the end of a request."""
        if pull := self._pulls.get(result.kv_transfer_params.get("remote_request_id", "")):
            pull.has_ended = True

    async def release(self, request_id: str, params: dict[str, Any]) -> None:
        """Free KV on prefill that this engine will not pull.

        If both engines have no link yet, the engine makes one beside its steps and frees the KV at its next step. An
        idle engine makes no step, so it is given one.
        """
        await self._client.notify_kv_transfer_request_rejected(request_id, params)
        step = asyncio.create_task(self._step(f"{request_id}-step"))
        self._steps.add(step)
        step.add_done_callback(self._steps.discard)

    async def _step(self, request_id: str) -> None:
        await asyncio.sleep(_HANDSHAKE_S)
        with suppress(Exception):  # the engine has died
            await self._client.notify_kv_transfer_request_rejected(request_id, {})

    async def _run(self) -> None:
        while True:
            await self._has_work.wait()
            await asyncio.sleep(_POLL_S)
            try:
                await self._look()
            except Exception as error:  # the engine has died, which ends the replica, or is in a long step
                logger.debug("the engine does not say what it pulls: %s", error)
            if not self._pulls and not self._unmended:
                self._has_work.clear()

    async def _look(self) -> None:
        ended = {name: pull for name, pull in self._pulls.items() if pull.is_here or pull.has_ended}
        async with asyncio.timeout(ANSWER_S):
            reports = await self._client.collective_rpc(METHOD_PULLS, args=(self._reported,))
        now_s = time.monotonic()
        running, failed = merged([one[0] for one in reports]), merged([one[1] for one in reports])
        self._reported = list(failed)
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
        """Drop a link, so that the next pull makes a new one, and free unread KV; the next look repeats what fails."""
        async with asyncio.timeout(ANSWER_S):
            is_dropped = all(await self._client.collective_rpc(METHOD_FORGET_PEER, args=(engine_id,)))
        if is_dropped:
            for pull in self._unmended.pop(engine_id):
                await self.release(f"{pull.params['remote_request_id']}-unread", pull.params)
