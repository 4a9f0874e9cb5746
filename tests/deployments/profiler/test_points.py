"""Measured points outlive an interruption, and only those of the same engines are used."""

import json
from pathlib import Path

import pytest

from deployments.profiler.points import Points, Timing

ENGINES = {"prefill": {"model": "m", "gpu": "H100"}, "decode": {"model": "m", "gpu": "H20"}}


class Measure:
    def __init__(self) -> None:
        self.calls = 0

    async def __call__(self) -> Timing:
        self.calls += 1
        return Timing(0.25, 0.01)


async def test_a_point_is_measured_once_though_the_run_is_interrupted(tmp_path: Path) -> None:
    path, measure = tmp_path / "new" / "a.points.jsonl", Measure()
    assert await Points(path, ENGINES).measured(("decode", 4, 512), measure) == (0.25, 0.01)
    with path.open("a") as lines:
        lines.write('{"at": ["decode", 8')  # the machine went down here
    again = Points(path, ENGINES)
    assert again.reused == 1
    assert await again.measured(("decode", 4, 512), measure) == (0.25, 0.01)
    assert await again.measured(("decode", 8, 512), measure) == (0.25, 0.01)
    assert measure.calls == 2
    assert Points(path, ENGINES).reused == 2


async def test_points_of_other_engines_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a.points.jsonl"
    await Points(path, ENGINES).measured(("decode", 1, 64), Measure())
    other = {**ENGINES, "decode": {"model": "m", "gpu": "H200"}}
    with pytest.raises(ValueError, match=r"points of other engines \(differ: decode\): remove the file"):
        Points(path, other)


@pytest.mark.parametrize(
    "text", ["no JSON\n", json.dumps([1]) + "\n", json.dumps({"engines": ENGINES}) + "\n" + '{"at": 1}\n']
)
def test_a_file_of_another_kind_is_refused_and_kept(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.points.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match="remove the file, or give another --out"):
        Points(path, ENGINES)
    assert path.read_text() == text


def test_a_folder_in_place_of_the_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Is a directory"):
        Points(tmp_path, ENGINES)
