"""``tandem operators``: the commands of operator-level planning."""

from typer import Typer

from serve_app.cli.operators_profile import profile

commands = Typer(
    name="operators", no_args_is_help=True, help="Plan for the operators of a model, not for whole models."
)
commands.command("profile")(profile)
