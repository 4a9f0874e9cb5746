"""``tandem schema``: the JSON schema of a Serve YAML with one Tandem application, for editors."""

import json

import typer

from serve_app.checks.ray_schema import serve_yaml_schema

commands = typer.Typer()


@commands.command()
def schema() -> None:
    """Print the JSON schema of a config. An editor reads it from a file: # yaml-language-server: $schema=FILE."""
    typer.echo(json.dumps(serve_yaml_schema(), indent=1))
