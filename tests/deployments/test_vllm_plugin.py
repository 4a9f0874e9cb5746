"""What Tandem installs into vLLM's processes, as far as it can be seen without vLLM."""

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
