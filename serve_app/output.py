"""Writes the file that an option of a command names."""

from pathlib import Path

from serve_app.checks.yaml_checks import ConfigError


def write_file(path: Path | None, text: str, option: str) -> None:
    """Write ``text`` to ``path``, and make its folder; ``None``: the option was not given, and nothing is written.

    ``option``: the option's name, for the error. Raises ConfigError: the file cannot be written.
    """
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror}: give a file that can be written") from None
