"""Writes a file that a command was asked for."""

from pathlib import Path

from serve_app.checks.yaml_checks import ConfigError


def write_file(path: Path | None, text: str, option: str) -> None:
    """Write ``text``, its folder too, where ``option`` of the command named a file; raises ConfigError if it cannot."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror}: give a file that can be written") from None
