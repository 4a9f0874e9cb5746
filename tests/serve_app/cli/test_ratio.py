"""``tandem ratio`` on the shipped profiles: DOPD's ratios, tensor parallel sizes, whole replicas, and bad input."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from serve_app.cli.main import main

CONFIGS = Path(__file__).parents[3] / "configs"
AZURE = str(CONFIGS / "traces" / "azure_conv_600s.csv.gz")


def profile(name: str) -> str:
    return str(CONFIGS / "profiles" / f"{name}.json")


def h100(size: str) -> str:
    return profile(f"h100_llama70b_fp8_{size}")


TABLE_1 = ("--prefill", h100("tp1"), "--decode", h100("tp2_table_1"))
FIXED = ("--input-tokens", "1000", "--output-tokens", "150")


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["tandem", "ratio", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    return int(stopped.value.code or 0)


def answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: Sequence[str]) -> dict[str, Any]:
    out = tmp_path / "ratio.json"
    assert run(monkeypatch, *arguments, "--json", str(out)) == 0
    document: dict[str, Any] = json.loads(out.read_text())
    return document


@pytest.mark.parametrize(("tokens", "claimed"), [((1000, 150), 4.58), ((3000, 300), 3.18)])
def test_dopds_two_ratios_come_from_shipped_profiles(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tokens: tuple[int, int], claimed: float
) -> None:
    lengths = ("--input-tokens", str(tokens[0]), "--output-tokens", str(tokens[1]))
    document = answer(monkeypatch, tmp_path, (*TABLE_1, *lengths, "--gpus", "16"))
    # 4.54 and 3.09; section VI-B.1 of the paper, within the 8 %.
    assert document["best"]["pd_ratio"] == pytest.approx(claimed, rel=0.08)
    assert document["mean_alone"]["pd_ratio"] == document["best"]["pd_ratio"]  # all requests are alike


def test_a_trace_gives_the_sizes_the_counts_and_what_the_mean_hides(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    sizes = [("--prefill", h100(f"tp{n}")) for n in (1, 2, 4)] + [("--decode", h100(f"tp{n}")) for n in (2, 4, 8)]
    options = [text for pair in sizes for text in pair]
    document = answer(monkeypatch, tmp_path, (*options, "--trace", AZURE, "--requests-per-s", "30"))
    printed = capsys.readouterr().out
    # 7,930 tokens take longer than a second on one GPU. The KV of two GPUs holds 177 requests of 1,251 tokens.
    assert "not h100_llama70b_fp8_tp1 for prefill: the longest prompt, 7930 tokens, takes 1.38 s" in printed
    assert "not h100_llama70b_fp8_tp4 for prefill: 2 GPUs of this type are enough" in printed
    best = document["best"]
    assert (best["prefill"]["engine"], best["decode"]["engine"]) == ("h100_llama70b_fp8_tp2", "h100_llama70b_fp8_tp2")
    assert best["decode"]["limit"] == "decode KV memory"
    assert best["carried_requests_per_s"] >= 30.0
    assert best["gpus"] == {"H100": 2 * (best["prefill"]["replicas"] + best["decode"]["replicas"])}
    assert f"P/D ratio {best['pd_ratio']:.2f} = cc_d T_p / (t_d OSL) (Eq. 14)" in printed
    assert f"the mean lengths alone: P/D ratio {document['mean_alone']['pd_ratio']:.2f}" in printed
    assert document["mean_alone"]["pd_ratio"] < best["pd_ratio"]
    assert "of the prompts lie beyond the points of h100_llama70b_fp8_tp2" in printed  # shorter than 100 tokens


def test_gpus_and_prices_by_type(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engines = [profile(f"{kind}_llama2_70b_tp4") for kind in ("h100", "a100")]
    options = ["--prefill", engines[0], "--prefill", engines[1], "--decode", engines[0], "--decode", engines[1]]
    lengths = ("--input-tokens", "500", "--output-tokens", "100", "--ttft-s", "3", "--tpot-s", "0.1")
    document = answer(monkeypatch, tmp_path, (*options, *lengths, "--gpus", "H100=8,A100=16"))
    gpus = document["best"]["gpus"]
    assert gpus.get("H100", 0) <= 8 and gpus.get("A100", 0) <= 16
    carried = [fleet["carried_requests_per_s"] for fleet in (document["best"], *document["others"])]
    assert carried == sorted(carried, reverse=True)
    load = ("--requests-per-s", "20", "--cost", "H100=100,A100=1")
    document = answer(monkeypatch, tmp_path, (*options, *lengths, *load))
    assert set(document["best"]["gpus"]) == {"A100"}
    assert document["best"]["cost_per_hour"] == document["best"]["gpus"]["A100"]


def test_engines_without_a_gpu_are_counted_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tiny = profile("cpu_tiny")
    options = ("--prefill", tiny, "--decode", tiny, "--input-tokens", "600", "--output-tokens", "20", "--gpus", "3")
    document = answer(monkeypatch, tmp_path, options)
    assert document["best"]["gpus"] == {"CPU": 3}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*TABLE_1, *FIXED), "neither a load nor GPUs are given: add --requests-per-s or --gpus"),
        ((*TABLE_1, "--gpus", "8"), "no lengths are given: add --input-tokens and --output-tokens, or --trace"),
        ((*TABLE_1, "--input-tokens", "10", "--gpus", "8"), "no lengths are given"),
        ((*TABLE_1, *FIXED, "--trace", AZURE, "--gpus", "8"), "--trace gives the lengths"),
        (
            (*TABLE_1, "--input-tokens", "0", "--output-tokens", "9", "--gpus", "8"),
            "--input-tokens 0: give a number of tokens, 1 or more",
        ),
        (
            (*TABLE_1, "--input-tokens", "9", "--output-tokens", "0.5", "--gpus", "8"),
            "--output-tokens 0.5: give a number of tokens, 1 or more",
        ),
        ((*TABLE_1, *FIXED, "--gpus", "8.5"), "--gpus H100=8.5: give a whole number of GPUs"),
        (
            (*TABLE_1, *FIXED, "--gpus", "8", "--longest-input-tokens", "10"),
            "--longest-input-tokens 10: the longest of the given prompts has 1000 tokens: give at least that",
        ),
        ((*TABLE_1, *FIXED, "--gpus", "2"), "no prefill and decode replica fit 2 H100: give more GPUs"),
        ((*TABLE_1, *FIXED, "--gpus", "H200=8"), "--gpus H200=8: no profile has the type H200, they have H100"),
        (
            (*TABLE_1, *FIXED, "--gpus", "H100=8,H100=16"),
            "--gpus H100=8,H100=16: H100 is given twice: give each type once",
        ),
        ((*TABLE_1, *FIXED, "--gpus", "H100=many"), "--gpus H100=many: give a type and a number above 0, as H100=8"),
        ((*TABLE_1, *FIXED, "--requests-per-s", "-1"), "--requests-per-s -1: give a number above 0"),
        ((*TABLE_1, *FIXED, "--requests-per-s", "90", "--gpus", "8"), "carry 24.6 requests/s, and --requests-per-s is"),
        ((*TABLE_1, *FIXED, "--gpus", "8", "--ttft-s", "0.1"), "no prefill engine is fit (h100_llama70b_fp8_tp1: the"),
        (
            (*TABLE_1, *FIXED, "--gpus", "8", "--tpot-s", "0.01"),
            "no decode engine is fit (h100_llama70b_fp8_tp2_table_1",
        ),
        (
            (*TABLE_1, *FIXED, "--gpus", "8", "--longest-input-tokens", "30000", "--ttft-s", "99"),
            "30000 tokens, does not fit its KV of 24414 tokens",
        ),
        (
            ("--prefill", h100("tp1"), "--decode", profile("cpu_tiny"), *FIXED, "--gpus", "8"),
            "give profiles of one model",
        ),
        (("--prefill", "none.json", "--decode", h100("tp2"), *FIXED, "--gpus", "8"), "none.json: No such file"),
    ],
)
def test_each_fault_is_named_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert run(monkeypatch, *arguments) == 1
    assert message in capsys.readouterr().err
