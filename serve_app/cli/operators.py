"""The commands about single operators of a model."""

from typer import Typer

from serve_app.cli.operators_plan import plan

commands = Typer(
    name="operators", no_args_is_help=True, help="Plan single operators of a model: times, replicas, what it saves."
)
commands.command("plan")(plan)
