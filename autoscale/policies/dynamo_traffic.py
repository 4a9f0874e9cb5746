"""The traffic as Dynamo's planners see it: means over an adjustment interval, and those forecast for the next (pure).

Source: ``planner_core.py`` (observe_metrics, predict_load) of Dynamo 0.4 to 1.0, and ``BuiltinLoadPredict`` of
ai-dynamo 1.6.1: requests, input and output lengths are forecast each by itself, one interval ahead.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from autoscale.forecast import ForecastConfig
from autoscale.policies.independent import Memory, mean, summed
from autoscale.types import Snapshot

# Intervals that forecasts are made from: load_prediction_window_size of Dynamo up to 1.0.
_MOST_INTERVALS = 50
_SUMS = ("requests_per_s", "prompt_tokens_per_s", "output_tokens")
_HISTORY = ("past_at_s", "past_requests_per_s", "past_input_tokens", "past_output_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What arrives in an interval: requests, and their mean lengths (num_req / interval, ISL, OSL)."""

    requests_per_s: float
    input_tokens: float
    output_tokens: float

    @property
    def context_tokens(self) -> float:
        """Mean KV of a request while it is decoded: ISL + OSL / 2."""
        return self.input_tokens + self.output_tokens / 2


def taken_in(snapshot: Snapshot, memory: Memory) -> dict[str, tuple[float, ...]]:
    """The interval's sums with this tick's traffic; where that is not whole, without it."""
    traffic = snapshot.traffic
    rate = traffic.requests_per_s if traffic.is_whole else None
    prompts = None if rate is None else rate * (traffic.input_tokens_mean or 0.0)
    values = (rate, prompts, traffic.output_tokens_mean)
    return summed(memory, dict(zip(_SUMS, values, strict=True)))


def next_demand(
    memory: Mapping[str, tuple[float, ...]], now_s: float, interval_s: float, forecast: ForecastConfig
) -> tuple[Demand | None, dict[str, tuple[float, ...]]]:
    """What the interval that begins will bring, once the one that ends is in the history.

    Args:
        memory: the sums of the interval that ends, and those before.
        now_s: where it ends.
        interval_s: how long the next one lasts.
        forecast: of each series.

    Returns:
        ``None`` before the first request and where nothing was observed; and the series for the next interval.
    """
    kept = {name: series for name, series in memory.items() if name not in _SUMS}
    rate, prompts, outputs = (mean(memory, name) for name in _SUMS)
    last_input, last_output = (memory[name][-1] if memory.get(name) else None for name in _HISTORY[2:])
    # Nobody's length is none: an idle interval carries the last one on.
    inputs = prompts / rate if rate and prompts is not None else last_input
    outputs = last_output if outputs is None else outputs
    if rate is None or inputs is None or outputs is None:
        return None, kept
    point = (now_s, rate, inputs, outputs)
    past = [[*memory.get(name, ()), value][-_MOST_INTERVALS:] for name, value in zip(_HISTORY, point, strict=True)]
    times = past[0]
    if len(times) > 1 and times[-1] <= times[-2]:  # the clock was set back
        past = [[value] for value in point]
    kept |= {name: tuple(series) for name, series in zip(_HISTORY, past, strict=True)}
    times, *series_of = past
    ahead = [forecast.ahead(times, series, interval_s) for series in series_of]
    return Demand(requests_per_s=ahead[0], input_tokens=ahead[1], output_tokens=ahead[2]), kept
