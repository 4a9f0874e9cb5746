"""Where the files of a LoRA adapter may be that a client names."""

import os
from pathlib import Path


class OutsideFolderError(Exception):
    """A path is not below the allowed folder."""


def allowed_path(folder: Path, path: str) -> Path:
    """The real path of an adapter below the allowed folder; a relative one begins there.

    Raises OutsideFolderError: it is outside, perhaps over a link.
    """
    try:
        root = Path(os.path.realpath(folder))
        real = Path(os.path.realpath(root / path))
    except ValueError:  # a zero byte
        raise OutsideFolderError(f"{path!r} is no path") from None
    if real == root or not real.is_relative_to(root):
        raise OutsideFolderError(f"{path!r} is outside of the allowed folder {folder}")
    return real
