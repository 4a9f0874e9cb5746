"""What a rarely used model costs in a day: always on, from zero, from a warm pool, or with an engine that sleeps.

Calls come at random, and one replica serves them. It stops if no further call has come during a call and ``idle_s``
after it; a call that finds no replica waits for a start. A warm pool is machines on which a replica starts faster, such
as those with start hosts. Each model pays its part of the pool at all times. An engine that sleeps keeps its
reservation, and pays for it at all times.

Source: the queue-depth chapter, Exercise 23.4.3, here for any numbers, and with the last way added.
"""

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.table import Table

from autoscale.documents import load_mapping
from serve_app.checks.yaml_checks import config_errors
from serve_app.cli.terminal import console

commands = typer.Typer()

_HOURS_PER_DAY, _S_PER_HOUR = 24.0, 3600.0
# Highest rate of the search if a call takes no time, calls per hour: one replica then serves any number of calls.
_MANY_CALLS_PER_HOUR = 1e9
# Halvings of the interval in which a rate is searched; far fewer reach the precision of a float.
_HALVINGS = 100
# Most start hosts that are away at once, in the mean; beyond that a pool of hosts is no answer.
_MOST_AWAY = 10_000.0
# Share of starts that may find no start host.
_MOST_WITHOUT_HOST_FRAC = 0.01
# Largest exponent that is used; exp of more than 709 is too large for a float.
_MAX_EXPONENT = 700.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to keep a model available.

    ``cost_per_day``: in the currency of the given prices. ``wait_s``: time that a call waits if no replica runs.
    ``is_in_time``: whether a call that waits this time meets its deadline.
    """

    name: str
    cost_per_day: float
    wait_s: float
    is_in_time: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """All ways, in the order always on, from zero, from a warm pool, engine asleep (if it has a price).

    ``calls_in_system``: mean number of calls that wait for a start or are served, by Little's law, if each call has a
    cold start. Below 1 one replica suffices. ``always_on_from_per_hour``: calls per hour from which always on is the
    cheapest way that is in time; ``None``: one replica cannot serve this many calls. ``pool_starts_per_hour``: starts
    from the warm pool.
    """

    options: tuple[Option, ...]
    calls_in_system: float
    always_on_from_per_hour: float | None
    pool_starts_per_hour: float

    @property
    def choice(self) -> Option | None:
        """The cheapest way that is in time; ``None``: no way is."""
        return min((one for one in self.options if one.is_in_time), key=lambda one: one.cost_per_day, default=None)


class _Way(NamedTuple):
    """One of the compared ways.

    ``standing_cost``: cost per hour, paid at all times. ``replica_cost``: further cost per hour, paid while a replica
    starts, serves or stays; 0 if the standing cost includes it.
    """

    name: str
    start_s: float
    standing_cost: float
    replica_cost: float


@commands.command()
@config_errors()
def cost(
    calls_per_hour: Annotated[float, typer.Option(help="On average; they come at random.")],
    call_s: Annotated[float, typer.Option(help="One call on a replica that is ready.")],
    deadline_s: Annotated[float, typer.Option(help="From a call to its answer.")],
    replica_cost_per_hour: Annotated[float, typer.Option(help="While it starts, serves or is kept.")],
    pool_cost_per_hour: Annotated[float, typer.Option(help="This model's part of the warm pool.")],
    cold_start_s: Annotated[float | None, typer.Option(help="From nothing to ready.")] = None,
    warm_start_s: Annotated[float | None, typer.Option(help="From the warm pool to ready.")] = None,
    starts: Annotated[
        Path | None, typer.Option(help="File of `make bench-starts`: its medians replace the times that are left out.")
    ] = None,
    staged: Annotated[bool, typer.Option("--staged", help="With --starts: the files are on the node already.")] = False,
    level: Annotated[int, typer.Option(min=1, max=2, help="With --starts: the level at which the engine sleeps.")] = 1,
    sleeping_cost_per_hour: Annotated[
        float | None, typer.Option(help="What a replica reserves whose engine may sleep; left out: it may not.")
    ] = None,
    wake_s: Annotated[float | None, typer.Option(help="From a sleeping engine to ready.")] = None,
    models: Annotated[int, typer.Option(min=1, help="Models with as many calls that share the warm pool.")] = 1,
    nodes: Annotated[
        int, typer.Option(min=1, help="Nodes with start hosts, each with an equal share of the starts.")
    ] = 1,
    refill_s: Annotated[float, typer.Option(help="From a start until the pool has a new start host.")] = 60.0,
    idle_s: Annotated[float, typer.Option(help="How long a replica stays after its last call.")] = 0.0,
) -> None:
    """Show the daily cost of a rarely used model, and the cheapest way to meet its deadline."""
    cold_start_s = _start_s(cold_start_s, "--cold-start-s", starts, "staged" if staged else "cold")
    warm_start_s = _start_s(warm_start_s, "--warm-start-s", starts, "start host")
    if sleeping_cost_per_hour is None and wake_s is not None:
        raise ValueError("--wake-s is given without --sleeping-cost-per-hour: give both, or leave it out")
    if sleeping_cost_per_hour is not None:
        wake_s = _start_s(wake_s, "--wake-s", starts, f"sleeping, level {level}")
    budget = cold_start_budget(
        calls_per_hour=calls_per_hour,
        call_s=call_s,
        deadline_s=deadline_s,
        replica_cost_per_hour=replica_cost_per_hour,
        cold_start_s=cold_start_s,
        warm_start_s=warm_start_s,
        pool_cost_per_hour=pool_cost_per_hour,
        sleeping_cost_per_hour=sleeping_cost_per_hour,
        wake_s=wake_s,
        idle_s=idle_s,
    )
    console.print(_table(budget))
    lines = _lines(budget, call_s, deadline_s)
    hosts, without_frac = start_hosts(models * budget.pool_starts_per_hour / nodes, refill_s)
    lines.append(
        f"{models} such model{'s' * (models > 1)} need {hosts} start host{'s' * (hosts > 1)} on "
        f"{f'each of {nodes} nodes' if nodes > 1 else 'one node'}: {without_frac:.1%} of starts find none"
    )
    console.print("\n".join(lines), highlight=False)
    if budget.choice is None:
        raise typer.Exit(1)


def _table(budget: Budget) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("", "cost per day", "a call without a replica waits", "in time"):
        table.add_column(column, justify="right" if column else "left")
    for option in budget.options:
        figures = f"{option.cost_per_day:.2f}", f"{option.wait_s:g} s", "yes" if option.is_in_time else "no"
        table.add_row(option.name, *figures, style="bold" if option is budget.choice else "")
    return table


def _lines(budget: Budget, call_s: float, deadline_s: float) -> list[str]:
    """What to choose, and what would change the choice."""
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
    return lines


def _start_s(given_s: float | None, option: str, starts: Path | None, name: str) -> float:
    """The time of a start that is given, or the measured median; raises ValueError if there is neither."""
    if given_s is not None:
        return given_s
    if starts is None:
        raise ValueError(f"{option} is missing: give it, or give --starts with the file of a measurement")
    try:
        return float(statistics.median(load_mapping(starts, "the figures of make bench-starts")["seconds"][name]))
    except (KeyError, TypeError, statistics.StatisticsError) as error:
        raise ValueError(f"--starts {starts} has no times of {name!r} ({error!r}): measure again") from None


def cold_start_budget(
    *,
    calls_per_hour: float,
    call_s: float,
    deadline_s: float,
    replica_cost_per_hour: float,
    cold_start_s: float,
    warm_start_s: float,
    pool_cost_per_hour: float,
    sleeping_cost_per_hour: float | None = None,
    wake_s: float | None = None,
    idle_s: float = 0.0,
) -> Budget:
    """Compare the ways; the arguments are the options of ``tandem cost``.

    Raises:
        ValueError: a number is negative or not finite.
    """
    for name, value in locals().copy().items():
        if value is not None and not (math.isfinite(value) and value >= 0.0):
            raise ValueError(f"{name} is {value!r}: give a number of at least 0")

    warm = _Way("from a warm pool", warm_start_s, standing_cost=pool_cost_per_hour, replica_cost=replica_cost_per_hour)
    ways = [
        _Way("always on", start_s=0.0, standing_cost=replica_cost_per_hour, replica_cost=0.0),
        _Way("from zero", start_s=cold_start_s, standing_cost=0.0, replica_cost=replica_cost_per_hour),
        warm,
    ]
    if sleeping_cost_per_hour is not None and wake_s is not None:
        ways.append(_Way("engine asleep", wake_s, standing_cost=sleeping_cost_per_hour, replica_cost=0.0))

    def share_of_time(way: _Way, calls_per_hour: float) -> float:
        return _share_of_time(calls_per_hour / _S_PER_HOUR, way.start_s, call_s + idle_s)

    def cost_per_hour(way: _Way, calls_per_hour: float) -> float:
        return way.standing_cost + way.replica_cost * share_of_time(way, calls_per_hour)

    def is_start_cheaper(calls_per_hour: float) -> bool:
        """Whether another way that is in time costs less than always on."""
        in_time = (way for way in ways[1:] if way.start_s + call_s <= deadline_s)
        return min((cost_per_hour(way, calls_per_hour) for way in in_time), default=math.inf) < replica_cost_per_hour

    # At this rate, a replica with one call at a time is always busy.
    most_calls_per_hour = _S_PER_HOUR / call_s if call_s else _MANY_CALLS_PER_HOUR
    return Budget(
        options=tuple(
            Option(
                name=way.name,
                cost_per_day=_HOURS_PER_DAY * cost_per_hour(way, calls_per_hour),
                wait_s=way.start_s,
                is_in_time=way.start_s + call_s <= deadline_s,
            )
            for way in ways
        ),
        calls_in_system=calls_per_hour / _S_PER_HOUR * (cold_start_s + call_s),  # Little's law: L = lambda W
        always_on_from_per_hour=_end_of(is_start_cheaper, most_calls_per_hour),
        # A call that comes while no replica is there starts one.
        pool_starts_per_hour=calls_per_hour * (1.0 - share_of_time(warm, calls_per_hour)),
    )


def _end_of(is_start_cheaper: Callable[[float], bool], most_calls_per_hour: float) -> float | None:
    """The rate from which always on is the cheapest way; ``None``: it is not even at the highest rate.

    All other ways cost more with every further call, so bisection finds it.
    """
    if is_start_cheaper(most_calls_per_hour):
        return None
    low, high = 0.0, most_calls_per_hour
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        low, high = (middle, high) if is_start_cheaper(middle) else (low, middle)
    return low


def start_hosts(starts_per_hour: float, refill_s: float) -> tuple[int, float]:
    """Fewest start hosts of which at most 1 % of the starts find none, and the share that does.

    A start that finds no host does not wait for one: a loss system with ``starts_per_hour`` random starts, in which a
    host is away for ``refill_s`` after each start. Source: Erlang's loss formula (B), in its recursive form.
    """
    if not (math.isfinite(refill_s) and refill_s >= 0.0):
        raise ValueError(f"--refill-s is {refill_s!r}: give a number of at least 0")
    away = starts_per_hour / _S_PER_HOUR * refill_s
    if away > _MOST_AWAY:
        raise ValueError(
            f"{starts_per_hour:g} starts per hour, each of which takes a host for {refill_s:g} s, are too many for "
            "start hosts: keep replicas for longer (--idle-s), or check --models and --refill-s"
        )
    hosts, without_frac = 0, 1.0
    while without_frac > _MOST_WITHOUT_HOST_FRAC:
        hosts += 1
        without_frac = away * without_frac / (hosts + away * without_frac)
    return hosts, without_frac


def _share_of_time(calls_per_s: float, start_s: float, kept_s: float) -> float:
    """Share of time in which a replica starts or runs, if it starts for a call and stays ``kept_s`` after each call.

    A cycle is a start, a stay and the time until the next call. The time until the next call is 1 / lambda on average
    (lambda: ``calls_per_s``). The stay lasts while each call comes within ``kept_s`` of the call before:
    (exp(lambda kept_s) - 1) / lambda on average (a busy period of M/G/infinity).
    """
    if calls_per_s == 0.0:
        return 0.0
    stay_s = math.expm1(min(_MAX_EXPONENT, calls_per_s * kept_s)) / calls_per_s
    present_s = start_s + stay_s
    return present_s / (present_s + 1.0 / calls_per_s)
