"""One call of a replica under one deadline: its answer, its failure, and what it shows of the replica's health.

A watch ends calls of replicas that no longer exist or stand still: neither closes a connection.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from enum import StrEnum
from typing import Any, Generic, Self, TypeVar

from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentHandle

from deployments.serve_seam.calls import is_answer_too_large
from router.ray_health import CallHealth, HealthFeed
from router.routing import Routed

logger = logging.getLogger(__name__)

# Wait for one piece, seconds, after which the replica is asked whether it lives. A smaller value asks more replicas
# that are only busy, a larger one finds lost replicas later.
_QUIET_S = 5.0
# Seconds between two searches for calls that wait for that long.
_EVERY_S = 2.0
# Questions in a row that a replica leaves unanswered until it counts as standing still. With one, a short stall of a
# healthy replica would end its calls.
_SILENCES = 2

Piece = TypeVar("Piece")


class CallFailure(StrEnum):
    """Why a call ended without its whole answer."""

    LOST = "lost"  # its replica is gone, stands still or broke off
    LATE = "late"  # its deadline has passed
    FULL = "full"  # Serve's queue for the pool is full, so no replica was chosen
    TOO_LARGE = "too_large"  # no replica can send an answer of this size in one piece


class CallError(Exception):
    """A call has ended without its whole answer; ``__cause__`` is the error of Ray or gRPC, if there was one."""

    def __init__(self, failure: CallFailure, message: str, cause: Exception | None = None) -> None:
        super().__init__(message)
        self.failure = failure
        self.__cause__ = cause


class CallWatch:
    """All calls by one process of replicas of an application."""

    def __init__(
        self,
        is_alive: Callable[[str, str], bool],
        is_stranded: Callable[[str], bool],
        *,
        quiet_s: float = _QUIET_S,
        every_s: float = _EVERY_S,
    ) -> None:
        """A watch without calls.

        Args:
            is_alive: asks a replica (its deployment, its id) something. ``False``: it no longer exists. Raises
                TimeoutError: it does not answer. May block for seconds.
            is_stranded: whether a deployment has no replica while something else can answer its calls.
            quiet_s: wait for one piece after which the replica is asked.
            every_s: time between two searches for such calls.
        """
        self._is_alive, self._is_stranded = is_alive, is_stranded
        self._quiet_s, self._every_s = quiet_s, every_s
        self._calls: set[Call[Any]] = set()

    def add(self, call: "Call[Any]") -> None:
        """Watch a call until ``remove``."""
        self._calls.add(call)

    def remove(self, call: "Call[Any]") -> None:
        """Stop watching a call: it has ended."""
        self._calls.discard(call)

    async def run(self) -> None:
        """Ask the replicas of calls that wait for long, and end the calls of lost ones. Runs until it is cancelled."""
        silences: Counter[tuple[str, str]] = Counter()
        while True:
            await asyncio.sleep(self._every_s)
            quiet: dict[tuple[str, str], list[Call[Any]]] = {}
            for call in list(self._calls):
                if call.quiet_s() <= self._quiet_s:
                    continue
                if call.choice.replica_id is not None:
                    quiet.setdefault((call.pool, call.choice.replica_id), []).append(call)
                elif self._is_stranded(call.pool):
                    call.lose()
            new_silences = await asyncio.gather(*(self._silences(*replica) for replica in quiet))
            previous, silences = silences, Counter()
            for (replica, calls), count in zip(quiet.items(), new_silences, strict=True):
                silences[replica] = previous[replica] + count if count else 0
                for call in calls if silences[replica] >= _SILENCES else ():
                    if call in self._calls and call.choice.replica_id == replica[1]:
                        call.lose()

    async def _silences(self, deployment: str, replica_id: str) -> int:
        """Ask a replica once. Returns its silences: 1 without an answer, ``_SILENCES`` if it is gone, else 0."""
        try:
            is_alive = await asyncio.to_thread(self._is_alive, deployment, replica_id)
        except TimeoutError:
            logger.debug("%s of %s does not answer", replica_id, deployment)
            return 1
        except Exception as error:  # whether the replica lives is unknown, so its calls go on waiting
            logger.debug("whether %s of %s is alive is unknown: %s", replica_id, deployment, error)
            return 0
        return 0 if is_alive else _SILENCES


class PoolCaller(Generic[Piece]):
    """Calls one method of the replicas of one pool, for one process."""

    def __init__(
        self,
        handle: DeploymentHandle,
        method: str,
        *,
        health: HealthFeed,
        watch: CallWatch,
        is_whole: Callable[[Piece], bool],
    ) -> None:
        """``method``: the replica's method; ``is_whole``: whether an answer is complete once this piece has come."""
        # Serve's default, cloudpickle, can also send code, and takes three times as long.
        self.handle = handle.options(
            method_name=method, stream=True, request_serialization="pickle", response_serialization="pickle"
        )
        self.pool = health.pool
        self.health = health
        self.watch = watch
        self.is_whole = is_whole

    def call(self, request: Routed, deadline_s: float) -> "Call[Piece]":
        """Send a request to a replica; ``deadline_s``: monotonic time at which the whole call ends."""
        return Call(self, request, deadline_s)


