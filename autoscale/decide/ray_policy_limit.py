"""Limits the time of a policy's call, in the live shell only: a simulated policy may take as long as it likes."""

import time
from concurrent.futures import Future, wait

from autoscale.decide.containment import Call, PolicyLate
from autoscale.ray_daemon import in_daemon_thread
from autoscale.types import Decision


class LimitedCalls:
    """The calls of one policy of one service: each in a daemon thread, and one at a time.

    A call that takes too long is left to itself, and its decision is dropped. While it goes on, no other begins: a
    policy need not be safe against two calls at once, and threads must not pile up.
    """

    def __init__(self) -> None:
        self._running: Future[Decision] | None = None
        self._started_s = 0.0  # monotonic

    def run(self, call: Call, limit_s: float) -> Decision:
        """The decision of a call; raises PolicyLate after ``limit_s``, or at once while an earlier call goes on."""
        if self._running is None or self._running.done():
            self._started_s = time.monotonic()
            self._running = in_daemon_thread(call, "tandem-policy")
            wait([self._running], limit_s)
        if not self._running.done():
            age_s = time.monotonic() - self._started_s
            raise PolicyLate(f"has been computing for {age_s:.1f} s, longer than {limit_s:g} s")
        if isinstance(error := self._running.exception(), KeyboardInterrupt):
            # No key was pressed: a thread gets no signals. So it is the policy's own error, and it must not end Serve.
            raise RuntimeError("KeyboardInterrupt") from error
        return self._running.result()
