"""What Tandem installs into vLLM's processes, as far as it can be seen without an engine."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.vllm_seam.plugin import _cores_from_environment, register


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
def test_a_binding_is_read_as_the_cores_that_it_names(
    spec: str, cores: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", spec)
    assert _cores_from_environment() == cores


@pytest.mark.parametrize("spec", ["", "auto", "nobind", "0,auto", "-1", "0-x", "0;1", "1,,2"])
def test_an_unreadable_binding_binds_no_cores(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", spec)
    assert _cores_from_environment() == set()


def test_a_step_that_fails_leaves_no_text_of_its_requests_in_the_log(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.logging_utils import dump_input

    monkeypatch.setattr("deployments.vllm_seam.plugin._keep_worker_in_engine_core", lambda: None)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    register()
    request: Any = SimpleNamespace(stop=["secret-stop"], bad_words=["secret-word"])
    with caplog.at_level(logging.ERROR, logger=dump_input.logger.name):
        dump_input.dump_engine_exception("the configuration", SimpleNamespace(new=[request]), "the counts")  # type: ignore[arg-type]
    assert "secret" not in caplog.text
    assert "the configuration" in caplog.text and "the counts" in caplog.text
