"""The metrics page on a port of its own: one replica of a node serves it, and another one when that one is gone."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import IO
from urllib.parse import quote

from aiohttp import web

from deployments.locks import CLAIMS, own_folder, try_lock

logger = logging.getLogger("ray.serve")

# aiohttp tells of every malformed request, in its client's words. Not a logger of the tree: who sets that up anew, as
# vLLM does, would switch it on again.
_silent = logging.Logger(f"{__name__}.http", level=logging.CRITICAL + 1)

_LOOK_S = 2.0


class MetricsPort:
    """Serves ``GET /metrics`` to whoever reaches the port; what is wrong with the port never fails its replica."""

    def __init__(
        self, host: str, port: int, app_name: str, page: Callable[[], Awaitable[bytes]], *, claims: Path = CLAIMS
    ) -> None:
        """``claims``: the folder of the locks by which an application's replicas on a node know of each other."""
        self._host = host
        self._port = port
        self._page = page
        self._lock_file = claims / f"metrics-{port}-{quote(app_name, safe='')}"
        self._lock: IO[str] | None = None

    async def run(self) -> None:
        """Listen as soon as no other replica does, and from then on; returns only by cancellation."""
        is_told = False
        while True:
            try:
                runner = await self._listen()
                if runner is not None:
                    break
            except OSError as error:
                if not is_told:
                    is_told = True
                    logger.warning(
                        "no metrics on %s:%d: %s; end what holds it, or choose another ingress.metrics_host or "
                        "ingress.metrics_port; looking again every %g s",
                        *(self._host, self._port, error, _LOOK_S),
                    )
            await asyncio.sleep(_LOOK_S)
        try:
            await asyncio.Event().wait()
        finally:
            await runner.cleanup()
            if self._lock is not None:
                self._lock.close()

    async def _listen(self) -> web.AppRunner | None:
        """``None``: another replica of the application has the port.

        Raises:
            OSError: the port is somebody else's, or cannot be had.
        """
        if self._lock is None:
            own_folder(self._lock_file.parent)
            self._lock = try_lock(self._lock_file)
        if self._lock is None:
            return None
        app = web.Application()
        app.router.add_get("/metrics", self._answer)
        runner = web.AppRunner(app, access_log=None, logger=_silent)
        await runner.setup()
        try:
            await web.TCPSite(runner, self._host, self._port).start()
        except OSError:
            await runner.cleanup()
            raise
        return runner

    async def _answer(self, _: web.Request) -> web.Response:
        try:
            page = await self._page()
        except Exception:
            logger.exception("the metrics page failed")
            raise
        return web.Response(body=page, headers={"Content-Type": "text/plain; version=0.0.4"})
