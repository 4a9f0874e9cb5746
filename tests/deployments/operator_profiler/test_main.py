"""The measurement runs on a machine that has nothing but torch, numpy and Python's own modules."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

ROOT = Path(__file__).parents[3]
# What the machine lacks: an import of one of them fails.
ABSENT = ("pydantic", "ray", "vllm", "typer", "rich", "prometheus_client", "yaml")
SCRIPT = f"""
import runpy, sys
for name in {ABSENT!r}:
    sys.modules[name] = None
import torch
torch.set_num_threads(1)
runpy.run_module("deployments.operator_profiler", run_name="__main__")
"""
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 64,
}


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", SCRIPT, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=100)


def test_it_needs_torch_and_numpy_alone(tmp_path: Path) -> None:
    (tmp_path / "small.json").write_text(json.dumps(CONFIG))
    sizes = ("--max-batch-tokens", "4", "--max-running", "1", "--longest-tokens", "32", "--budget-s", "1")
    done = run(str(tmp_path / "small.json"), "--device", "cpu", "--out", str(tmp_path / "out"), *sizes)
    assert done.returncode == 0, done.stderr
    assert "rows {'" in done.stdout
    assert json.loads((tmp_path / "out" / "metadata.json").read_text())["kernels"] == "torch"


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    done = run(str(tmp_path / "none.json"), "--device", "cpu", "--out", str(tmp_path / "out"))
    assert done.returncode == 1
    assert "none.json" in done.stderr and "Traceback" not in done.stderr
