"""The command that says what a seldom asked model costs: always on, from zero, or from a warm pool."""

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from serve_app.validate import ConfigError

console = Console()
commands = typer.Typer()


@commands.command()
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
    """What a model costs a day that is seldom asked, and which way meets its deadline for least."""
    from autoscale.cold_start import cold_start_budget

    try:
        budget = cold_start_budget(
            calls_per_hour=calls_per_hour,
            call_s=call_s,
            deadline_s=deadline_s,
            replica_cost_per_hour=replica_cost_per_hour,
            cold_start_s=cold_start_s,
            warm_start_s=warm_start_s,
            pool_cost_per_hour=pool_cost_per_hour,
            idle_s=idle_s,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from None
    table = Table(box=None, pad_edge=False)
    for column in ("", "cost per day", "a call that finds nobody waits", "in time"):
        table.add_column(column, justify="right" if column else "left")
    for option in budget.options:
        is_chosen = option is budget.choice
        table.add_row(
            option.name,
            f"{option.cost_per_day:.2f}",
            f"{option.wait_s:g} s",
            "yes" if option.is_in_time else "no",
            style="bold" if is_chosen else "",
        )
    console.print(table)
    enough = "one replica suffices" if budget.calls_in_system < 1.0 else "one replica does not suffice"
    console.print(f"{budget.calls_in_system:.3g} calls are here on average (Little's law): {enough}", highlight=False)
    if budget.choice is None:
        console.print(f"no way meets a deadline of {deadline_s:g} s: a call alone takes {call_s:g} s", highlight=False)
        raise typer.Exit(1)
    console.print(f"choose {budget.choice.name}", highlight=False)
    if budget.choice.wait_s:
        least_s = budget.choice.wait_s + call_s
        console.print(f"that holds while the deadline is at least {least_s:g} s", highlight=False)
    from_per_hour = budget.always_on_from_per_hour
    if from_per_hour is None:
        console.print("and always on is never cheaper, as long as one replica suffices", highlight=False)
    else:
        console.print(f"and always on is cheapest from {from_per_hour:.3g} calls per hour on", highlight=False)
