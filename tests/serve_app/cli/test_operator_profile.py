"""``tandem profile --from-operators``: a profile that other commands read, and inputs that are refused."""

import json
from pathlib import Path

import pytest

from autoscale.engines.profile import EngineProfile
from serve_app.cli.main import main

ROOT = Path(__file__).parents[3]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["tandem", "profile", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    return int(stopped.value.code or 0)


def test_a_shipped_model_becomes_a_profile(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "llama.json"
    sizes = ("--tp", "4", "--dtype", "fp8", "--longest-tokens", "2048")
    assert run(monkeypatch, "--from-operators", "llama-3.1-70b", "--gpu", "H100", *sizes, "--out", str(out)) == 0
    text = capsys.readouterr().out
    profile = EngineProfile.load(out)
    assert (profile.gpu, profile.gpus, profile.name) == ("H100", 4, "llama")
    assert profile.precision is not None
    assert (profile.precision.quantization, profile.precision.kv_cache_dtype) == ("fp8", "fp8")
    assert "attention" in text
    assert "requests; computed" in text
    assert "not measured on this GPU, estimated: " in text


def test_a_config_json_of_ones_own_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = json.loads((ROOT / "configs/operators/models/qwen2-7b.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    sizes = ("--longest-tokens", "1024", "--max-running", "4")
    for model in (tmp_path, tmp_path / "config.json"):
        args = ("--from-operators", str(model), "--gpu", "A100", "--out", str(tmp_path / "two.json"))
        assert run(monkeypatch, *args, *sizes) == 0
    two = EngineProfile.load(tmp_path / "two.json")
    args = ("--from-operators", "qwen2-7b", "--gpu", "A100", "--out", str(tmp_path / "all.json"))
    assert run(monkeypatch, *args, *sizes) == 0
    whole = EngineProfile.load(tmp_path / "all.json")
    assert two.decode.seconds_for(1, 100) < whole.decode.seconds_for(1, 100) / 5
    assert two.kv_tokens > 10 * whole.kv_tokens


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--from-operators", "llama-3.1-8b", "--out", "x.json"), "--from-operators needs --gpu TYPE and --out FILE"),
        (("--from-operators", "gpt-5", "--gpu", "H100", "--out", "x.json"), "model 'gpt-5' is not known"),
        (("--from-operators", "llama-3.1-8b", "--gpu", "B300", "--out", "x.json"), "GPU 'B300' is not known"),
        (
            ("--from-operators", "llama-3.1-8b", "--gpu", "H100", "--tp", "3", "--out", "x.json"),
            "cannot be divided over 3 GPUs",
        ),
        (
            ("--from-operators", "llama-3.1-70b", "--gpu", "A100", "--out", "x.json"),
            "leave no room for KV on 1 GPUs",
        ),
        (
            ("--from-operators", "llama-3.1-8b", "--gpu", "H100", "--dtype", "int4", "--out", "x.json"),
            "data type 'int4' is not known",
        ),
        (("--from-operators", "none.json", "--gpu", "H100", "--out", "x.json"), "none.json: No such file"),
        ((), "give a CONFIG to measure, or --from-operators MODEL"),
    ],
)
def test_wrong_input_is_named(
    args: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, *args) == 1
    assert message in capsys.readouterr().err.replace("\n", " ")
    assert not (tmp_path / "x.json").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not JSON"),
        ("[]", "expected the fields of a config.json, got list"),
        ('{"architectures": ["MambaForCausalLM"]}', "architecture MambaForCausalLM is not known"),
    ],
)
def test_a_wrong_config_is_named(
    content: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    args = ("--from-operators", str(path), "--gpu", "H100", "--out", str(tmp_path / "x.json"))
    assert run(monkeypatch, *args) == 1
    assert message in capsys.readouterr().err.replace("\n", " ")
