"""Files that ship with Tandem: example configurations, engine profiles, small traces and the tiny model's corpus.

``serve_app/data`` is a link to ``configs/`` in a checkout and a folder of the wheel.
"""

import shutil
from importlib.resources import files
from pathlib import Path

from serve_app.checks.yaml_checks import ConfigError


def shipped(name: str) -> Path:
    """The path of a shipped file, such as ``traces/azure_conv_60s.csv``; raises ConfigError if it is missing."""
    path = Path(str(files("serve_app"))) / "data" / name
    if not path.exists():
        raise ConfigError(f"{path} is missing from this installation: install tandem-serve again")
    return path


def copy_examples(folder: Path) -> Path:
    """Copy the shipped files to ``folder/configs``, and return that path.

    Raises ConfigError: it exists already, or cannot be written.
    """
    target = folder / "configs"
    try:
        shutil.copytree(shipped("."), target)
    except FileExistsError:
        raise ConfigError(f"{target} exists already: give another folder") from None
    except OSError as error:
        raise ConfigError(f"{target}: cannot be written: {error.strerror or error}: give another folder") from None
    return target
