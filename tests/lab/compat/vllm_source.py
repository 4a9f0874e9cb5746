"""vLLM's own tests, from its source distribution, made ready for a server that already runs.

They are kept in ``build/compat``, which Git ignores, and are never part of this repository.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.lab.stand.fixed_counts import ROOT

VERSION = "0.29.0"
# Of the source distribution on PyPI.
_SHA256 = "c03feb07943ecae9e69e7dc424d7c5569ecf8d1292513aef2a4de67af381cd97"
FOLDER = ROOT / "build" / "compat" / f"vllm-{VERSION}"
# The folders of its tests that start a server, below tests/.
_FOLDERS = ("openai", "anthropic", "generate", "scale_out", "serve", "tool_parsers")
# What starts a server in a test.
_STARTS = re.compile(r"RemoteOpenAIServer|RemoteLaunchRenderServer")
# A model's name: in a constant, such as MODEL_NAME = "Qwen/Qwen3-0.6B", or as the first argument of a server.
_MODEL = re.compile(
    r"(?:^(?:GPT_OSS_)?MODEL(?:_NAME\w*)? *= *|RemoteOpenAIServer\(\s*)\"([^\"]+)\"",
    re.MULTILINE,
)
# The name under which the server of vLLM's Anthropic tests has its model.
_SERVED_NAME = "claude-3-7-sonnet-latest"


def fetched_tests(model: Path) -> list[str]:
    """The files with tests that start a server, as paths below ``FOLDER``; fetches them once.

    ``model``: folder of the tiny model. The tests' models are replaced by it.
    """
    tests = FOLDER / "tests"
    if not tests.exists():
        with_source = _unpacked(FOLDER.parent / "unpacking")
        ready = FOLDER.with_suffix(".part")
        shutil.rmtree(ready, ignore_errors=True)
        ready.mkdir(parents=True)
        shutil.copytree(with_source / "tests" / "entrypoints", ready / "tests" / "entrypoints")
        (ready / "tests" / "__init__.py").touch()
        for file in (ready / "tests").rglob("*.py"):
            file.write_text(with_tiny(file.read_text()))
        ready.rename(FOLDER)
        shutil.rmtree(FOLDER.parent / "unpacking")
    # The tests read the tokenizer of a model that has the served name.
    link = FOLDER / "tiny"
    if not link.exists():
        link.symlink_to(model)
    return _files(tests)


def with_tiny(source: str) -> str:
    """A test's source with ``tiny`` in place of the models that it serves."""
    for name in sorted({*_MODEL.findall(source), _SERVED_NAME}, key=len, reverse=True):
        source = source.replace(f'"{name}"', '"tiny"')
    return source


def _files(tests: Path) -> list[str]:
    found = []
    for folder in _FOLDERS:
        for file in sorted((tests / "entrypoints" / folder).rglob("test_*.py")):
            near = [file, file.with_name("conftest.py")]
            if any(each.exists() and _STARTS.search(each.read_text()) for each in near):
                found.append(file.relative_to(FOLDER).as_posix())
    return found


def _unpacked(folder: Path) -> Path:
    """The unpacked source distribution.

    pip builds the metadata of what it downloads. This fails, since the tools of vLLM's build are missing, and pip keeps
    the unpacked source if told so.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    pinned = folder / "pinned.txt"
    pinned.write_text(f"vllm=={VERSION} --hash=sha256:{_SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--requirement", str(pinned), "--require-hashes", "--no-deps",
               "--no-binary", "vllm", "--no-build-isolation", "--no-clean", "--dest", str(folder)]  # fmt: skip
    environment = {**os.environ, "TMPDIR": str(folder), "VLLM_TARGET_DEVICE": "empty"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    sources = [path.parents[1] for path in folder.glob("*/*/tests/entrypoints")]
    if len(sources) != 1:
        raise RuntimeError(f"vLLM {VERSION} could not be fetched: {result.stdout[-500:]} {result.stderr[-500:]}")
    return sources[0]
