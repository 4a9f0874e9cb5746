"""``tandem key``: make an API key."""

import os
import stat
from pathlib import Path
from typing import Annotated

import typer

from deployments.api_keys import key_line, new_key, parse_keys
from serve_app.validate import ConfigError

commands = typer.Typer()


@commands.command()
def key(
    name: Annotated[str, typer.Argument(help="Whose it is.")],
    file: Annotated[
        Path, typer.Option(help="Add its hash to this file, which ingress.api_keys_file names.", dir_okay=False)
    ],
) -> None:
    """Make an API key: print it, this once, and keep its hash."""
    made = new_key()
    try:
        line = key_line(name, made)
        before = file.read_text() if file.exists() else ""
        text = f"{before}{'' if before.endswith(chr(10)) or not before else chr(10)}{line}\n"
        parse_keys(text)
        _replace(file.resolve(), text)  # a link goes on leading there
    except UnicodeDecodeError:
        raise ConfigError(f"--file {file}: it is no text: give a key file, or one that does not exist yet") from None
    except ValueError as error:
        raise ConfigError(f"{file}: {error}") from None
    except OSError as error:
        raise ConfigError(f"--file {file}: {error.strerror}: give a file that can be written") from None
    typer.echo(made)


def _replace(file: Path, text: str) -> None:
    """Write a file beside it and then in its place, so that no replica reads half of it; who may read it stays."""
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    beside.touch(mode=0o600)
    try:
        beside.write_text(text)
        if file.exists():
            was = file.stat()
            beside.chmod(stat.S_IMODE(was.st_mode))
            made = beside.stat()  # in the group of a folder that gives its own
            if (was.st_uid, was.st_gid) != (made.st_uid, made.st_gid):
                os.chown(beside, was.st_uid, was.st_gid)
        beside.replace(file)
    finally:
        beside.unlink(missing_ok=True)
