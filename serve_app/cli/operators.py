"""``tandem operators``: plans for the operators of a model, settings that follow from them, and their measurement."""

from typer import Typer

from serve_app.cli.operators_plan import plan
from serve_app.cli.operators_profile import profile
from serve_app.cli.operators_settings import settings

commands = Typer(
    name="operators",
    no_args_is_help=True,
    help="Plan single operators of a model: their times, their replicas, and what that saves.",
)
for command in (plan, settings, profile):
    commands.command()(command)
