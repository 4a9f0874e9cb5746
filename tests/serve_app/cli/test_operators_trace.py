"""``tandem operators plan`` with fixed GPUs, with a trace, and its page."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.serve_app.cli.test_operators import LOAD, QWEN, document, refusal, run


def test_fixed_gpus_carry_the_highest_rate_that_fits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arguments = ("--input-tokens", "512", "--phase", "prefill", "--planner", "model", "--ttft-s", "0.2")
    part = document(monkeypatch, tmp_path, *QWEN, *arguments, "--gpus", "3")["phases"]["prefill"]
    row = part["planners"]["model"]
    assert (row["gpus"], part["fixed_gpus"], row["meets_objective"]) == (3, 3, True)
    # Found to 1 %: the plan for 2 % more takes another GPU.
    more = ("--requests-per-s", str(row["passes_per_s"] * 1.02))
    beyond = document(monkeypatch, tmp_path, *QWEN, *arguments, *more)["phases"]["prefill"]
    assert beyond["planners"]["model"]["gpus"] > 3


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Forty requests in 20 s, the second half of them at five times the rate, then silence until a last one."""
    times = [0.8 * n for n in range(20)] + [16 + 0.16 * n for n in range(20)] + [45.0]
    lines = [f"{at:.2f},1000,100" for at in times]
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(["timestamp_s,input_tokens,output_tokens", *lines]) + "\n")
    return path


def test_a_trace_is_planned_window_by_window(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, trace: Path
) -> None:
    planners = ("--planner", "model", "--planner", "search", "--rate-scale", "1")
    found = document(monkeypatch, tmp_path, *QWEN, "--trace", str(trace), *planners)
    assert "requests" in capsys.readouterr().out
    for phase in ("prefill", "decode"):
        for row in found["phases"][phase]["planners"].values():
            windows = row["windows"]
            assert [each["start_s"] for each in windows] == [0, 10, 20, 30, 40]
            assert sum(each["requests"] for each in windows) == 41
            assert row["gpu_hours"] == pytest.approx(sum(each["gpus"] for each in windows) * 10 / 3600)
            assert row["energy_kwh"] == pytest.approx(sum(each["power_w"] for each in windows) * 10 / 3.6e6)
            assert [row["plans"][each["plan"]]["gpus"] for each in windows] == [each["gpus"] for each in windows]
            within = sum(each["requests_within_objective"] for each in windows)
            assert row["attained_frac"] == pytest.approx(within / 41)
    model = found["phases"]["prefill"]["planners"]["model"]
    assert model["windows"][3]["bottleneck"] is None  # no request comes
    assert model["windows"][0]["bottleneck"] == "gate_up_proj"


def test_a_trace_with_one_request_is_marked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "one.csv"
    path.write_text("timestamp_s,input_tokens,output_tokens\n0,300,20\n")
    arguments = ("qwen2-0.5b", "--gpu", "A100", "--trace", str(path), "--planner", "model")
    for part in document(monkeypatch, tmp_path, *arguments)["phases"].values():
        assert any(note.startswith("the trace has 1 request(s): ") for note in part["notes"])
        assert part["planners"]["model"]["plans"][0]["gpus"] == 1


def test_more_requests_take_more_gpu_hours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trace: Path) -> None:
    arguments = (*QWEN, "--trace", str(trace), "--planner", "model", "--phase", "prefill")
    hours = [
        document(monkeypatch, tmp_path, *arguments, "--rate-scale", scale)["phases"]["prefill"]["planners"]["model"][
            "gpu_hours"
        ]
        for scale in ("1", "30")
    ]
    assert hours[1] > 2 * hours[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--trace", "TRACE", "--gpus", "4"), "--gpus 4: --trace gives the load and the lengths"),
        (("--trace", "TRACE", "--requests-per-s", "4"), "--requests-per-s 4: --trace gives the load"),
        (("--trace", "TRACE", "--window-s", "0"), "--window-s 0: give a number above 0"),
        (("--trace", "TRACE", "--ttft-s", "0.001"), "prefill: the objective is 0.001 s"),
        (("--trace", "TRACE", "--headroom-frac", "inf"), "--headroom-frac inf: give a number from 0"),
        (("--trace", "TRACE", "--rate-scale", "1e-9"), "--rate-scale 1e-09 leaves none of"),
        (("--trace", "TRACE", "--rate-scale", "1e7"), "5,000,000 are the most: give a smaller one"),
        (("--trace", "TRACE", "--window-s", "1e-6"), "100,000 windows of 1e-06 s end before it: give longer windows"),
        (("--trace", "TRACE", "--rate-scale", "0"), "--rate-scale 0: give a number above 0"),
        (("--trace", "none.csv"), "none.csv"),
        (("--input-tokens", "9", "--gpus", "4", "--phase", "decode"), "decode needs the length of answers"),
        (("--input-tokens", "9", "--output-tokens", "9", "--gpus", "4"), "--gpus 4 are those of one phase"),
        ((*LOAD, "--gpus", "4"), "--gpus 4 asks for the highest rate: leave --requests-per-s 60 out"),
        (
            ("--input-tokens", "1024", "--gpus", "1", "--phase", "prefill", "--ttft-s", "0.001"),
            "prefill: the objective is 0.001 s, and one pass that never waits takes",
        ),
    ],
)
def test_wrong_traces_and_gpus_are_named(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    trace: Path,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    named = [str(trace) if each == "TRACE" else each for each in arguments]
    assert message in refusal(monkeypatch, capsys, *QWEN, *named)


def test_too_few_gpus_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--input-tokens", "512", "--phase", "prefill", "--gpus", "1")
    message = refusal(monkeypatch, capsys, "llama-3.1-70b", "--gpu", "A100", *arguments)
    assert "prefill: 1 GPUs do not hold one instance of each operator" in message


@pytest.mark.slow
@pytest.mark.parametrize("is_trace", [False, True])
def test_the_page_is_well_formed_and_needs_nothing_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trace: Path, is_trace: bool
) -> None:
    load = ("--trace", str(trace)) if is_trace else (*LOAD, "--json", str(tmp_path / "plan.json"))
    out = tmp_path / "page.html"
    planners = ("--planner", "model", "--planner", "search")
    assert run(monkeypatch, *QWEN, *load, *planners, "--phase", "prefill", "--html", str(out)) == 0
    text = out.read_text()
    page = ElementTree.fromstring(text.partition("\n")[2])
    links = [value for each in page.iter() for name, value in each.items() if name.endswith(("href", "src"))]
    assert all(value.startswith("#") for value in links)
    assert not list(page.iter("script"))
    figures = [each.get("aria-label") or "" for each in page.iter("{http://www.w3.org/2000/svg}svg")]
    assert sum(each.startswith("Sensitivity of operators") for each in figures) == 5
    assert sum("over time" in each for each in figures) == (3 if is_trace else 0)
    cells = ["".join(cell.itertext()) for cell in page.iter("td")]
    if not is_trace:
        rows = json.loads((tmp_path / "plan.json").read_text())["phases"]["prefill"]["planners"]
        for name, words in (("model", "model level"), ("search", "search (ours)")):
            assert cells[cells.index(words) + 1] == str(rows[name]["gpus"])


def test_files_of_two_options_must_differ(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = str(tmp_path / "one")
    message = refusal(monkeypatch, capsys, *QWEN, *LOAD, "--json", out, "--html", out)
    assert "is the file of --json too: give another one" in message
