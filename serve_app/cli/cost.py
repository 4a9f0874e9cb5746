"""What a seldom asked model costs in a day: always on, from zero, or from a warm pool.

Source: the queue-depth chapter, Exercise 23.4.3, for any numbers. Calls come at random, and one replica serves them. It
stops after each burst of calls; a call that finds no replica waits for a start.
"""

import math
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.table import Table

from serve_app.checks.yaml_checks import config_errors
from serve_app.cli.terminal import console

commands = typer.Typer()

_HOURS_PER_DAY, _S_PER_HOUR = 24.0, 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to keep a model available.

    ``cost_per_day``: in the currency of the given prices. ``wait_s``: time that a call waits if no replica runs.
    ``is_in_time``: whether such a call meets its deadline.
    """

    name: str
    cost_per_day: float
    wait_s: float
    is_in_time: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """All ways, in the order always on, from zero, from a warm pool.

    ``calls_in_system``: by Little's law, with the cold start: below 1 one replica suffices.
    ``always_on_from_per_hour``: calls per hour from which always on is the cheapest way in time; ``None``: that is more
    than one replica can serve.
    """

    options: tuple[Option, ...]
    calls_in_system: float
    always_on_from_per_hour: float | None

    @property
    def choice(self) -> Option | None:
        """The cheapest way that is in time; ``None``: no way is."""
        return min((one for one in self.options if one.is_in_time), key=lambda one: one.cost_per_day, default=None)


@commands.command()
@config_errors()
def cost(
    calls_per_hour: Annotated[float, typer.Option(help="On average; they come at random.")],
    call_s: Annotated[float, typer.Option(help="One call on a replica that is ready.")],
    deadline_s: Annotated[float, typer.Option(help="From a call to its answer.")],
    replica_cost_per_hour: Annotated[float, typer.Option(help="While it starts, serves or is kept.")],
    cold_start_s: Annotated[float, typer.Option(help="From nothing to ready.")],
    warm_start_s: Annotated[float, typer.Option(help="From the warm pool to ready.")],
    pool_cost_per_hour: Annotated[float, typer.Option(help="This model's part of the warm pool.")],
    idle_s: Annotated[float, typer.Option(help="How long a replica stays after its last call.")] = 0.0,
) -> None:
    """Show the daily cost of a rarely used model, and the cheapest way to meet its deadline."""
    budget = cold_start_budget(**locals())
    table = Table(box=None, pad_edge=False)
    for column in ("", "cost per day", "a call without a replica waits", "in time"):
        table.add_column(column, justify="right" if column else "left")
    for option in budget.options:
        figures = f"{option.cost_per_day:.2f}", f"{option.wait_s:g} s", "yes" if option.is_in_time else "no"
        table.add_row(option.name, *figures, style="bold" if option is budget.choice else "")
    console.print(table)
    enough = "one replica suffices" if budget.calls_in_system < 1.0 else "one replica does not suffice"
    lines = [f"{budget.calls_in_system:.3g} calls are in the system on average (Little's law): {enough}"]
    if budget.choice is None:
        lines.append(f"no way meets a deadline of {deadline_s:g} s: a call alone takes {call_s:g} s")
    else:
        lines.append(f"choose {budget.choice.name}")
        if wait_s := budget.choice.wait_s:
            lines.append(f"that holds while the deadline is at least {wait_s + call_s:g} s")
        if (from_per_hour := budget.always_on_from_per_hour) is None:
            lines.append("and always on is never cheaper, as long as one replica suffices")
        else:
            lines.append(f"and always on is cheapest from {from_per_hour:.3g} calls per hour on")
    console.print("\n".join(lines), highlight=False)
    if budget.choice is None:
        raise typer.Exit(1)


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
    """Compare the three ways; the arguments are the options of ``tandem cost``.

    Raises:
        ValueError: a number is negative or not finite.
    """
    for name, value in locals().copy().items():
        if not (math.isfinite(value) and value >= 0.0):
            raise ValueError(f"{name} is {value!r}: give a number of at least 0")

    # Name, start that a call waits for, cost at all times, cost from a start to a stop.
    ways = (
        ("always on", 0.0, replica_cost_per_hour, 0.0),
        ("from zero", cold_start_s, 0.0, replica_cost_per_hour),
        ("from a warm pool", warm_start_s, pool_cost_per_hour, replica_cost_per_hour),
    )

    def per_hour(way: tuple[str, float, float, float], calls_per_hour: float) -> float:
        _, start_s, standing, started = way
        return standing + started * _share_of_time(calls_per_hour / _S_PER_HOUR, start_s, call_s + idle_s)

    def is_cheaper(calls_per_hour: float) -> bool:
        in_time = (way for way in ways[1:] if way[1] + call_s <= deadline_s)
        return min((per_hour(way, calls_per_hour) for way in in_time), default=math.inf) < replica_cost_per_hour

    most = _S_PER_HOUR / call_s if call_s else 1e9
    low, high = 0.0, most
    for _ in range(100):
        middle = (low + high) / 2.0
        low, high = (middle, high) if is_cheaper(middle) else (low, middle)
    return Budget(
        options=tuple(
            Option(
                name=way[0],
                cost_per_day=_HOURS_PER_DAY * per_hour(way, calls_per_hour),
                wait_s=way[1],
                is_in_time=way[1] + call_s <= deadline_s,
            )
            for way in ways
        ),
        calls_in_system=calls_per_hour / _S_PER_HOUR * (cold_start_s + call_s),  # Little's law: L = lambda W
        always_on_from_per_hour=None if is_cheaper(most) else low,
    )


def _share_of_time(calls_per_s: float, start_s: float, kept_s: float) -> float:
    """Share of time that a replica is there which starts for a call and stays ``kept_s`` from each call on.

    It follows from the calls that find no replica: each begins a start, and a stay that lasts while the next call comes
    within ``kept_s`` (a busy period of M/G/infinity).
    """
    if calls_per_s == 0.0:
        return 0.0
    stay_s = math.expm1(min(700.0, calls_per_s * kept_s)) / calls_per_s if kept_s else 0.0
    here_s = start_s + stay_s
    return here_s / (here_s + 1.0 / calls_per_s)
