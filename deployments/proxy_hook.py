"""Serve's HAProxy starts with its routes: whoever waits for a node's only proxy to come back is not told 404.

Serve starts HAProxy at once and gives it routes by a reload a second later; until then every path is unknown. It also
gets a memory allocator's settings that are for it alone.
"""

import asyncio
import logging
import os
import time
from typing import Any

logger = logging.getLogger("ray.serve")

# The controller tells routes as soon as it is asked, where nothing is deployed too.
_MOST_WAIT_S, _LOOK_S = 3.0, 0.02
# What glibc gives back to the kernel it pays for again, page by page: for a retry HAProxy copies each request into a
# buffer of its own, which took 0.65 ms (DECISIONS 144). Other processes would only keep more than they need.
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(4 << 20), "MALLOC_TRIM_THRESHOLD_": str(16 << 20)}


def install() -> None:
    """Let Serve's controller start proxies of this kind."""
    try:
        import ray
        from ray.serve._private import controller, haproxy

        stock: Any = haproxy.HAProxyManager.__ray_metadata__.modified_class

        class RoutedHAProxyManager(stock):
            """Serve's manager of a node's HAProxy."""

            _haproxy_start_task: asyncio.Task[None]

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                os.environ.update(_ALLOCATOR)  # read by processes that start from now on
                super().__init__(*args, **kwargs)
                self._haproxy_start_task.cancel()
                self._haproxy_start_task = self.event_loop.create_task(self._start_with_routes())

            async def _start_with_routes(self) -> None:
                until_s = time.monotonic() + _MOST_WAIT_S
                try:
                    # What is no longer pending has been handed to HAProxy's configuration, and waits for this task.
                    while not self._received_target_groups_broadcast or self._update_pending:
                        if time.monotonic() > until_s:
                            logger.warning("no routes in %g s: HAProxy starts without them", _MOST_WAIT_S)
                            break
                        await asyncio.sleep(_LOOK_S)
                except Exception:
                    logger.exception("HAProxy starts without routes: Tandem cannot see them")
                await self._haproxy.start()

        now = controller.HAProxyManager
        if now is haproxy.HAProxyManager:
            controller.HAProxyManager = ray.remote(num_cpus=0)(RoutedHAProxyManager)
        elif now.__ray_metadata__.modified_class.__name__ != RoutedHAProxyManager.__name__:
            raise TypeError(f"Serve's controller starts proxies of another kind: {now}")
    except Exception:
        # An error here would keep Serve's controller from starting.
        logger.exception("HAProxy starts without routes: who waits for it gets 404 for a second")
