"""Writes a file that a command was asked for."""

from pathlib import Path

from serve_app.validate import ConfigError


def check_file(path: Path | None, option: str) -> None:
    """Say before long work that what comes of it cannot be written.

    Raises:
        ConfigError: it cannot.
    """
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("a").close()
    except OSError as error:
        raise _unwritable(path, option, error) from None


def _unwritable(path: Path, option: str, error: OSError) -> ConfigError:
    return ConfigError(f"{option} {path}: {error.strerror}: give a file that can be written")


def write_file(path: Path | None, text: str, option: str) -> None:
    """Write ``text``, its folder too, where ``option`` of the command named a file.

    Raises:
        ConfigError: it cannot be written.
    """
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise _unwritable(path, option, error) from None
