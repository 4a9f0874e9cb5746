"""Forecasts in a process of their own: they come later, a tick never waits, and a dead or slow process is replaced."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from autoscale.decide.config import AutoscaleConfig
from autoscale.forecast.forecaster import FitTask
from autoscale.forecast.series import Forecast
from autoscale.load_forecast import LoadForecast
from autoscale.ray_forecasts import Forecasts
from autoscale.types import Snapshot, Traffic

CHAT = Traffic(requests_per_s=3.0, input_tokens_mean=50.0, output_tokens_mean=10.0)
MakeSnapshot = Callable[..., Snapshot]


class Services:
    """Forecasts of services, shown one step after the other; each step has another rate."""

    def __init__(self, make_snapshot: MakeSnapshot, config: AutoscaleConfig) -> None:
        self.complaints: list[str] = []
        self.forecasts = Forecasts(lambda error, cause: self.complaints.append(f"{cause}: {error}"))
        self.config = config
        self._make = make_snapshot
        self.now_s = 1000.0

    def tick(self, passed_s: float = 60.0, *, name: str = "m", clock_s: float | None = None, **changes: Any) -> Any:
        self.now_s += passed_s
        traffic = replace(CHAT, requests_per_s=3.0 + self.now_s % 7.0)
        snapshot = self._make(1, 1, now_s=self.now_s, traffic=traffic, **changes)
        return self.forecasts.observe(name, self.config, snapshot, time.monotonic() if clock_s is None else clock_s)

    def awaited(self, issued_s: float, name: str = "m") -> LoadForecast:
        """The forecast of the step that ended then, once it has come."""
        deadline_s = time.monotonic() + 300.0
        while (forecast := self.tick(0.0, name=name)) is None or forecast.issued_s != issued_s:
            assert time.monotonic() < deadline_s, self.complaints
            time.sleep(0.01)
        return forecast


@pytest.fixture
def services(make_snapshot: MakeSnapshot, make_autoscale: Callable[..., AutoscaleConfig]) -> Iterator[Services]:
    services = Services(make_snapshot, make_autoscale(forecast={"step_s": 60.0}))
    yield services
    services.forecasts.end()


def test_a_forecast_comes_from_another_process_and_its_state_is_to_be_stored(services: Services) -> None:
    assert [services.tick() for _ in range(2)] == [None, None]
    services.awaited(1020.0 + 60.0)
    for _ in range(4):
        services.tick()
    assert services.awaited(1320.0).requests_per_s.model.startswith("ARIMA")
    (state,) = services.forecasts.take_changed().values()
    assert [point.at_s for point in state.history.points][-1] == 1320.0
    assert services.forecasts.take_changed() == {}
    again = Services(services._make, services.config)
    again.forecasts.resume({"m": state})
    again.now_s = services.now_s
    assert again.tick(0.0) == state.forecast


def test_a_policy_without_forecasts_starts_no_process(
    make_snapshot: MakeSnapshot, make_autoscale: Callable[..., AutoscaleConfig]
) -> None:
    services = Services(make_snapshot, make_autoscale())
    assert [services.tick() for _ in range(3)] == [None] * 3
    assert not services.forecasts._process.is_running


def test_the_process_ends_with_the_last_service_that_is_forecast_and_its_history_stays(services: Services) -> None:
    services.tick(), services.tick()
    services.awaited(1080.0)
    process = services.forecasts._process._process
    assert process is not None
    config = services.config
    services.config = config.model_copy(update={"forecast": None})
    assert services.tick() is None
    assert process.poll() is not None
    services.config = config  # and back: the history goes on
    services.tick(60.0)
    assert services.complaints == []
    assert len(services.forecasts._forecasters["m"].state.history.points) >= 2


def test_a_process_that_dies_is_named_and_the_next_step_has_a_new_one(services: Services) -> None:
    services.tick(), services.tick()
    services.awaited(1080.0)
    process = services.forecasts._process._process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)  # so that it is killed in the middle of a fit
    services.tick()
    os.kill(process.pid, signal.SIGKILL)
    failed = services.awaited(1140.0).requests_per_s
    assert failed.fallback is not None
    assert failed.fallback.startswith("the forecast failed: ")
    assert failed.value == failed.last
    assert len(services.complaints) == 1
    services.tick()
    assert services.awaited(1200.0).requests_per_s.fallback != failed.fallback


def test_an_answer_that_cannot_be_read_is_not_followed_by_an_older_one(services: Services) -> None:
    noisy = """
import json
print("ready", flush=True)
print("a line of a library", flush=True)
for number in range(9):
    input()
    print(json.dumps([{"value": number}] * 3), flush=True)
"""
    process = services.forecasts._process
    process._process = subprocess.Popen(
        [sys.executable, "-c", noisy], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    services.tick(), services.tick()
    failed = services.awaited(1080.0).requests_per_s
    assert failed.fallback is not None and "validation error" in failed.fallback
    assert not process.is_running  # the next task has a new one, not the answer to this task


def test_a_fit_that_takes_too_long_is_ended(services: Services) -> None:
    services.tick(), services.tick()
    services.awaited(1080.0)
    process = services.forecasts._process._process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    began_s = time.monotonic()
    services.tick(clock_s=began_s)
    assert services.tick(0.0, clock_s=began_s + 3.9).issued_s == 1080.0
    late = services.tick(0.0, clock_s=began_s + 4.1).requests_per_s
    assert late.fallback == "the forecast failed: a forecast took longer than 4 s"
    assert process.poll() is not None


def test_services_take_turns_and_only_the_newest_task_of_each_is_fitted(services: Services) -> None:
    process = Unanswered()
    services.forecasts._process = process  # type: ignore[assignment]
    for name in ("a", "b"):
        services.tick(name=name)
    for name in ("a", "b", "b", "a"):
        services.tick(name=name)
    assert len(process.tasks) == 1
    for _ in range(3):
        process.answer()
        services.tick(0.0, name="a")
    ends = [task.points[-1].at_s for task in process.tasks]
    assert len(ends) == 3  # a's first, b's second and not its first, a's second
    assert ends[1] > ends[0]


class Unanswered:
    """A process that answers when the test wants."""

    is_running = True

    def __init__(self) -> None:
        self.tasks: list[FitTask] = []
        self._future: Future[tuple[Forecast, ...]] = Future()

    def submit(self, task: FitTask) -> Future[tuple[Forecast, ...]]:
        self.tasks.append(task)
        self._future = Future()
        return self._future

    def answer(self) -> None:
        """Answer the last task."""
        if not self._future.done():
            self._future.set_result((Forecast(value=1.0),) * 3)

    def end(self) -> None:
        """Nothing runs."""


def test_a_snapshot_while_replicas_are_not_known_yet_is_no_observation(services: Services) -> None:
    services.tick(is_recovering=True)
    services.tick()
    services.tick()
    forecaster = services.forecasts._forecasters["m"]
    assert [point.at_s for point in forecaster.state.history.points] == [1140.0]
