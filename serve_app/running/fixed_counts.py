"""Counts of replicas that a test sets by hand, and gives back exactly, however the test ends."""

import math
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Self, TypeVar

from autoscale.decide.config import AutoscaleConfig
from autoscale.decide.status import PlanRecord, ServiceStatus
from autoscale.headcount import EPSILON_REPLICAS, standard_of
from deployments.actors.scaling_metrics import pool_counts
from kvtransfer.topology import Role
from serve_app.checks.yaml_checks import ConfigError
from serve_app.local.cluster import DeployError
from serve_app.running.process_signals import signals_handled
from serve_app.running.ray_control import Control

# Time between two looks at the application, seconds.
_POLL_S = 1.0
# Time for which a coordinator that does not answer is asked again, seconds: Serve restarts it in about ten.
_PATIENCE_S = 60.0
# Longest wait for a plan with the old counts before the policy decides again, in decision intervals.
_PLAN_INTERVALS = 3.0


T = TypeVar("T")


class CountsTakenError(DeployError):
    """Others have changed counts that a test had set."""


class FixedCounts:
    """Sets the counts of a service. As a context manager it gives back the counts and settings from before.

    Settings that others changed meanwhile stay as they are.
    """

    def __init__(self, control: Control) -> None:
        self._control = control
        status = control.status()
        self.before: AutoscaleConfig = status.config
        self._counts_before = None if status.last is None else _whole_counts(status.last, status)
        self._set: dict[Role, int] | None = None  # counts that this object has set

    def set(self, counts: Mapping[Role, int]) -> None:
        """Set these counts; they are ready when ``is_ready`` is true."""
        before, self._set = self._set, dict(counts)  # first: if the answer is lost, the counts may be set
        try:
            self._control.scale(counts[Role.PREFILL], counts[Role.DECODE])
        except ConfigError:  # nothing was changed
            self._set = before
            raise

    def status(self) -> ServiceStatus:
        """The service's status, also if the coordinator is just restarting; raises as ``look``."""
        return _asked_again(self.look)

    def look(self) -> ServiceStatus:
        """The service's status.

        Raises:
            CountsTakenError: others have changed the counts that were set.
            DeployError: the coordinator does not answer.
        """
        status = self._control.status()
        override = status.config.override
        if self._set is not None and (status.config.is_paused or override is None or override.counts != self._set):
            by = "paused" if status.config.is_paused else "set anew" if override is not None else "given to the policy"
            self._set = None  # nothing to give back: the new settings hold
            raise CountsTakenError(f"the counts were {by} by others during the test: they stay as they are now")
        return status

    def is_ready(self, last: PlanRecord | None) -> bool:
        """Whether the replicas for the set counts serve, and no other replica is still leaving."""
        if last is None or self._set is None or not _follows(last, self._set) or last.plan.pending:
            return False
        pools = pool_counts(last).values()
        is_leaving = any(each["draining"] or each["withdrawn"] for each in pools)
        return all(each["serving"] == each["wanted"] for each in pools) and not is_leaving

    def rest(self, rest_s: float) -> None:
        """Return to the counts of before, and keep them for a time, seconds.

        After it the autoscaler has forgotten the latencies of the test, and does not act on them.
        """
        self._set_before()
        time.sleep(rest_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._set is None:
            return
        with _signals_wait():
            try:
                self._give_back()
            except (DeployError, ConfigError) as failure:
                raise DeployError(
                    f"the counts of before could not be given back ({failure}): run `{self.command_back}`"
                ) from error

    @property
    def command_back(self) -> str:
        """The command that gives the counts back by hand."""
        override, is_paused = self.before.override, self.before.is_paused
        words = ["tandem", "scale", "--resume"]
        if override is not None or is_paused:
            text = "null" if override is None else f"{{prefill: {override.prefill}, decode: {override.decode}}}"
            words = ["tandem", "tune", f"override={text}", f"is_paused={str(is_paused).lower()}"]
        return shlex.join([*words, *self._control.options])

    def _give_back(self) -> None:
        """First the counts of before, so that the policy goes on from them; then the settings of before."""
        try:
            self.status()
        except CountsTakenError:
            return
        self._set_before()
        override = None if self.before.override is None else self.before.override.model_dump(mode="json")
        changes: dict[str, Any] = {"override": override, "is_paused": self.before.is_paused}
        _asked_again(lambda: self._control.tune(changes, "the pressure test has ended"))
        self._set = None

    def _set_before(self) -> None:
        """Set the counts of before, if there were some and they are still allowed; and wait for a plan with them."""
        counts = self._counts_before
        if counts is None or not counts[Role.DECODE] or counts == self._set:
            return
        try:
            _asked_again(partial(self.set, counts))
        except ConfigError:  # the bounds were changed meanwhile: the policy goes on from the present counts
            return
        self._await_plan(counts)

    def _await_plan(self, counts: Mapping[Role, int]) -> None:
        """Wait for a plan with these counts, for some decision intervals at most; their replicas may start later."""
        deadline_s = time.monotonic() + _PLAN_INTERVALS * self.before.interval_s
        while time.monotonic() < deadline_s:
            last = _asked_again(self._control.status).last
            if last is not None and _follows(last, counts):
                return
            time.sleep(min(_POLL_S, self.before.interval_s / 2))


def _whole_counts(last: PlanRecord, status: ServiceStatus) -> dict[Role, int]:
    """The counts that should serve, as people set them: in replicas of the first group, rounded up."""
    standard = standard_of(last.plan.state.desired, status.pools.root)
    return {role: math.ceil(count - EPSILON_REPLICAS) for role, count in standard.items()}


def _follows(last: PlanRecord, counts: Mapping[Role, int]) -> bool:
    """Whether the last decision was for these counts, which were set by hand."""
    return last.plan.decision.wanted == counts


def _asked_again(ask: Callable[[], T]) -> T:
    """The answer of the coordinator, which is asked again while it restarts; raises DeployError after a minute."""
    deadline_s = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return ask()
        except CountsTakenError:
            raise
        except DeployError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(_POLL_S)


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Let signals that would end this process wait until the block has ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    with signals_handled(numbers, came.append):
        yield
    if came:
        raise SystemExit(128 + came[0])  # as a shell reports it
