"""Reads the source of installed packages without importing them: vLLM takes ten seconds to import."""

import importlib.util
from pathlib import Path

import pytest


def installed_source(path: str) -> str:
    """The text of an installed file such as ``vllm/v1/metrics/stats.py``; the test is skipped without the package."""
    return installed_path(path).read_text(encoding="utf-8")


def installed_path(path: str) -> Path:
    """The place of an installed file or folder; the test is skipped without the package."""
    package, _, rest = path.partition("/")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    return Path(spec.submodule_search_locations[0]) / rest
