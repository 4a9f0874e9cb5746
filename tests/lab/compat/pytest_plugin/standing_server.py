"""A plugin of pytest that gives vLLM's own tests a server which already runs, instead of one that each of them starts.

vLLM's tests are a package named ``tests``, as ours are. So this file is loaded by its own name, and imports none of
ours.
"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Self

import huggingface_hub
import pytest

URL, OUTCOMES, GIVEN, NAMES = "COMPAT_URL", "COMPAT_OUTCOMES", "COMPAT_GIVEN", "COMPAT_NAMES"
# Arguments without effect on what the tests look at, whatever their value: this machine has its own.
_INDIFFERENT = frozenset({
    "--dtype", "--max-model-len", "--max_model_len", "--enforce-eager", "--max-num-seqs", "--gpu-memory-utilization",
    "--served-model-name", "--seed", "--port", "--host", "--max-num-batched-tokens", "--enable-chunked-prefill",
    "--no-enable-prefix-caching", "--trust-remote-code", "--generation-config", "--no-async-scheduling",
    "--structured-outputs-config.backend", "--load-format", "--tokenizer", "--disable-log-stats",
    "--chat-template",  # theirs is ChatML, and so is that of the tiny model
    # Adapters: their tests are skipped one by one, since most tests of their files use the base model.
    "--enable-lora", "--lora-modules", "--lora-module", "--max-lora-rank", "--max-cpu-loras",
})  # fmt: skip
# Fixtures that give a test a server.
_SERVERS = ("server", "client")
# Seconds after which a test hangs.
_TIMEOUT_S = 90


def missing(arguments: Sequence[str], given: Sequence[str]) -> list[str]:
    """The arguments of a test's server that the standing one was not given.

    ``given``: flags, or flags with their value as ``--flag=value``.
    """
    lacks = []
    for number, argument in enumerate(arguments):
        flag, _, value = argument.partition("=")
        if not flag.startswith("--"):
            continue
        following = arguments[number + 1] if number + 1 < len(arguments) else ""
        value = value or ("" if following.startswith("--") else following)
        if flag not in _INDIFFERENT and flag not in given and f"{flag}={value}" not in given:
            lacks.append(f"{flag} {value}".strip())
    return lacks


class StandingServer:
    """Has the methods of vLLM's ``RemoteOpenAIServer`` that its tests call, and starts nothing."""

    DUMMY_API_KEY = "token-abc123"
    uds = None
    show_hidden_metrics = False

    def __init__(
        self, model: str, vllm_serve_args: Sequence[str] = (), *others: Any, env_dict: Any = None, **unused: Any
    ) -> None:
        """Skip the test if its server would need what the standing one has not."""
        if model != "tiny":
            pytest.skip(f"needs the model {model}")
        lacks = missing([*map(str, vllm_serve_args)], os.environ[GIVEN].split())
        if unused.get("override_hf_configs"):
            lacks.append("override_hf_configs")
        lacks += [f"{name}={value}" for name, value in (env_dict or {}).items() if os.environ.get(name) != value]
        if lacks:
            pytest.skip(f"needs {', '.join(sorted(lacks))}")
        self.url_root = os.environ[URL]
        self.host, port = self.url_root.removeprefix("http://").split(":")
        self.port = int(port)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def url_for(self, *parts: str) -> str:
        """The URL of a path."""
        return f"{self.url_root}/{'/'.join(parts)}"

    def get_client(self, **settings: Any) -> Any:
        """OpenAI's client."""
        import openai

        return openai.OpenAI(base_url=self.url_for("v1"), **self._settings(settings))

    def get_async_client(self, **settings: Any) -> Any:
        """OpenAI's client for asyncio."""
        import openai

        return openai.AsyncOpenAI(base_url=self.url_for("v1"), **self._settings(settings))

    def get_client_anthropic(self, **settings: Any) -> Any:
        """Anthropic's client."""
        import anthropic

        return anthropic.Anthropic(base_url=self.url_for(), **self._settings(settings))

    def get_async_client_anthropic(self, **settings: Any) -> Any:
        """Anthropic's client for asyncio."""
        import anthropic

        return anthropic.AsyncAnthropic(base_url=self.url_for(), **self._settings(settings))

    def _settings(self, settings: dict[str, Any]) -> dict[str, Any]:
        return {"api_key": self.DUMMY_API_KEY, "max_retries": 0, "timeout": _TIMEOUT_S, **settings}


class _Utils(ModuleType):
    """Stands for vLLM's ``tests.utils``, which needs a GPU's tools."""

    RemoteOpenAIServer = RemoteLaunchRenderServer = RemoteVLLMServer = StandingServer
    VLLM_PATH = Path()
    ROCM_EXTRA_ARGS: ClassVar[list[str]] = []
    ROCM_ENV_OVERRIDES: ClassVar[dict[str, str]] = {}

    def __getattr__(self, name: str) -> Any:
        """Any other name is a decorator that skips its test."""
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: pytest.mark.skip(reason=f"needs {name} of vLLM's tests")


class _Conftest(ModuleType):
    """Stands for vLLM's ``tests.conftest``."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return object


# At the import of this plugin: conftest files, which pytest loads next, import both.
if URL in os.environ:
    sys.modules["tests.utils"] = _Utils("tests.utils")
    sys.modules["tests.conftest"] = _Conftest("tests.conftest")
    # Fixtures of whole files fetch adapters, which the standing server does not have.
    pytest.MonkeyPatch().setattr(huggingface_hub.HfApi, "snapshot_download", lambda *_, **__: "no-adapter")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests that use no server or are not wanted, and skip those of adapters."""
    wanted = json.loads(Path(os.environ[NAMES]).read_text())
    keep: list[pytest.Item] = []
    others: list[pytest.Item] = []
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        uses_server = any(part in name for name in fixtures for part in _SERVERS)
        (keep if uses_server and (not wanted or item.nodeid in wanted) else others).append(item)
        if uses_server and "lora" in item.name.lower():
            item.add_marker(pytest.mark.skip(reason="needs a LoRA adapter"))
    items[:] = keep
    if others:
        config.hook.pytest_deselected(items=others)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write the outcome of a test's phase: that of its call, or what ended it before or after."""
    if report.when == "call" or report.outcome != "passed":
        text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr or "")
        _write(report.nodeid, report.outcome, text)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Write that a file cannot be imported; it counts as skipped."""
    if report.failed:
        _write(report.nodeid, "skipped", str(report.longrepr).strip().splitlines()[-1])


def _write(name: str, outcome: str, text: str) -> None:
    with Path(os.environ[OUTCOMES]).open("a") as file:
        file.write(json.dumps([name, outcome, text[-2000:]]) + "\n")
