"""How vLLM's own tests are made ready, and what is told about them."""

from tests.lab.compat.pytest_plugin.standing_server import missing
from tests.lab.compat.vllm_source import with_tiny
from tests.lab.compat.vllm_tests import lost, table


def test_models_in_constants_become_the_tiny_one() -> None:
    source = 'MODEL_NAME = "Qwen/Qwen3-0.6B"\nOTHER = "Qwen/Qwen3-0.6B-FP8"\nclient.create(model="Qwen/Qwen3-0.6B")\n'
    assert with_tiny(source) == ('MODEL_NAME = "tiny"\nOTHER = "Qwen/Qwen3-0.6B-FP8"\nclient.create(model="tiny")\n')


def test_the_model_of_a_server_becomes_the_tiny_one() -> None:
    assert with_tiny('RemoteOpenAIServer(\n    "Qwen/Qwen3-0.6B", args)') == 'RemoteOpenAIServer(\n    "tiny", args)'


def test_arguments_that_the_standing_server_lacks_are_told() -> None:
    given = ["--enable-auto-tool-choice", "--tool-call-parser=hermes"]
    assert missing(["--dtype", "bfloat16", "--enforce-eager", "--enable-auto-tool-choice"], given) == []
    assert missing(["--tool-call-parser", "hermes"], given) == []
    assert missing(["--tool-call-parser", "mistral"], given) == ["--tool-call-parser mistral"]
    assert missing(["--api-key", "x", "--uds=/a"], given) == ["--api-key x", "--uds /a"]


def test_what_vllm_passes_and_tandem_does_not_is_lost() -> None:
    vllm = {"a": ("passed", ""), "b": ("passed", ""), "c": ("failed", "x"), "d": ("passed", "")}
    tandem = {"a": ("passed", ""), "b": ("failed", "one\nE  404\n"), "c": ("failed", "x")}
    assert lost(vllm, tandem) == {"b": "failed: E  404", "d": "missing: "}


def test_the_table_counts_files_and_all() -> None:
    vllm = {"tests/entrypoints/f.py::a": ("passed", ""), "tests/entrypoints/f.py::b": ("skipped", "Skipped: no GPU")}
    text = table({"vllm": vllm, "remote": {"tests/entrypoints/f.py::a": ("failed", "E  404")}})
    assert "| f.py | 2 | 1 | 0 |" in text
    assert "| **all** | 2 | 1 | 0 |" in text
    assert "- `f.py::a`: failed: E  404" in text
    assert "- 1: no GPU" in text
