"""What vLLM says about the arguments of an engine before it starts."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deployments.argument_table import INSTEAD, OF_ENGINE, OF_SERVER
from serve_app.local.tiny_model import build_tiny_model
from tests.installed_source import installed_source

ARGUMENTS = "vllm/entrypoints/launchers/cli_args.py"
# Files of vLLM that a replica runs when Ray Serve LLM starts its engine and serves vLLM's application.
SERVED = (
    "launchers/api_server/app_state.py",
    "generate/api_router.py",
    "scale_out/factories.py",
    "pooling/factories.py",
    "serve/tokenize/api_router.py",
    "serve/exception_handling/handlers/exception.py",
)
# Arguments that the state of a replica takes, and that do nothing here: `INSTEAD` says why.
READ_FOR_NOTHING = {"tokens_only", "enable_server_load_tracking", "cohere_is_reasoning_model", "lora_modules"}
CHECK = """
import json, sys
from deployments.vllm_seam.engine_arguments import PoolArguments, _first_refusal
pools = json.load(sys.stdin)
print(json.dumps([_first_refusal([PoolArguments(**pool)]) for pool in pools]))
"""
# Logs go to standard error: standard output is for the answer.
QUIET = {**os.environ, "VLLM_LOGGING_STREAM": "ext://sys.stderr", "VLLM_PLUGINS": ""}
PLAIN = {"dtype": "float32", "max_model_len": 1024, "kv_cache_memory_bytes": 100_000_000}

# Values that vLLM takes: one for each argument that it reads into a class, and others with mappings inside.
TAKEN: list[dict[str, Any]] = [
    {"reasoning_config": {"reasoning_start_str": "<think>", "reasoning_end_str": "</think>"}},
    {"reasoning_parser": "deepseek_v3", "structured_outputs_config": {"backend": "xgrammar"}},
    {"compilation_config": {"mode": 0, "pass_config": {"fuse_norm_quant": False}}},
    {"attention_config": {"backend": "CPU_ATTN"}},
    {"kernel_config": {"enable_flashinfer_autotune": False}},
    {"mamba_config": {}, "ir_op_priority": {"rms_norm": ["native"]}},
    {"eplb_config": {"window_size": 10}, "ec_manager_config": {}},
    {"pooler_config": {"pooling_type": "LAST"}, "runner": "pooling"},
    {"speculative_config": {"method": "ngram", "num-speculative-tokens": 2, "prompt_lookup_max": 3}},
    {"limit_mm_per_prompt": {"image": {"count": 1, "width": 2}, "audio": 1}, "media_io_kwargs": {"image": {"a": 1}}},
    {"override_generation_config": {"temperature": 0}, "default_chat_template_kwargs": {"enable_thinking": True}},
    {"lora_modules": [{"name": "a", "path": "/a"}], "enable_lora": True},
]
# Values that it refuses, and what the message says.
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_model_length": 1}, "vLLM has no argument 'max_model_length'; did you mean 'max_model_len'?"),
    (
        {"reasoning_config": {"reasoning_start": "<think>"}},
        "engine_kwargs.reasoning_config: vLLM has no 'reasoning_start' there; did you mean 'reasoning_start_str'?",
    ),
    (
        {"compilation_config": {"pass_config": {"fuse_nrm_quant": True}}},
        "engine_kwargs.compilation_config.pass_config: vLLM has no 'fuse_nrm_quant' there; did you mean "
        "'fuse_norm_quant'?",
    ),
    ({"reasoning_config": {"reasoning-start-str": "<think>"}}, "did you mean 'reasoning_start_str'?"),
    ({"speculative_config": {"num_speculative_token": 2}}, "did you mean 'num_speculative_tokens'?"),
    ({"limit_mm_per_prompt": {"image": {"widht": 2}}}, "engine_kwargs.limit_mm_per_prompt.image: vLLM has no 'widht'"),
    (
        {"structured_outputs_config": {"backend": "own"}},
        "engine_kwargs.structured_outputs_config.backend: Input should",
    ),
    (
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": -2, "prompt_lookup_max": 3}},
        "engine_kwargs.speculative_config.num_speculative_tokens: Input should be greater than 0",
    ),
    ({"reasoning_config": "<think>"}, "engine_kwargs.reasoning_config: Input should be a dictionary"),
    ({"lora_modules": [{"nam": "a", "path": "/a"}]}, "engine_kwargs.lora_modules.0.name: Field required"),
    ({"enable_log_outputs": "perhaps"}, "engine_kwargs.enable_log_outputs: Input should be a valid boolean"),
    ({"enable_auto_tool_choice": True}, "--enable-auto-tool-choice requires --tool-call-parser"),
    ({"tool_call_parser": "hermess"}, "engine_kwargs.tool_call_parser: vLLM has no parser 'hermess'; did you mean"),
    ({"reasoning_parser": "qwen"}, "engine_kwargs.reasoning_parser: vLLM has no parser 'qwen'; did you mean 'qwen3'?"),
    ({"tool_call_parser": "own", "tool_parser_plugin": "/none.py"}, "vLLM has no parser 'own'"),
    ({"chat_template": "./chat.jinja"}, "./chat.jinja"),
    (
        {"hf_overrides": {"architectures": ["LlamaForSequenceClassification"]}},
        "the model is a pooling model: set runner: pooling",
    ),
]


def fields(source: str, name: str) -> list[str]:
    """Names of the fields of a class in a source, without those of its base."""
    (found,) = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == name]
    return [
        line.target.id for line in found.body if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    ]


def test_every_argument_of_vllm_works_or_is_refused_with_what_to_write_instead() -> None:
    engine_source, server_source = installed_source("vllm/engine/arg_utils.py"), installed_source(ARGUMENTS)
    engine = fields(engine_source, "EngineArgs") + fields(engine_source, "AsyncEngineArgs")
    server = fields(server_source, "BaseFrontendArgs") + fields(server_source, "FrontendArgs")
    options = re.findall(r'parser\.add_argument\(\s*"(?:--)?([\w-]+)"', server_source)
    names = {name.replace("-", "_") for name in (*engine, *server, *options)}
    assert sorted(names - {*INSTEAD, *OF_SERVER, *OF_ENGINE}) == [], "decide in deployments/argument_table.py"
    assert sorted({*INSTEAD, *OF_SERVER, *OF_ENGINE} - names) == [], "vLLM has them no more"
    assert set(OF_SERVER) <= set(server)
    assert set(OF_ENGINE) <= set(engine)


def test_an_argument_of_the_server_works_if_what_a_replica_runs_reads_it() -> None:
    source = "\n".join(installed_source(f"vllm/entrypoints/{path}") for path in SERVED)
    read = set(re.findall(r'args\.(\w+)|args,\s*"(\w+)"', source))
    names = {name for pair in read for name in pair if name}
    server_source = installed_source(ARGUMENTS)
    server = {*fields(server_source, "BaseFrontendArgs"), *fields(server_source, "FrontendArgs")}
    imported_here = {"tool_parser_plugin"}
    assert names & server == (set(OF_SERVER) | READ_FOR_NOTHING) - imported_here


@pytest.fixture(name="answers", scope="module")
def _answers(tmp_path_factory: pytest.TempPathFactory) -> list[str | None]:
    """What vLLM says about each of ``TAKEN`` and ``REFUSED``, in one process: vLLM takes seconds to import."""
    folder = tmp_path_factory.mktemp("model")
    build_tiny_model(folder)
    sizes = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
    kwargs = [*TAKEN, *(each for each, _ in REFUSED)]
    pools = [{"where": "p", "kwargs": {**PLAIN, **each}, "model": str(folder), "sizes": sizes} for each in kwargs]
    done = subprocess.run(
        [sys.executable, "-c", CHECK],
        cwd=Path(__file__).parents[3],
        input=json.dumps(pools),
        env=QUIET,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers: list[str | None] = json.loads(done.stdout)
    return answers


@pytest.mark.vllm
def test_nested_arguments_are_taken(answers: list[str | None]) -> None:
    assert dict(zip(map(str, TAKEN), answers, strict=False)) == dict.fromkeys(map(str, TAKEN))


@pytest.mark.vllm
@pytest.mark.parametrize("i", range(len(REFUSED)))
def test_a_wrong_value_is_named_with_its_path(answers: list[str | None], i: int) -> None:
    answer, (_, said) = answers[len(TAKEN) + i], REFUSED[i]
    assert answer is not None
    assert answer.startswith("p: ")
    assert said in answer
    assert len(answer) <= 410


_AS_RAY_READS = """
import json
from ray.llm._internal.serve.engines.vllm.vllm_engine import _normalize_vllm_engine_kwargs
from deployments.vllm_seam.nested_arguments import parse_nested
kwargs = {
    "max_num_seqs": 8,
    "reasoning_config": {"reasoning_start_str": "<think>"},
    "structured_outputs_config": {"backend": "xgrammar"},
    "compilation_config": {"mode": 0, "pass_config": {"fuse_norm_quant": False}},
    "pooler_config": {"pooling_type": "LAST"},
    "speculative_config": {"method": "ngram"},
    "limit_mm_per_prompt": {"image": 1},
}
ours, rays = parse_nested(kwargs), _normalize_vllm_engine_kwargs(kwargs)
print(json.dumps([ours == rays, [type(value).__name__ for value in ours.values()]]))
"""


@pytest.mark.vllm
def test_contract_nested_arguments_parse_nested(run_python: Any) -> None:
    is_equal, kinds = run_python(_AS_RAY_READS, env=QUIET)
    assert is_equal
    assert kinds == [
        "int",
        "ReasoningConfig",
        "StructuredOutputsConfig",
        "CompilationConfig",
        "PoolerConfig",
        "dict",
        "dict",
    ]


def test_contract_nested_arguments_check_nested_names() -> None:
    for name in ("SpeculativeConfig", "DiffusionConfig"):
        assert f'"{name}"' in installed_source("vllm/config/__init__.py")
    assert "class QuantizationConfigArgs:" in installed_source("vllm/config/quantization.py")
    for name in ("Image", "Video", "Audio"):
        assert f"class {name}DummyOptions(" in installed_source("vllm/config/multimodal.py")


def test_contract_parser_plugins_import_parser_plugins() -> None:
    assert "def import_tool_parser(cls, plugin_path: str)" in installed_source(
        "vllm/tool_parsers/abstract_tool_parser.py"
    )
    reasoning = installed_source("vllm/reasoning/abs_reasoning_parsers.py")
    assert "def import_reasoning_parser(cls, plugin_path: str)" in reasoning


def test_contract_parser_plugins_check_parsers() -> None:
    for path in ("tool_parsers/abstract_tool_parser.py", "reasoning/abs_reasoning_parsers.py"):
        assert "def list_registered(cls)" in installed_source(f"vllm/{path}")
