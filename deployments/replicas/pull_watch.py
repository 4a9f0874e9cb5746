"""Watches a decode engine's pulls of KV from prefill, and repairs links that break while both ends are healthy.

If vLLM cannot pull a prompt's KV, it computes the prompt itself, which costs only the client's time. But it never
repairs the link between the two engines. Each later prompt of this pair is computed twice, and prefill keeps the KV
until its lease ends. If the link is silent (neither data nor an error), the pull waits for ever.

A pull has the request id that prefill's engine uses. A peer is the replica id of a prefill replica; vLLM knows the
replica only by its engine's id.
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
_HANDSHAKE_S = 2.0  # seconds for two engines to make a new link: vLLM takes 0.02 s, on a loaded machine a second


@dataclass(slots=True)
class Pull:
    """The KV of one prompt, to be pulled from prefill."""

    params: dict[str, Any]  # prefill's ``kv_transfer_params``
    peer: str  # the prefill replica
    began_s: float  # monotonic time of prefill's answer
    has_first: bool = False  # the first token has come: the KV was pulled, or the prompt was computed instead
    has_ended: bool = False  # the request has ended


class PullWatch:
    """Polls the engine's workers for the state of their pulls, while there are any."""

    def __init__(self, client: Any, pull_timeout_s: float) -> None:
        self.peers = Peers()  # links that are broken, and when to test them
        self._client = client
        self._stuck = StuckPulls(pull_timeout_s)
        self._pulls: dict[str, Pull] = {}  # by prefill's request id
        self._to_drop: dict[str, list[Pull]] = {}  # links to drop: lost pulls by prefill's engine id
        self._reported: list[str] = []  # failed pulls that have been received, which the workers may forget
        self._has_work = asyncio.Event()
        self._steps: set[asyncio.Task[None]] = set()  # asyncio itself holds its tasks only weakly

    async def start(self) -> None:
        """Start watching on the running event loop; the workers record failures from now on."""
        with suppress(NotImplementedError):  # an emulated engine pulls nothing
            await self._client.collective_rpc(METHOD_PULLS)
        self._task = asyncio.create_task(self._run())

    def begin(self, result: PrefillResult) -> Pull:
        """The pull that an engine is about to make; the caller sets ``has_first`` and ``has_ended``."""
        params = result.kv_transfer_params
        pull = Pull(params=params, peer=result.replica_id, began_s=time.monotonic())
        if "remote_engine_id" in params:  # an emulated engine has no link to watch
            self._pulls[params["remote_request_id"]] = pull
            self._has_work.set()
        return pull

    async def release(self, request_id: str, params: dict[str, Any]) -> None:
        """Free KV on prefill that this engine will not pull.

        If the two engines have no link yet, this engine makes one in a thread, and frees the KV at its next step after
        that. An idle engine makes no step, so this method causes one later.
        """
        await self._client.notify_kv_transfer_request_rejected(request_id, params)
        step = asyncio.create_task(self._step(f"{request_id}-step"))
        self._steps.add(step)
        step.add_done_callback(self._steps.discard)

    async def _step(self, request_id: str) -> None:
        """Wait until a new link must be there, then cause a step of the engine by a request that it refuses at once."""
        await asyncio.sleep(_HANDSHAKE_S)
        with suppress(Exception):  # the engine has died
            await self._client.notify_kv_transfer_request_rejected(request_id, {})

    async def _run(self) -> None:
        while True:
            await self._has_work.wait()
            await asyncio.sleep(_POLL_S)
            try:
                await self._check_pulls()
            except Exception as error:  # the engine has died, which ends the replica, or is in a long step
                logger.debug("the engine does not report its pulls: %s", error)
            if not self._pulls and not self._to_drop:
                self._has_work.clear()

    async def _check_pulls(self) -> None:
        # Listed before the workers report. A pull that ends after its worker's report may fail without being in it.
        ended = {name: pull for name, pull in self._pulls.items() if pull.has_first or pull.has_ended}
        async with asyncio.timeout(ANSWER_S):
            reports = await self._client.collective_rpc(METHOD_PULLS, args=(self._reported,))
        now_s = time.monotonic()
        # Each worker reports its running and its failed pulls: prefill's request id -> prefill's engine id.
        running = merged([running for running, _ in reports])
        failed = merged([failed for _, failed in reports])
        self._reported = list(failed)
        for name, pull in ended.items():
            if name in failed or name in running:
                continue  # a failed pull is handled below, a running one by a later check
            del self._pulls[name]
            if not pull.has_first:  # the request ended too early to tell whether the KV came
                self.peers.unknown(pull.peer, now_s)
            elif self.peers.pulled(pull.peer, now_s):
                LINK_REPAIRS.inc()
                logger.warning("KV comes from prefill replica %s again", pull.peer)
        stuck = self._stuck.see(running, now_s)
        for engine_id in {*failed.values(), *stuck, *self._to_drop}:
            # If the link is dropped, all pulls over it are lost, also those that began while it waited to be dropped.
            names = {name for name, engine in {**running, **failed}.items() if engine == engine_id}
            lost = [self._pulls.pop(name) for name in names if name in self._pulls]
            self._note_broken(lost, "stuck" if engine_id in stuck else "failed", now_s)
            self._to_drop.setdefault(engine_id, []).extend(lost)
        for engine_id in list(self._to_drop):
            await self._drop_link(engine_id)

    def _note_broken(self, lost: list[Pull], why: str, now_s: float) -> None:
        for peer in {pull.peer for pull in lost}:
            if self.peers.failed(peer, now_s):
                LINK_FAILURES.labels(why).inc()
                logger.warning("KV does not come from prefill replica %s (%s): prompts go elsewhere", peer, why)

    async def _drop_link(self, engine_id: str) -> None:
        """Drop a link, so that the next pull makes a new one, and free the KV of its lost pulls.

        If the engine cannot drop it yet, the next check tries again.
        """
        async with asyncio.timeout(ANSWER_S):
            is_dropped = all(await self._client.collective_rpc(METHOD_FORGET_PEER, args=(engine_id,)))
        if is_dropped:
            for pull in self._to_drop.pop(engine_id):
                await self.release(f"{pull.params['remote_request_id']}-unread", pull.params)
