"""``tandem profile --check``, and what ``tandem profile`` says without a file to write."""

import json
from pathlib import Path

import pytest

from autoscale.engines.profile import EngineProfile
from kvtransfer.topology import Role
from serve_app.cli.main import main
from serve_app.cli.profiles import _files

PROFILES = Path(__file__).parents[3] / "configs" / "profiles"
TP4, POINTS = PROFILES / "h100_llama70b_fp8_tp4.json", PROFILES / "points" / "h100_llama70b_fp8_tp4.csv"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["tandem", "profile", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    return int(stopped.value.code or 0)


def test_a_profile_is_held_against_measured_points(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "check.json"
    assert run(monkeypatch, str(TP4), "--check", str(POINTS), "--most-error-frac", "0.07", "--json", str(out)) == 0
    printed = capsys.readouterr().out
    assert "h100_llama70b_fp8_tp4" in printed and "mean error without sign: TPOT" in printed
    result = json.loads(out.read_text())
    assert len(result["rows"]) == 15
    assert result["mean_error_frac"]["TPOT"] < 0.07
    assert set(result["mean_error_frac"]) == {"TPOT", "TTFT if it is a mean", "TTFT if it is a median"}


def test_beyond_the_bound_the_exit_code_is_1_and_the_message_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tp2 = PROFILES / "h100_llama70b_fp8_tp2.json"
    assert run(monkeypatch, str(tp2), "--check", str(POINTS)) == 1
    assert "TPOT is off by" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((str(PROFILES.parent / "cpu_tiny.yaml"),), "give --out FILE for the profile, or --check FILE"),
        ((str(TP4), "--check", "none.csv"), "none.csv: cannot be read"),
        (("none.json", "--check", str(POINTS)), "none.json"),
    ],
)
def test_what_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert run(monkeypatch, *arguments) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("100,20,4,0.1,", "no point has a tpot_s, and TPOT is what --check judges: add the column"),
        ("100,20,4,0.1,0.02\n100000000,20,4,,0.02", "line 3: 100000020 tokens do not fit the engine's KV"),
    ],
)
def test_points_that_cannot_be_judged_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, rows: str, message: str
) -> None:
    points = tmp_path / "points.csv"
    points.write_text(f"input_tokens,output_tokens,concurrency,ttft_s,tpot_s\n{rows}\n")
    assert run(monkeypatch, str(TP4), "--check", str(points)) == 1
    assert message in capsys.readouterr().err


def test_two_different_engines_make_two_files() -> None:
    tp2, tp4 = EngineProfile.load(PROFILES / "h100_llama70b_fp8_tp2.json"), EngineProfile.load(TP4)
    assert _files(Path("a/b.json"), {Role.PREFILL: tp2, Role.DECODE: tp2}) == {Path("a/b.json"): tp2}
    assert _files(Path("a/b.json"), {Role.PREFILL: tp2, Role.DECODE: tp4}) == {
        Path("a/b_prefill.json"): tp2,
        Path("a/b.json"): tp4,
    }
