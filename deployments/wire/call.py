"""One call of a replica under one deadline: the pieces of its answer, or its failure; a lost replica is reported.

A watch ends calls of replicas that no longer exist or hang, since their connections may stay open. A call is quiet if
it waits long for a piece. Then the watch checks its replica; a check without an answer is a silence.
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

from deployments.serve_seam.calls import is_answer_too_large, own_call_id
from router.ray_health import CallHealth, HealthFeed
from router.routing import Routed

logger = logging.getLogger(__name__)

# Wait for one piece, seconds, after which the replica is checked. A smaller value checks more replicas that are only
# busy, a larger one detects lost replicas later.
_QUIET_S = 5.0
_CHECK_S = 2.0  # seconds between two searches for quiet calls
# Silences in a row after which a replica counts as hanging. With one, a short stall of a healthy replica would end its
# calls.
_MOST_SILENCES = 2

Piece = TypeVar("Piece")


class CallFailure(StrEnum):
    """Why a call ended without its whole answer."""

    LOST = "lost"  # the replica no longer exists, hangs, or has ended the answer too early
    LATE = "late"  # the call's deadline has passed
    FULL = "full"  # Serve's queue for the pool is full, so no replica was chosen
    TOO_LARGE = "too_large"  # no replica can send an answer of this size in one piece


class CallError(Exception):
    """A call has ended without its whole answer; ``__cause__``: the error of Ray or gRPC, if there is one."""

    def __init__(self, failure: CallFailure, message: str, cause: Exception | None = None) -> None:
        super().__init__(message)
        self.failure = failure
        self.__cause__ = cause


class CallWatch:
    """All calls of one process to the replicas of an application; ends the calls of lost replicas."""

    def __init__(
        self,
        is_alive: Callable[[str, str], bool],
        is_stranded: Callable[[str], bool],
        *,
        quiet_s: float = _QUIET_S,
        check_s: float = _CHECK_S,
    ) -> None:
        """Begin without calls.

        Args:
            is_alive: checks a replica, given its deployment and its id. ``False``: it no longer exists. Raises
                TimeoutError: it does not answer. May block for seconds.
            is_stranded: whether a deployment has no replica while another one can answer its calls.
            quiet_s: wait for one piece, seconds, after which the replica is checked.
            check_s: seconds between two searches for quiet calls.
        """
        self._is_alive, self._is_stranded = is_alive, is_stranded
        self._quiet_s, self._check_s = quiet_s, check_s
        self.calls: set[Call[Any]] = set()  # calls that have not ended

    async def run(self) -> None:
        """Check the replicas of quiet calls, and end the calls of lost ones. Runs until it is cancelled."""
        silences: Counter[tuple[str, str]] = Counter()  # silences in a row, by deployment and replica id
        while True:
            await asyncio.sleep(self._check_s)
            quiet: dict[tuple[str, str], list[Call[Any]]] = {}  # quiet calls, by deployment and replica id
            for call in list(self.calls):
                if call.quiet_s() <= self._quiet_s:
                    continue
                if call.choice.replica_id is not None:
                    quiet.setdefault((call.pool, call.choice.replica_id), []).append(call)
                elif self._is_stranded(call.pool):  # no replica has been chosen, and the pool has none
                    call.lose()
            new_silences = await asyncio.gather(*(self._silences(*replica) for replica in quiet))
            previous, silences = silences, Counter()
            for (replica, calls), count in zip(quiet.items(), new_silences, strict=True):
                silences[replica] = previous[replica] + count if count else 0
                if silences[replica] < _MOST_SILENCES:
                    continue
                for call in calls:
                    # During the check the call may have ended, or gone to another replica.
                    if call in self.calls and call.choice.replica_id == replica[1]:
                        call.lose()

    async def _silences(self, deployment: str, replica_id: str) -> int:
        """Check a replica once. Returns the silences that it counts as.

        0: the replica answers, or it is unknown whether it does. 1: it does not answer. ``_MOST_SILENCES``: it no
        longer exists.
        """
        try:
            is_alive = await asyncio.to_thread(self._is_alive, deployment, replica_id)
        except TimeoutError:
            logger.debug("%s of %s does not answer", replica_id, deployment)
            return 1
        except Exception as error:  # the check itself has failed, so the calls still wait
            logger.debug("whether %s of %s is alive is unknown: %s", replica_id, deployment, error)
            return 0
        return 0 if is_alive else _MOST_SILENCES


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
        """``method``: the replica's method; ``is_whole``: whether a piece is the last one of a complete answer."""
        # Serve's default is cloudpickle, which takes three times as long, since it can also send code.
        self.handle = handle.options(
            method_name=method, stream=True, request_serialization="pickle", response_serialization="pickle"
        )
        self.pool = health.pool
        self.health = health
        self.watch = watch
        self.is_whole = is_whole

    def call(self, request: Routed, deadline_s: float) -> "Call[Piece]":
        """Send a request to a replica; ``deadline_s``: monotonic time at which the call ends."""
        return Call(self, request, deadline_s)


