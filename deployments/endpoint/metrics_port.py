"""The application's metrics page, and the port for it.

On each node one replica of the endpoint serves the port. After the end of this replica another one does.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

from aiohttp import web
from ray.exceptions import RayError
from ray.serve.handle import DeploymentHandle

from deployments import metrics
from deployments.machine.claims import CLAIMS, own_folder, try_lock
from deployments.serve_seam.calls import answers_in_time
from router.ray_coordinator import find_coordinator

logger = logging.getLogger("ray.serve")

_TIMEOUT_S = 5.0  # seconds that all processes together have to answer; half of Prometheus' default limit
# aiohttp logs every malformed request with its client's text; this logger drops such lines. The logger is outside of
# the logging tree: code that configures the tree anew, as vLLM does, would switch a logger of the tree on again.
_silent = logging.Logger(f"{__name__}.http", level=logging.CRITICAL + 1)
_RETRY_S = 2.0  # seconds between two attempts to serve the port


@dataclass(frozen=True, slots=True)
class MetricsPage:
    """Collects the metrics of every endpoint, decode and prefill replica, vLLM's too, and of the coordinator."""

    endpoint: DeploymentHandle
    engines: Sequence[DeploymentHandle]
    coordinated_app: str | None  # name of the application, if it has a coordinator

    async def render(self) -> bytes:
        """The page in Prometheus' text format."""
        # For each pool a list with the metrics of each of its processes.
        pools = await asyncio.gather(
            answers_in_time(self.endpoint, "process_page", _TIMEOUT_S),
            *(answers_in_time(handle, "metrics", _TIMEOUT_S) for handle in self.engines),
            self._coordinator_metrics(),
        )
        # In a thread, since a page of many processes would block this replica's requests.
        return await asyncio.to_thread(metrics.render, [page for pool in pools for page in pool])

    async def _coordinator_metrics(self) -> list[Any]:
        if self.coordinated_app is None:
            return []
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                coordinator = await asyncio.to_thread(find_coordinator, self.coordinated_app)
                return [] if coordinator is None else [await coordinator.metrics.remote()]
        except (TimeoutError, RayError) as error:
            logger.warning("the coordinator did not give its metrics: %s", error)
            return []


class MetricsPort:
    """Serves ``GET /metrics`` to all clients that reach the port; a fault of the port never fails its replica."""

    def __init__(
        self, host: str, port: int, app_name: str, page: Callable[[], Awaitable[bytes]], *, claims: Path = CLAIMS
    ) -> None:
        """``claims``: folder with the lock of the node's replica that serves the port."""
        self._host = host
        self._port = port
        self._page = page
        self._lock_file = claims / f"metrics-{port}-{quote(app_name, safe='')}"
        self._lock: IO[str] | None = None  # once taken, it is held also while another program has the port

    async def run(self) -> None:
        """Listen as soon as no other replica does. Runs until it is cancelled."""
        runner: web.AppRunner | None = None
        is_logged = False
        try:
            while runner is None:
                try:
                    runner = await self._listen()
                except OSError as error:
                    if not is_logged:
                        is_logged = True
                        logger.warning(
                            "no metrics on %s:%d: %s; end the process that holds it, or choose another "
                            "ingress.metrics_host or ingress.metrics_port; trying again every %g s",
                            *(self._host, self._port, error, _RETRY_S),
                        )
                if runner is None:
                    await asyncio.sleep(_RETRY_S)
            await asyncio.Event().wait()
        finally:
            if runner is not None:
                await runner.cleanup()  # frees the port before another replica can get the lock
            if self._lock is not None:
                self._lock.close()

    async def _listen(self) -> web.AppRunner | None:
        """The server; ``None``: another replica of the application serves the port.

        Raises OSError: another program holds the port, or the address is not of this node.
        """
        if self._lock is None:
            own_folder(self._lock_file.parent)
            self._lock = try_lock(self._lock_file)
        if self._lock is None:
            return None
        app = web.Application()
        app.router.add_get("/metrics", self._respond)
        runner = web.AppRunner(app, access_log=None, logger=_silent)
        await runner.setup()
        try:
            await web.TCPSite(runner, self._host, self._port).start()
        except OSError:
            await runner.cleanup()
            raise
        return runner

    async def _respond(self, _: web.Request) -> web.Response:
        try:
            page = await self._page()
        except Exception:
            logger.exception("the metrics page failed")  # ``_silent`` would drop aiohttp's own line
            raise
        return web.Response(body=page, headers={"Content-Type": "text/plain; version=0.0.4"})
