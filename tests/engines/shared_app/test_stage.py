"""``tandem stage`` on a cluster: a model's files come to every node's own disk once, before anything loads them."""

from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.vllm]


def test_every_node_has_the_files_and_they_are_copied_once(app: Any, tmp_path: Path) -> None:
    from serve_app.running.ray_stage import stage

    service = app.config.services[0]
    model = service.model.model_copy(update={"stage_folder": tmp_path / "staged"})
    config = app.config.model_copy(update={"services": (service.model_copy(update={"model": model}),)})
    made = stage(config)
    assert len(made) == 2  # not the head node, which has the labels of neither role
    assert {one.model for one in made} == {"tiny"}
    (folder,) = {one.folder for one in made}  # all nodes share one disk here
    assert folder is not None
    source = service.model.folder
    assert {path.name: path.stat().st_size for path in Path(folder).iterdir()} == {
        path.name: path.stat().st_size for path in source.iterdir()
    }
    before = (Path(folder) / "model.safetensors").stat().st_ino
    assert [one.folder for one in stage(config)] == [folder, folder]
    assert (Path(folder) / "model.safetensors").stat().st_ino == before
    assert [path.name for path in (tmp_path / "staged").iterdir() if not path.name.startswith(".")] == [
        Path(folder).name
    ]


def test_a_failed_copy_is_reported_for_each_node(app: Any, tmp_path: Path) -> None:
    from serve_app.running.ray_stage import stage

    (tmp_path / "file").write_text("")
    service = app.config.services[0]
    model = service.model.model_copy(update={"stage_folder": tmp_path / "file" / "below"})
    config = app.config.model_copy(update={"services": (service.model_copy(update={"model": model}),)})
    assert [one.folder for one in stage(config)] == [None, None]