class Call(Generic[Piece]):
    """A request to one replica, and the pieces of its answer; as a context manager it ends the call.

    One timer serves all pieces: an ``asyncio.timeout`` for each piece was a tenth of an ingress replica's work.
    """

    def __init__(self, caller: PoolCaller[Piece], request: Routed, deadline_s: float) -> None:
        self.pool = caller.pool
        self.choice = request.routing.choice
        # The call itself reports lost and unreached replicas; its caller reports the rest.
        self.health = CallHealth(caller.health, request.routing)
        self.since_s = 0.0  # monotonic time at which the wait for the latest piece began
        self.has_begun = False  # a piece has come
        self.has_ended = False  # the replica has ended the answer
        self._caller = caller
        with own_call_id():
            self._stream = caller.handle.remote(request)
        self._pieces: AsyncIterator[Piece] = aiter(self._stream)
        self._last: Piece | None = None  # the latest piece
        self._failure: CallError | None = None  # what has ended the call: its deadline, or a lost replica
        self._task: asyncio.Task[object] | None = None  # the task that waits for a piece
        late = CallError(CallFailure.LATE, "the deadline has passed")
        self._timer = asyncio.get_running_loop().call_later(deadline_s - time.monotonic(), self._end, late)

    def __enter__(self) -> Self:
        self._caller.watch.calls.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        self._caller.watch.calls.remove(self)
        self.health.end()
        if not self.has_ended:
            self._stream.cancel()

    async def piece(self) -> Piece | None:
        """The next piece; ``None``: the answer is complete. Raises CallError: the rest will not come."""
        if (failure := self._failure) is not None:
            self._give_up(failure)  # returns only if the answer is complete, here and below
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
            failure = self._failure
            # One cancellation is from ``_end``; one more means that the client has disconnected at the same time.
            if failure is None or task.cancelling() > cancelling + 1:
                raise
            self._give_up(failure)
            return None
        except Exception as error:
            self._give_up(_call_error(error))
            return None
        finally:
            self._task = None
            if self._failure is not None:
                task.uncancel()  # takes back the cancellation by ``_end``
        if not self.has_begun:
            self.has_begun = True
            self.health.report_unreached()  # replicas that Serve tried before this one
        return piece

    def quiet_s(self) -> float:
        """Time that the caller has waited for this piece, seconds; 0 while it does not wait."""
        return 0.0 if self._task is None else time.monotonic() - self.since_s

    def lose(self) -> None:
        """End the wait for a piece, since the replica is lost; without a wait nothing happens."""
        if self._task is not None:
            self._end(CallError(CallFailure.LOST, "its replica is gone or hangs"))

    def _end(self, failure: CallError) -> None:
        """End the call with its first failure, and wake the task that waits for a piece."""
        if self._failure is None:
            self._failure = failure
            if self._task is not None:
                self._task.cancel()

    def _give_up(self, failure: CallError) -> None:
        """Return if the answer is complete nevertheless. Otherwise raise the failure, and report a lost replica."""
        if self._last is not None and self._caller.is_whole(self._last):
            return
        if failure.failure is CallFailure.LOST:
            self.health.report_failure()
        raise failure


def _call_error(error: Exception) -> CallError:
    """The failure of a call after an error of Serve, Ray or gRPC."""
    if isinstance(error, TimeoutError):
        return CallError(CallFailure.LATE, str(error), error)
    if isinstance(error, BackPressureError):
        return CallError(CallFailure.FULL, error.message, error)
    failure = CallFailure.TOO_LARGE if is_answer_too_large(error) else CallFailure.LOST
    return CallError(failure, f"{type(error).__name__}: {error}", error)
