"""``tandem operators``: plans for the operators of a model, and settings that follow from them."""

from typer import Typer

from serve_app.cli.operators_settings import settings

commands = Typer(
    name="operators", no_args_is_help=True, help="Plan for the operators of a model, not for whole models."
)


@commands.callback()
def _group() -> None:
    """Keep the name of the group, also while it has one command."""


commands.command("settings")(settings)
