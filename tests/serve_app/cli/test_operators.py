"""``tandem operators plan``: its table, its JSON, and inputs that are refused or marked."""

import csv
import gzip
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from autoscale.operators.contention import load_pairs
from autoscale.operators.costs import Phase
from autoscale.operators.demand import Demand
from autoscale.operators.evaluation import Assumptions
from autoscale.operators.gpu import gpu_named
from autoscale.operators.graph import operator_graph
from autoscale.operators.measured_costs import ModelCosts
from autoscale.operators.option_table import option_table
from autoscale.operators.options import Limits, batches_up_to
from autoscale.operators.planners import PLANNERS
from autoscale.operators.tables import load_operator_tables
from autoscale.operators.times import OperatorTimes
from serve_app.cli.main import main

CONFIGS = Path(__file__).parents[3] / "configs" / "operators"
LOAD = ("--requests-per-s", "60", "--input-tokens", "1024", "--output-tokens", "200")
QWEN = ("qwen2-7b", "--gpu", "A100")


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["tandem", "operators", "plan", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    return int(stopped.value.code or 0)


def document(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *arguments: str) -> dict[str, Any]:
    out = tmp_path / "plan.json"
    assert run(monkeypatch, *arguments, "--json", str(out)) == 0
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run(monkeypatch, *arguments) == 1
    return capsys.readouterr().err.replace("\n", " ")


@pytest.fixture(scope="module")
def times() -> OperatorTimes:
    return OperatorTimes(gpu_named("A100"), load_operator_tables(CONFIGS / "tables" / "A100"))


@pytest.mark.parametrize(
    ("phase", "rate", "length", "most"), [("prefill", 60.0, 1024, 16), ("decode", 60.0 * 200, 1024 + 100, 256)]
)
def test_the_file_has_what_the_planners_say(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    times: OperatorTimes,
    phase: str,
    rate: float,
    length: int,
    most: int,
) -> None:
    planners = ("--planner", "model", "--planner", "search")
    found = document(monkeypatch, tmp_path, *QWEN, *LOAD, "--phase", phase, *planners)
    part = found["phases"][phase]
    config = json.loads((CONFIGS / "models" / "qwen2-7b.json").read_text())
    costs = ModelCosts(operator_graph(config), times, Phase(phase))
    alone_s = costs.pass_s(parallel=1, length_tokens=length, batch=1)
    assert part["objective"]["slo_s"] == pytest.approx(4 * alone_s, rel=1e-9)
    assert part["objective"]["is_default"]
    table = option_table(
        costs,
        demand=Demand(passes_per_s=rate, length_tokens=length, slo_s=part["objective"]["slo_s"]),
        phase=Phase(phase),
        gpu=gpu_named("A100"),
        limits=Limits(batches=batches_up_to(most)),
    )
    assumptions = Assumptions(contention=load_pairs(CONFIGS / "contention" / "h100_80gb_pairs.csv"))
    for name in ("model", "search"):
        plan, row = PLANNERS[name](table, assumptions), part["planners"][name]
        assert (row["gpus"], row["bottleneck"]) == (plan.gpus, plan.bottleneck)
        assert row["latency_s"] == pytest.approx(plan.evaluation.latency_s, rel=1e-9)
        replicas = {one["name"]: one["replicas"] for one in row["operators"]}
        assert replicas == {each: setting.replicas for each, setting in plan.settings.items()}
        assert [one["name"] for one in row["operators"] if one["is_bottleneck"]] == [plan.bottleneck]
    gpus = {name: row["gpus"] for name, row in part["planners"].items()}
    assert part["planners"]["search"]["saved"]["gpus_frac"] == pytest.approx(1 - gpus["search"] / gpus["model"])


def test_the_table_has_all_planners_the_objectives_and_the_marks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    assert run(monkeypatch, *QWEN, *LOAD) == 0
    text = capsys.readouterr().out
    for words in ("model level", "greedy (ours)", "search (ours)", "by default 4 times a prompt of 1024 tokens"):
        assert words in text
    assert "12,000 output tokens/s, 1124 tokens of context" in text
    assert text.count("note: estimated") == 2
    lines = {line.split()[0]: line for line in text.splitlines() if line.startswith((" attention", " o_proj"))}
    assert "roofline !" in lines["attention"]
    assert "!" not in lines["o_proj"]


def test_given_objectives_are_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arguments = (*QWEN, *LOAD, "--planner", "model", "--ttft-s", "0.5", "--tpot-s", "0.03")
    phases = document(monkeypatch, tmp_path, *arguments)["phases"]
    assert [phases[name]["objective"]["slo_s"] for name in ("prefill", "decode")] == [0.5, 0.03]
    assert not phases["prefill"]["objective"]["is_default"]


def test_a_model_larger_than_the_tp_limit_has_operator_plans_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    load = ("--requests-per-s", "1", "--input-tokens", "512", "--phase", "prefill", "--tp", "1")
    planners = ("--planner", "model", "--planner", "search")
    part = document(monkeypatch, tmp_path, "llama-3.1-70b", "--gpu", "A100", *load, *planners)["phases"]["prefill"]
    assert list(part["planners"]) == ["search"]
    assert "does not fit into 1 A100" in part["refusals"]["model"]
    assert part["planners"]["search"]["saved"] is None
    assert {one["parallel"] for one in part["planners"]["search"]["operators"]} == {1}


def test_shares_of_sms_are_planned_with_mps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arguments = (*QWEN, *LOAD, "--phase", "prefill", "--planner", "search", "--mps")
    found = document(monkeypatch, tmp_path, *arguments)
    assert found["has_sm_shares"]
    shares = {one["sm_share_percent"] for one in found["phases"]["prefill"]["planners"]["search"]["operators"]}
    assert min(shares) < 100


def test_a_rate_of_zero_keeps_one_instance_and_is_marked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    load = ("--requests-per-s", "0", "--input-tokens", "512", "--phase", "prefill")
    part = document(monkeypatch, tmp_path, "qwen2-0.5b", "--gpu", "A100", *load)["phases"]["prefill"]
    assert {row["gpus"] for row in part["planners"].values()} == {1}
    assert any(note.startswith("the rate is 0: one instance") for note in part["notes"])


def test_fp8_without_tables_is_marked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    arguments = (*QWEN, *LOAD, "--phase", "prefill", "--planner", "search", "--dtype", "fp8")
    part = document(monkeypatch, tmp_path, *arguments)["phases"]["prefill"]
    assert part["estimated"]["gate_up_proj"] == "roofline"
    assert any(note.startswith("estimated") and "100%" in note for note in part["notes"])


def test_a_prompt_beyond_the_model_is_marked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = json.loads((CONFIGS / "models" / "qwen2-0.5b.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 32768}))
    load = ("--requests-per-s", "0.1", "--input-tokens", "40000", "--phase", "prefill", "--planner", "model")
    part = document(monkeypatch, tmp_path, str(tmp_path), "--gpu", "A100", *load)["phases"]["prefill"]
    assert any(note.startswith("40000 tokens are more than the model takes") for note in part["notes"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gpt-5", "--gpu", "A100", *LOAD), "model 'gpt-5' is not known"),
        (("qwen2-7b", "--gpu", "B300", *LOAD), "GPU 'B300' is not known"),
        ((*QWEN, *LOAD, "--dtype", "int4"), "data type 'int4' is not known"),
        (
            (*QWEN, *LOAD, "--planner", "oracle"),
            "--planner oracle: give one of model, paper_greedy, greedy, search, steady, apart",
        ),
        ((*QWEN, *LOAD, "--phase", "all"), "--phase all: give one of prefill, decode, both"),
        ((*QWEN, *LOAD[:4]), "decode needs the length of answers: add --output-tokens"),
        ((*QWEN, *LOAD[2:]), "no load is given: add --requests-per-s"),
        ((*QWEN, *LOAD, "--requests-per-s", "nan"), "--requests-per-s nan: give a number from 0"),
        ((*QWEN, *LOAD, "--requests-per-s", "-1"), "--requests-per-s -1: give a number from 0"),
        ((*QWEN, *LOAD, "--input-tokens", "0"), "--input-tokens 0: give a number of tokens, 1 or more"),
        ((*QWEN, *LOAD, "--ttft-s", "0"), "--ttft-s 0: give a number above 0"),
        (
            (*QWEN, *LOAD, "--ttft-s", "0.01"),
            "prefill: the objective is 0.01 s, and one pass that never waits takes 0.0",
        ),
        ((*QWEN, *LOAD, "--tpot-s", "0.001"), "decode: the objective is 0.001 s, and one pass that never waits takes"),
        (
            ("llama-3.1-70b", "--gpu", "A100", *LOAD, "--tp", "1", "--planner", "model"),
            "prefill: the model does not fit into 1 A100 GPUs",
        ),
    ],
)
def test_wrong_input_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert message in refusal(monkeypatch, capsys, *arguments)


def test_an_unknown_architecture_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    message = refusal(monkeypatch, capsys, str(tmp_path), "--gpu", "A100", *LOAD)
    assert "architecture MambaForCausalLM is not known" in message


def test_a_model_beyond_a_node_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = json.loads((CONFIGS / "models" / "llama-3.1-70b.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 800}))
    message = refusal(monkeypatch, capsys, str(tmp_path), "--gpu", "A100", *LOAD)
    assert "prefill: the weights take 13" in message
    assert "8 A100, the largest group, have" in message


def test_a_nan_in_a_table_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "A100"
    shutil.copytree(CONFIGS / "tables" / "A100", folder)
    with gzip.open(folder / "gemm.csv.gz", "rt", newline="") as lines:
        rows = list(csv.DictReader(lines))
    rows[3]["time_us"] = "nan"
    with gzip.open(folder / "gemm.csv.gz", "wt", newline="") as lines:
        writer = csv.DictWriter(lines, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    message = refusal(monkeypatch, capsys, *QWEN, *LOAD, "--tables", str(folder))
    assert "gemm.csv.gz: line 5: time_us is 'nan'" in message
