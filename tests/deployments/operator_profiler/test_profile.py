"""A run on the CPU: tables that the planner reads, a run that goes on, and refusals. One small model, measured once."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from autoscale.operators.costs import SourceKind
from autoscale.operators.device import load_device, load_gpu
from autoscale.operators.engine_profile import engine_profile
from autoscale.operators.graph import OperatorGraph, OperatorPrecision, operator_graph
from autoscale.operators.kinds import Pass
from autoscale.operators.step_times import EngineSettings, StepTimes
from autoscale.operators.tables import load_operator_tables
from autoscale.operators.times import OperatorTimes
from deployments.operator_profiler import measure
from deployments.operator_profiler.device import ProfilingError, check_device
from deployments.operator_profiler.profile import Outcome, library_of, profile_operators
from deployments.operator_profiler.series import Sizes

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
SIZES = Sizes(max_batch_tokens=16, max_running=4, longest_tokens=32)


def graph(**fields: int) -> OperatorGraph:
    return operator_graph(CONFIG | fields, OperatorPrecision(weights="fp32", kv="fp32"))


def run(folder: Path, budget_s: float, one: OperatorGraph | None = None, tp: tuple[int, ...] = (1,)) -> Outcome:
    return profile_operators(one or graph(), "small", "cpu", tp, SIZES, budget_s, folder, lambda text: None, "torch")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads wait for each other where other work shares the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome, str]:
    """A folder after one run, what came out, and its points."""
    folder = tmp_path_factory.mktemp("tables")
    outcome = run(folder, 12.0)
    return folder, outcome, (folder / measure.POINTS_FILE).read_text()


def test_all_operators_of_the_layer_get_a_table(measured: tuple[Path, Outcome, str]) -> None:
    folder, outcome, _ = measured
    assert set(outcome.rows) == {"gemm", "decode_attention", "chunk_attention", "prompt_attention", "pointwise"}
    tables = load_operator_tables(folder)
    # QKV: 4 + 2 x 2 heads of 8.
    assert {*tables.gemm["fp32"]} == {(64, 32), (32, 32), (128, 32), (32, 64)}
    assert set(tables.pointwise) == {"embedding", "norm", "qk_norm", "rotary", "activation", "sampler"}
    assert outcome.measured >= sum(outcome.rows.values())
    assert (outcome.reused, outcome.left_out, outcome.other_operators) == (0, {}, ())


def test_a_profile_of_this_machine_has_only_measured_operators(measured: tuple[Path, Outcome, str]) -> None:
    folder, _, _ = measured
    times = OperatorTimes(load_gpu("cpu", folder), load_operator_tables(folder))
    settings = EngineSettings(parallel=1, max_batch_tokens=16, max_running=4, longest_tokens=32)
    profile = engine_profile("mine", "small", graph(), times, settings)
    assert profile.gpu == "cpu"
    assert profile.precision is not None and profile.precision.dtype == "float32"
    assert profile.decode.seconds_for(4, 32) > 0
    steps = StepTimes(graph(), times, settings)
    steps.seconds(Pass(decoding=4, context_tokens=32))
    steps.seconds(Pass(prompts=1, new_tokens=16))
    assert set(steps.kinds.values()) <= {SourceKind.MEASURED, SourceKind.INTERPOLATED}


def test_a_batch_of_a_cpu_is_not_padded(measured: tuple[Path, Outcome, str]) -> None:
    folder, _, _ = measured
    gpu, tables = load_gpu("cpu", folder), load_operator_tables(folder)
    product = next(each for each in graph().operators if each.name == "down_proj")
    five = OperatorTimes(gpu, tables).time(product, Pass(decoding=5), 1)
    curve = tables.gemm["fp32"][32, 64]
    assert five.seconds == curve.at(5).value
    padding = OperatorTimes(replace(gpu, is_padding=True), tables).time(product, Pass(decoding=5), 1)
    assert padding.seconds != five.seconds


def test_the_device_is_described_beside_the_tables(measured: tuple[Path, Outcome, str]) -> None:
    folder, _, _ = measured
    facts = load_device(folder)
    assert facts.kind == "cpu"
    assert "peak_power_w" in facts.assumed and "reached_bytes_per_s" not in facts.assumed
    metadata = json.loads((folder / "metadata.json").read_text())
    assert (metadata["model"], metadata["dtype"], metadata["torch"]) == ("small", "fp32", torch.__version__)
    assert sum(metadata["points_by_rounds"].values()) == sum(metadata["rows"].values())
    assert len(metadata["runs"]) == 1


def test_a_run_goes_on_and_measures_no_round_twice(measured: tuple[Path, Outcome, str], tmp_path: Path) -> None:
    _, first, text = measured
    lines = text.splitlines(keepends=True)
    (tmp_path / measure.POINTS_FILE).write_text("".join(lines[:-10]))
    again = run(tmp_path, 3.0)
    assert again.reused == first.measured - 10
    after = (tmp_path / measure.POINTS_FILE).read_text()
    assert after.startswith("".join(lines[:-10]))
    keys = [tuple(json.loads(line)["at"]) for line in after.splitlines()[1:]]
    assert len(keys) == len(set(keys)) == again.reused + again.measured
    assert {key[:-1] for key in keys} >= {tuple(json.loads(line)["at"])[:-1] for line in lines[1:]}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"kernels": "vllm"}, "kernels, vllm then and torch now"),
        ({"dtype": "bf16"}, "dtype, bf16 then and fp32 now"),
        ({"torch": "1.0"}, r"torch, 1\.0 then"),
        ({}, "shape"),
    ],
)
def test_points_of_another_run_are_refused_by_name(
    measured: tuple[Path, Outcome, str], tmp_path: Path, changed: dict[str, str], message: str
) -> None:
    first, _, _ = measured[2].partition("\n")
    header = {"engines": json.loads(first)["engines"] | changed}
    (tmp_path / measure.POINTS_FILE).write_text(json.dumps(header) + "\n")
    one = graph() if changed else graph(num_hidden_layers=3)
    with pytest.raises(ValueError, match=rf"points of another run \(differ: {message}.*remove the file, or give"):
        run(tmp_path, 1.0, one)


def test_what_cannot_be_measured_here_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ProfilingError, match=r"--dtype fp8: .* does not compute in it: give one of fp32, bf16"):
        check_device("cpu", "fp8")
    with pytest.raises(ProfilingError, match="--tp 3: the model cannot be divided over 3 GPUs: give some of 1, 2"):
        run(tmp_path, 1.0, tp=(1, 3))
    (tmp_path / "file").write_text("")
    with pytest.raises(ProfilingError, match=r"--out .*file: File exists: give a folder that can be written"):
        run(tmp_path / "file", 1.0)
    if not torch.cuda.is_available():
        with pytest.raises(ProfilingError, match=r"--device cuda: torch .* sees no GPU here: give --device cpu"):
            check_device("cuda", "bf16")
    with pytest.raises(ProfilingError, match="--kernels magma: give auto, torch or vllm"):
        library_of("magma", "cpu")
    with pytest.raises(ProfilingError, match=r"vLLM's kernels cannot be used on cuda .*: give torch"):
        library_of("vllm", "cuda")
    assert library_of("auto", "cuda") == "torch"
    monkeypatch.setattr(measure, "free_bytes", lambda device: 1000.0)
    with pytest.raises(ProfilingError, match=r"has 0\.00 GB of weights, and only 0\.00 GB may be used"):
        run(tmp_path / "new", 1.0)


def test_a_point_that_takes_too_long_is_left_out_with_its_reason(tmp_path: Path) -> None:
    large = graph(intermediate_size=16_384, hidden_size=1024)
    outcome = profile_operators(
        large, "large", "cpu", (1,), replace(SIZES, max_batch_tokens=65_536), 1.0, tmp_path, lambda text: None, "torch"
    )
    assert not outcome.is_complete
    assert any("of the budget" in reason for reason in outcome.left_out.values())
    assert all(math.isfinite(value) for value in load_device(tmp_path).reached_flops_per_s.values())
