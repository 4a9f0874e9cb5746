"""Paths of adapters that clients name."""

from pathlib import Path

import pytest

from deployments.adapter_paths import OutsideFolderError, allowed_path


def test_a_path_below_the_folder_is_allowed_absolute_or_relative(tmp_path: Path) -> None:
    folder = tmp_path / "allowed"
    (folder / "red").mkdir(parents=True)
    (folder / "link").symlink_to(folder / "red")
    for path in ("red", str(folder / "red"), "link", "x/../red"):
        assert allowed_path(folder, path) == folder / "red"
    (tmp_path / "alias").symlink_to(folder)  # the allowed folder itself may be a link
    assert allowed_path(tmp_path / "alias", "red") == folder / "red"


@pytest.mark.parametrize("path", ["", ".", "..", "../outside", "/etc", "link", "link/red", "a\0b", "~"])
def test_any_other_path_is_refused_also_over_a_link(tmp_path: Path, path: str) -> None:
    folder, outside = tmp_path / "allowed", tmp_path / "outside"
    folder.mkdir()
    (outside / "red").mkdir(parents=True)
    (folder / "link").symlink_to(outside)
    if path == "~":  # a name like any other below the folder
        assert allowed_path(folder, path) == folder / "~"
        return
    with pytest.raises(OutsideFolderError):
        allowed_path(folder, path)
