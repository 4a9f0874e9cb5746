"""What Tandem installs into vLLM's processes, as far as it can be seen without vLLM."""

import os
from collections.abc import Callable
from typing import Any

import pytest

from deployments.vllm_plugin import _bound_cores


@pytest.mark.parametrize(
    ("spec", "cores"),
    [
        ("0", {0}),
        ("3,1", {1, 3}),
        ("0-2,5", {0, 1, 2, 5}),
        ("0-2,5|6", {0, 1, 2, 5, 6}),
        ("0,1|2,3", {0, 1, 2, 3}),
        ("4-4", {4}),
    ],
)
def test_binding_names_its_cores(spec: str, cores: set[int]) -> None:
    assert _bound_cores(spec) == cores


@pytest.mark.parametrize("spec", ["", "auto", "nobind", "0,auto", "-1", "0-x", "0;1", "1,,2"])
def test_unreadable_binding_binds_nothing(spec: str) -> None:
    assert _bound_cores(spec) == set()


def test_register_does_nothing_in_a_front_end(run_python: Callable[..., Any]) -> None:
    script = """
import json, os, sys, threading
from deployments.vllm_plugin import register
before = sorted(os.sched_getaffinity(0))
register()
print(json.dumps({
    "bound": sorted(os.sched_getaffinity(0)) != before,
    "threads": [thread.name for thread in threading.enumerate()],
    "imported": sorted({name.partition(".")[0] for name in sys.modules} & {"vllm", "nixl", "torch", "ray"}),
}))
"""
    core = str(min(os.sched_getaffinity(0)))
    assert run_python(script, env={**os.environ, "VLLM_CPU_OMP_THREADS_BIND": core}) == {
        "bound": False,
        "threads": ["MainThread"],
        "imported": [],
    }
