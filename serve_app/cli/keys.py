"""``tandem key``: makes an API key."""

import os
import stat
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option, Typer

from deployments.endpoint.api_keys import key_line, new_key, parse_keys
from serve_app.checks.yaml_checks import ConfigError

commands = Typer()


@commands.command()
def key(
    name: Annotated[str, Argument(help="The name of the key's owner.")],
    file: Annotated[Path, Option(help="Add its hash to this file, which ingress.api_keys_file names.", dir_okay=False)],
) -> None:
    """Make an API key: print it once, and store its hash."""
    secret = new_key()
    try:
        line = key_line(name, secret)
        text = file.read_text() if file.exists() else ""
        if text and not text.endswith("\n"):
            text += "\n"
        text += f"{line}\n"
        parse_keys(text)  # raises ValueError if the endpoint could not read the new file
        _replace(file.resolve(), text)  # a link stays a link
    except UnicodeDecodeError:
        fix = "give a key file, or a name that does not exist yet"
        raise ConfigError(f"--file {file}: not a text file: {fix}") from None
    except ValueError as error:
        raise ConfigError(f"{file}: {error}") from None
    except OSError as error:
        raise ConfigError(f"--file {file}: {error.strerror}: give a file that can be written") from None
    typer.echo(secret)


def _replace(file: Path, text: str) -> None:
    """Replace a file in one step, so that no replica reads half of it; owner and mode stay."""
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    temporary.touch(mode=0o600)
    try:
        temporary.write_text(text)
        if file.exists():
            old = file.stat()
            temporary.chmod(stat.S_IMODE(old.st_mode))
            new = temporary.stat()  # in a folder with the setgid bit, a new file has the folder's group
            if (old.st_uid, old.st_gid) != (new.st_uid, new.st_gid):
                os.chown(temporary, old.st_uid, old.st_gid)
        temporary.replace(file)
    finally:
        temporary.unlink(missing_ok=True)
