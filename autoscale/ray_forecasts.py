"""The forecasts of all services of an application, live: models are fitted in a process of their own.

A tick never waits for a fit. It takes the results that have come, and leaves new tasks. A fit is in another process,
since it computes for up to a second, and Serve's controller would answer late.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass

from autoscale.decide.config import AutoscaleConfig
from autoscale.decide.forecasting import forecaster_of, start_ahead_s
from autoscale.forecast.forecaster import FitTask, Forecaster, ForecastState
from autoscale.forecast.series import Forecast
from autoscale.load_forecast import LoadForecast
from autoscale.ray_daemon import in_daemon_thread
from autoscale.ray_forecast_worker import FORECASTS, READY, TASK
from autoscale.types import Snapshot, Traffic

# A fit that takes longer than this multiple of its budget is ended. The budget is looked at between two orders.
_PATIENCE = 5.0
# Time for the start of the process, seconds: it imports statsmodels, which takes a minute on a very busy machine.
_START_S = 120.0
# With more threads, tiny systems of equations wait for cores.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class FitProcess:
    """A process that fits models, one task at a time. It starts with the first task, and again if it has ended."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    @property
    def is_running(self) -> bool:
        """Whether the process has started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def submit(self, task: FitTask) -> Future[tuple[Forecast, ...]]:
        """Begin a fit; the future has an error if the process ends before its answer."""
        return in_daemon_thread(lambda: self._ask(task), "tandem-forecast")

    def end(self) -> None:
        """End the process, and the fit that it is making."""
        process, self._process = self._process, None
        if process is not None:
            _end(process)

    def _ask(self, task: FitTask) -> tuple[Forecast, ...]:
        process = self._process
        if process is None or process.poll() is not None:
            process = self._process = _started()
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):  # it has ended, and then it has no answer either
            process.stdin.write(TASK.dump_json(task).decode() + "\n")
            process.stdin.flush()
        while (line := process.stdout.readline()) == READY + "\n":
            pass
        if not line:
            _end(process)
            raise RuntimeError(f"the process that fits forecasts has ended with exit code {process.returncode}")
        try:
            return FORECASTS.validate_json(line)
        except ValueError:  # it is no answer, so the answer may still come, and the next task would get it
            _end(process)
            raise


def _started() -> subprocess.Popen[str]:
    """A new process with this process's import paths."""
    return subprocess.Popen(
        [sys.executable, "-m", "autoscale.ray_forecast_worker"],
        env={**os.environ, **_ONE_THREAD, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _end(process: subprocess.Popen[str]) -> None:
    """End a process and close its pipes; it may have ended before."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        assert pipe is not None
        with suppress(OSError):  # what was written and not read
            pipe.close()


@dataclass(frozen=True, slots=True)
class _Running:
    """The fit that goes on: whose it is, and when it is given up (monotonic time)."""

    service: str
    forecaster: Forecaster
    task: FitTask
    future: Future[tuple[Forecast, ...]]
    until_s: float


class Forecasts:
    """The forecasters of the services, and the fits that they wait for, in the order of the tasks."""

    def __init__(self, complain: Callable[[BaseException, str | None], None]) -> None:
        """``complain``: logs an error, once for each cause (a text)."""
        self._complain = complain
        self._process = FitProcess()
        self._stored: dict[str, ForecastState] = {}
        self._forecasters: dict[str, Forecaster] = {}
        self._waiting: dict[str, FitTask] = {}  # by service; a newer task replaces an older one
        self._running: _Running | None = None
        self._changed: dict[str, ForecastState] = {}

    def resume(self, states: Mapping[str, ForecastState]) -> None:
        """Go on with the states of an earlier process; call it before the first tick."""
        self._stored = dict(states)

    def observe(self, name: str, config: AutoscaleConfig, snapshot: Snapshot, clock_s: float) -> LoadForecast | None:
        """The newest forecast of a service, after it was shown a snapshot; ``None``: there is none.

        ``clock_s``: monotonic time.
        """
        forecaster = self._forecaster(name, config)
        if forecaster is None:
            return None
        self._poll(clock_s)
        # A process that has just started does not know all replicas yet, so it does not see all requests.
        traffic = Traffic() if snapshot.is_recovering else snapshot.traffic
        task = forecaster.observe(traffic, snapshot.now_s, start_ahead_s(config, snapshot.state))
        if task is not None:
            self._waiting[name] = task
        if self._running is None and self._waiting:
            self._begin(clock_s)
        return forecaster.forecast(snapshot.now_s)

    def take_changed(self) -> dict[str, ForecastState]:
        """The states that have changed since the last call, to be stored."""
        changed, self._changed = self._changed, {}
        return changed

    def end(self) -> None:
        """End the process that fits, and drop its tasks."""
        self._running = None
        self._waiting.clear()
        self._process.end()

    def _forecaster(self, name: str, config: AutoscaleConfig) -> Forecaster | None:
        """The forecaster of a service; a changed configuration gets a new one, with the state of the old one."""
        before = self._forecasters.get(name)
        wanted = forecaster_of(config)
        if wanted is None:
            if before is not None:  # another policy may be tried for a while
                self._stored[name] = self._forecasters.pop(name).state
            if not self._forecasters:  # the process holds 200 MB of memory
                self.end()
            return None
        if before is not None and (before.config, before.tpot_s) == (wanted.config, wanted.tpot_s):
            return before
        state = self._stored.pop(name, None) if before is None else before.state
        if state is not None:
            wanted.resume(state)
        self._forecasters[name] = wanted
        return wanted

    def _begin(self, clock_s: float) -> None:
        """Begin the fit that has waited longest."""
        name = next(iter(self._waiting))
        task, forecaster = self._waiting.pop(name), self._forecasters.get(name)
        if forecaster is None:
            return
        until_s = clock_s + _PATIENCE * task.config.budget_s + (0.0 if self._process.is_running else _START_S)
        self._running = _Running(name, forecaster, task, self._process.submit(task), until_s)

    def _poll(self, clock_s: float) -> None:
        """Take the result of the running fit, or end it if it is late."""
        running = self._running
        if running is None or (not running.future.done() and clock_s < running.until_s):
            return
        self._running = None
        if not running.future.done():
            self._process.end()
            limit_s = _PATIENCE * running.task.config.budget_s
            error: BaseException | None = TimeoutError(f"a forecast took longer than {limit_s:g} s")
        else:
            error = running.future.exception()
        if error is None:
            running.forecaster.take(running.task, running.future.result())
        else:
            self._complain(error, f"forecast of {running.service}: {type(error).__name__}")
            running.forecaster.give_up(running.task, f"the forecast failed: {error}")
        if self._forecasters.get(running.service) is running.forecaster:
            self._changed[running.service] = running.forecaster.state
