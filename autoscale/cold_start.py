"""What a seldom asked model costs a day: always on, from zero, or from a warm pool (pure).

The queue-depth chapter's Exercise 23.4.3 for any numbers. Calls come at random, one replica serves them, and it goes
again after each burst of calls; whoever finds it gone waits for it to start.
"""

import math
from dataclasses import dataclass

_HOURS_PER_DAY, _S_PER_HOUR = 24.0, 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to keep a model.

    Attributes:
        name: of it.
        cost_per_day: in the currency of what was given.
        wait_s: that a call waits when nobody serves yet.
        is_in_time: whether such a call still meets its deadline.
    """

    name: str
    cost_per_day: float
    wait_s: float
    is_in_time: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """All ways, and what they rest on.

    Attributes:
        options: in the order always on, from zero, from a warm pool.
        choice: the cheapest that is in time; ``None``: none is.
        calls_in_system: by Little's law, with the cold start: below 1 one replica suffices.
        always_on_from_per_hour: calls per hour from which always on is the cheapest that is in time; ``None`` where
            that is more than one replica serves.
    """

    options: tuple[Option, ...]
    choice: Option | None
    calls_in_system: float
    always_on_from_per_hour: float | None


def cold_start_budget(
    *,
    calls_per_hour: float,
    call_s: float,
    deadline_s: float,
    replica_cost_per_hour: float,
    cold_start_s: float,
    warm_start_s: float,
    pool_cost_per_hour: float,
    idle_s: float = 0.0,
) -> Budget:
    """Compare the three.

    Args:
        calls_per_hour: on average, at random.
        call_s: one call on a replica that is ready.
        deadline_s: from a call to its answer.
        replica_cost_per_hour: while it starts, serves or is kept.
        cold_start_s: from nothing to ready.
        warm_start_s: from the warm pool to ready.
        pool_cost_per_hour: this model's part of the pool.
        idle_s: how long a replica stays after its last call.

    Raises:
        ValueError: a number that is none, or negative.
    """
    given = locals()
    for name, value in given.items():
        if not (math.isfinite(value) and value >= 0.0):
            raise ValueError(f"{name} is {value!r}: give a number of at least 0")

    def cost_per_day(start_s: float, standing: float) -> float:
        per_hour = _cost_per_hour(calls_per_hour, call_s, start_s, idle_s, replica_cost_per_hour)
        return _HOURS_PER_DAY * (standing + per_hour)

    always = Option(
        name="always on",
        cost_per_day=_HOURS_PER_DAY * replica_cost_per_hour,
        wait_s=0.0,
        is_in_time=call_s <= deadline_s,
    )
    starts = (("from zero", cold_start_s, 0.0), ("from a warm pool", warm_start_s, pool_cost_per_hour))
    others = [
        Option(
            name=name,
            cost_per_day=cost_per_day(start_s, standing),
            wait_s=start_s,
            is_in_time=start_s + call_s <= deadline_s,
        )
        for name, start_s, standing in starts
    ]
    options = (always, *others)
    choice = min((one for one in options if one.is_in_time), key=lambda one: one.cost_per_day, default=None)
    return Budget(
        options=options,
        choice=choice,
        calls_in_system=calls_per_hour / _S_PER_HOUR * (cold_start_s + call_s),  # Little's law: L = lambda W
        always_on_from_per_hour=_break_even(
            [(start_s, standing) for (_, start_s, standing), one in zip(starts, others, strict=True) if one.is_in_time],
            call_s,
            idle_s,
            replica_cost_per_hour,
        ),
    )


def _cost_per_hour(calls_per_hour: float, call_s: float, start_s: float, idle_s: float, price: float) -> float:
    """Of a replica that comes for calls and goes ``idle_s`` after the last one.

    It is there for a share of time that follows from when calls find nobody: each such one begins a start and a stay
    that goes on while the next call comes within ``idle_s`` (a busy period of M/G/infinity, ``call_s + idle_s`` each).
    """
    rate = calls_per_hour / _S_PER_HOUR
    if rate == 0.0:
        return 0.0
    stay_s = math.expm1(min(700.0, rate * (call_s + idle_s))) / rate if call_s + idle_s else 0.0
    here_s = start_s + stay_s
    return price * here_s / (here_s + 1.0 / rate)


def _break_even(starts: list[tuple[float, float]], call_s: float, idle_s: float, price: float) -> float | None:
    """Calls per hour from which the cheapest of these costs as much as always on; 0 where there are none."""

    def cheapest(calls_per_hour: float) -> float:
        costs = (_cost_per_hour(calls_per_hour, call_s, start_s, idle_s, price) for start_s, _ in starts)
        return min(standing + cost for (_, standing), cost in zip(starts, costs, strict=True))

    if not starts:
        return 0.0
    low, high = 0.0, _S_PER_HOUR / call_s if call_s else 1e9
    if cheapest(high) < price:
        return None
    for _ in range(100):
        middle = (low + high) / 2.0
        low, high = (middle, high) if cheapest(middle) < price else (low, middle)
    return low
