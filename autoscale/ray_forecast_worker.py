"""The process that fits forecasting models: ``python -m autoscale.ray_forecast_worker``, started by ``ray_forecasts``.

It reads a task from each line of its input, and writes the forecasts as one line. It ends with its input, so with the
process that started it.
"""

import os
import sys
import time
from typing import TextIO

from pydantic import TypeAdapter

from autoscale.forecast.forecaster import FitTask, fit
from autoscale.forecast.series import Forecast

TASK = TypeAdapter(FitTask)
FORECASTS = TypeAdapter(tuple[Forecast, ...])
# The first line that the process writes, once it can take tasks.
READY = "ready"
# By how much the process gives way to others: replicas and Serve's controller must not wait for a forecast.
_NICENESS = 10


def serve(tasks: TextIO, answers: TextIO) -> None:
    """Answer tasks until the input ends."""
    from statsmodels.tsa.arima.model import ARIMA  # noqa: F401 (its import takes a second, which no task shall pay)

    print(READY, file=answers, flush=True)
    for line in tasks:
        task = TASK.validate_json(line)
        until_s = time.monotonic() + task.config.budget_s
        forecasts = fit(task, lambda until_s=until_s: time.monotonic() < until_s)  # type: ignore[misc]
        print(FORECASTS.dump_json(forecasts).decode(), file=answers, flush=True)


if __name__ == "__main__":
    os.nice(_NICENESS)
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever a library prints is no answer
    serve(sys.stdin, answers)
