"""``tandem operators settings``: it writes a valid config that the simulator has checked, and names bad input."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.checks.ray_schema import single_app_config
from serve_app.checks.yaml_checks import load_serve_yaml
from serve_app.cli.main import main

LOAD = ("--requests-per-s", "60", "--input-tokens", "600", "--output-tokens", "60", "--duration", "10")
ROOT = Path(__file__).parents[3]


def document(**roles: dict[str, Any]) -> dict[str, Any]:
    """One group of H100 with four replicas of each role; ``roles``: more fields of a role."""
    pools = {
        role: {"replicas": 4, "placement": {"accelerator_type": "H100"}, **roles.get(role, {})}
        for role in ("prefill", "decode")
    }
    args = {"model": {"id": "m", "source": "hub/m"}, "groups": [{"name": "g0", **pools}]}
    return {"applications": [{"name": "tandem", "import_path": "serve_app.app:build", "args": args}]}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(document()))
    return path


def run(monkeypatch: pytest.MonkeyPatch, config: Path, *arguments: str, model: str = "qwen2-0.5b") -> int:
    command = ["tandem", "operators", "settings", str(config), "--model", model, "--gpu", "H100"]
    monkeypatch.setattr("sys.argv", [*command, *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    return int(stopped.value.code or 0)


def test_the_written_config_is_valid_and_takes_fewer_gpus(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], config: Path, tmp_path: Path
) -> None:
    files = {name: tmp_path / f"new.{name}" for name in ("yaml", "patch", "json")}
    outs = ("--out", str(files["yaml"]), "--patch", str(files["patch"]), "--json", str(files["json"]))
    assert run(monkeypatch, config, *LOAD, *outs) == 0
    text, report = capsys.readouterr().out, json.loads(files["json"].read_text())
    (group,) = single_app_config(load_serve_yaml(files["yaml"])).groups  # vLLM's check is part of the command
    assert group.prefill is not None
    counts = (group.prefill.replicas, group.decode.replicas)
    assert sum(counts) == report["after"]["simulated"]["gpus"] < report["before"]["simulated"]["gpus"] == 8
    assert report["after"]["simulated"]["attained_frac"] >= 0.95
    # The prediction and the simulator agree on a size that both find enough.
    assert report["after"]["predicted"]["attained_frac"] >= 0.9
    assert "before, predicted" in text and "after, simulated" in text and "without it: " in text
    for setting in report["settings"]:
        is_written = setting["setting"] in {each["setting"] for each in report["written"]}
        assert is_written == (setting["fate"] == "written")
        assert not (is_written and setting["verdict"] == "worse")
    operations = json.loads(files["patch"].read_text())
    assert {each["path"].rsplit("/", 1)[1] for each in operations} >= {"replicas"}
    for each in operations:
        assert each["path"].startswith("/applications/0/args/groups/0/")


def test_a_trace_is_scaled_and_fixed_gpus_are_kept(
    monkeypatch: pytest.MonkeyPatch, config: Path, tmp_path: Path
) -> None:
    trace = ("--trace", str(ROOT / "configs/traces/azure_conv_60s.csv"), "--requests-per-s", "60", "--duration", "12")
    assert run(monkeypatch, config, *trace, "--gpus", "3", "--json", str(tmp_path / "new.json")) == 0
    report = json.loads((tmp_path / "new.json").read_text())
    assert report["requests_per_s"] == pytest.approx(60.0, rel=0.05)
    assert report["chosen"]["simulated"]["gpus"] <= 3


def test_with_autoscale_the_ratio_is_written_instead_of_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    whole = document(prefill={"max_replicas": 8}, decode={"max_replicas": 8})
    application = whole["applications"][0]
    application["autoscaling_policy"] = {"policy_function": "autoscale.ray_policy:JointPolicy"}
    policy = {"kind": "queue_depth", "prefill_requests_per_s": 4.0, "decode_requests_per_s": 10.0}
    application["args"]["autoscale"] = {"policy": policy, "pd_ratio": "7:3"}
    config, report = tmp_path / "config.yaml", tmp_path / "new.json"
    config.write_text(yaml.safe_dump(whole))
    assert run(monkeypatch, config, *LOAD, "--json", str(report)) == 0
    written = {each["setting"]: each["after"] for each in json.loads(report.read_text())["written"]}
    assert written["autoscale.pd_ratio"] == "1:1"
    assert not any("replicas" in name for name in written)


def test_a_size_on_which_vllm_would_not_start_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """One H100 holds FP8 weights of 70B and 3,184 tokens of KV: enough for a request, not for ``max_model_len``."""
    config, report = tmp_path / "config.yaml", tmp_path / "new.json"
    load = ("--requests-per-s", "5", "--input-tokens", "512", "--output-tokens", "50", "--duration", "10")
    sizes = []
    for context in (2048, 32768):
        role = {"tensor_parallel_size": 2, "engine_kwargs": {"max_model_len": context}}
        config.write_text(yaml.safe_dump(document(prefill=role, decode=role)))
        assert run(monkeypatch, config, *load, "--dtype", "fp8", "--json", str(report), model="llama-3.1-70b") == 0
        written = {each["setting"]: each["after"] for each in json.loads(report.read_text())["written"]}
        sizes.append(written.get("prefill.tensor_parallel_size", 2))
    assert sizes == [1, 2]
    assert "prefill.tensor_parallel_size 1 is left out: its KV has room for" in " ".join(
        capsys.readouterr().out.split()
    )


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        ({}, (), "no load is given: add --trace, or --requests-per-s"),
        ({}, ("--requests-per-s", "0", *LOAD[2:6]), "--requests-per-s 0: give a number above 0"),
        ({}, (*LOAD, "--tpot-s", "0.0001"), "a step with one request takes"),
        ({}, (*LOAD, "--trace", str(ROOT / "configs/traces/azure_conv_60s.csv")), "--trace gives the lengths"),
        ({"decode": {"placement": {"accelerator_type": "A100"}}}, LOAD, "--gpu is H100, and decode:g0 has"),
        ({"decode": {"engine_kwargs": {"max_num_seqs": "many"}}}, LOAD, "engine_kwargs.max_num_seqs is 'many'"),
        ({"decode": {"pipeline_parallel_size": 2}}, LOAD, "times of operators have no pipeline stages"),
        ({"decode": {"placement": {}}}, LOAD, "runs on CPU cores"),
        ({}, ("--requests-per-s", "5e4", *LOAD[2:]), "the load has 500,000 requests, and 200,000 are the most"),
    ],
)
def test_what_has_no_answer_is_named(
    changes: dict[str, Any],
    arguments: tuple[str, ...],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(document(**changes)))
    assert run(monkeypatch, path, *arguments) == 1
    shown = capsys.readouterr().err
    assert message in " ".join(shown.split())
    assert "Traceback" not in shown


def test_requests_longer_than_the_model_takes_are_refused_where_the_config_has_no_length(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], config: Path, tmp_path: Path
) -> None:
    shape = json.loads((ROOT / "configs/operators/models/qwen2-0.5b.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**shape, "max_position_embeddings": 512}))
    assert run(monkeypatch, config, *LOAD, model=str(tmp_path / "config.json")) == 1
    message = "all requests are longer than the model's max_position_embeddings 512: give shorter lengths"
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_model_other_than_that_of_the_config_is_refused_where_its_files_are_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    source = tmp_path / "served"
    source.mkdir()
    (source / "config.json").write_text((ROOT / "configs/operators/models/qwen2-7b.json").read_text())
    served, path = document(), tmp_path / "config.yaml"
    served["applications"][0]["args"]["model"]["source"] = str(source)
    path.write_text(yaml.safe_dump(served))
    assert run(monkeypatch, path, *LOAD) == 1
    message = f"--model qwen2-0.5b has hidden_size 896, and the config's model {source} has 3584: give --model {source}"
    assert message in " ".join(capsys.readouterr().err.split())