class Call(Generic[Piece]):
    """A request on its way to one replica, and the pieces of its answer; a context that ends the call.

    One timer serves all pieces: one ``asyncio.timeout`` for each piece was a tenth of an ingress replica's work.
    """

    def __init__(self, caller: PoolCaller[Piece], request: Routed, deadline_s: float) -> None:
        self.pool = caller.pool
        self.choice = request.routing.choice
        # For the caller's reports; the call itself reports a lost replica.
        self.health = CallHealth(caller.health, request.routing)
        self.since_s = 0.0  # when the wait for the latest piece began, monotonic
        self.has_begun = False  # a piece has come
        self.has_ended = False  # the answer came to its end by itself
        self._caller = caller
        self._stream = caller.handle.remote(request)
        self._pieces: AsyncIterator[Piece] = aiter(self._stream)
        self._last: Piece | None = None  # the latest piece
        self._failure: CallError | None = None  # the deadline has passed, or the replica is gone
        self._task: asyncio.Task[object] | None = None  # the task that waits for a piece
        late = CallError(CallFailure.LATE, "the deadline has passed")
        self._timer = asyncio.get_running_loop().call_later(deadline_s - time.monotonic(), self._end, late)

    def __enter__(self) -> Self:
        self._caller.watch.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._caller.watch.remove(self)
        self.health.ended()
        if not self.has_ended:
            self._stream.cancel()

    async def piece(self) -> Piece | None:
        """The next piece; ``None``: the answer is complete. Raises CallError: the rest will not come."""
        if (failure := self._failure_now()) is not None:
            self._give_up(failure)
            return None
        task = self._task = asyncio.current_task()
        assert task is not None
        cancelling = task.cancelling()
        self.since_s = time.monotonic()
        try:
            piece = self._last = await anext(self._pieces)
        except StopAsyncIteration:
            self.has_ended = True
            self._give_up(CallError(CallFailure.LOST, "it broke off"))
            return None
        except asyncio.CancelledError:
            failure = self._failure_now()
            # One cancellation comes from ``_end``; one more means that the client has disconnected at the same time.
            if failure is None or task.cancelling() > cancelling + 1:
                raise
            self._give_up(failure)
            return None
        except Exception as error:
            self._give_up(_call_error(error))
            return None
        finally:
            self._task = None
            if self._failure_now() is not None:
                task.uncancel()
        if not self.has_begun:
            self.has_begun = True
            self.health.unreached()
        return piece

    def quiet_s(self) -> float:
        """Seconds that the wait for this piece has lasted; 0 while the caller does not wait."""
        return 0.0 if self._task is None else time.monotonic() - self.since_s

    def lose(self) -> None:
        """End the wait: the replica is gone."""
        if self._task is not None:
            self._end(CallError(CallFailure.LOST, "its replica is gone or stands still"))

    def _failure_now(self) -> CallError | None:
        """The failure that ends the call; a method, since it may appear during every wait."""
        return self._failure

    def _end(self, failure: CallError) -> None:
        """End the call with its first failure, and wake the task that waits for a piece."""
        if self._failure is None:
            self._failure = failure
            if self._task is not None:
                self._task.cancel()

    def _give_up(self, failure: CallError) -> None:
        """Return if the answer is complete all the same; otherwise report a lost replica and raise the failure."""
        if self._last is not None and self._caller.is_whole(self._last):
            return
        if failure.failure is CallFailure.LOST:
            self.health.failed()
        raise failure


def _call_error(error: Exception) -> CallError:
    """The failure of a call that an error of Serve, Ray or gRPC has ended."""
    if isinstance(error, TimeoutError):
        return CallError(CallFailure.LATE, str(error), error)
    if isinstance(error, BackPressureError):
        return CallError(CallFailure.FULL, error.message, error)
    failure = CallFailure.TOO_LARGE if is_answer_too_large(error) else CallFailure.LOST
    return CallError(failure, f"{type(error).__name__}: {error}", error)
