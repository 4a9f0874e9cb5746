"""``tandem operators profile``: tables that ``tandem profile --from-operators`` reads, and inputs that are refused."""

import json
from pathlib import Path

import pytest

from autoscale.engines.profile import EngineProfile
from serve_app.cli.main import main

torch = pytest.importorskip("torch")

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
SIZES = ("--max-batch-tokens", "16", "--max-running", "2", "--longest-tokens", "32")


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["tandem", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    return int(stopped.value.code or 0)


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return str(path)


def test_a_machine_becomes_a_profile(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, model: str
) -> None:
    tables, out = tmp_path / "tables", tmp_path / "mine.json"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        args = ("--out", str(tables), "--tp", "1,2", "--budget-s", "6", "--kernels", "torch")
        assert run(monkeypatch, "operators", "profile", model, *args, *SIZES) == 0
    finally:
        torch.set_num_threads(threads)
    text = capsys.readouterr().out
    assert "fastest product" in text
    assert "not measured, rooflines: embedding_all_reduce" in text
    assert "next: tandem profile --from-operators" in text and "--gpu 'cpu'" in text
    closing = ("--gpu", "cpu", "--tables", str(tables), "--dtype", "fp32", "--out", str(out))
    assert run(monkeypatch, "profile", "--from-operators", model, *closing, *SIZES) == 0
    assert EngineProfile.load(out).gpu == "cpu"
    assert run(monkeypatch, "profile", "--from-operators", model, "--gpu", "H100", *closing[2:], *SIZES) == 1
    assert "not of H100: give one of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("gpt-5",), "model 'gpt-5' is not known"),
        (("qwen2-0.5b", "--device", "tpu"), "--device tpu: give cpu or cuda"),
        (("qwen2-0.5b", "--dtype", "int3"), "data type 'int3' is not known"),
        (("qwen2-0.5b", "--dtype", "fp8"), "does not compute in it: give one of fp32, bf16"),
        (("qwen2-0.5b", "--tp", "1,x"), "--tp '1,x': give whole numbers of at least 1"),
        (("qwen2-0.5b", "--tp", "4"), "cannot be divided over 4 GPUs: give some of 1, 2"),
    ],
)
def test_bad_input_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    args: tuple[str, ...],
    message: str,
) -> None:
    assert run(monkeypatch, "operators", "profile", *args, "--out", str(tmp_path / "x")) == 1
    printed = capsys.readouterr().err
    assert message in printed
    assert "Traceback" not in printed


def test_an_unknown_architecture_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["Mamba"]}))
    assert run(monkeypatch, "operators", "profile", str(tmp_path), "--out", str(tmp_path / "x")) == 1
    assert "architecture Mamba is not known" in capsys.readouterr().err
