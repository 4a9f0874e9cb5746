"""Factories of test inputs, and settings that hold for every test."""

import copy
import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.configuration import set_hypothesis_home_dir

from autoscale.decide.config import AutoscaleConfig
from autoscale.engines.profile import EngineProfile
from autoscale.sim import split
from deployments.pool_config import GroupConfig
from router.config import LengthConfig
from router.length import DecodeLoad
from router.pool_router import ReplicaView
from serve_app.local.cluster import driver_environment
from tests.serve_app.fake_endpoint import Answer, FakeEndpoint, tokens

ROOT = Path(__file__).parent.parent

# Ray reads these variables once, when it is imported; a later test may start a cluster in this process.
driver_environment()

# The same examples on every machine and in every run; no deadline, since the machine may be slow and shared.
# `make test` tries few examples of a property, `make test-thorough` (--hypothesis-profile thorough) many.
settings.register_profile("tandem", derandomize=True, database=None, deadline=None, max_examples=25)
settings.register_profile("thorough", settings.get_profile("tandem"), max_examples=1000)
settings.load_profile("tandem")
set_hypothesis_home_dir(ROOT / ".pytest_cache" / "hypothesis")


_APP_ARGS: dict[str, Any] = {
    "model": {"id": "tiny", "source": "./models/tiny"},
    "engine_kwargs": {"max_model_len": 4096},
    "groups": [
        {
            "name": "g0",
            "prefill": {"replicas": 2, "placement": {"cpus_per_worker": 0.5, "node_labels": {"zone": "a"}}},
            "decode": {"replicas": 1, "env": {"NAME": "value"}},
        }
    ],
    "kv_transfer": {"lease_s": 60},
    "router": {"policy": "least_tokens", "length": {"local_max_tokens": 128, "local_cap_tokens": 512}},
    "ingress": {"replicas": 1, "request_timeout_s": 300.0},
}


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def make_app_args() -> Callable[..., dict[str, Any]]:
    """A valid application's ``args``, with top-level fields replaced."""

    def make(**changes: Any) -> dict[str, Any]:
        return {**copy.deepcopy(_APP_ARGS), **changes}

    return make


@pytest.fixture(scope="session")
def make_group() -> Callable[..., GroupConfig]:
    """A group, from the plain data of a YAML."""

    def make(**changes: Any) -> GroupConfig:
        return GroupConfig.model_validate({"name": "g0", **changes})

    return make


@pytest.fixture(scope="session")
def make_length_config() -> Callable[..., LengthConfig]:
    """Bounds whose fractions are exact in binary, so that expected bounds are exact too."""

    def make(**changes: Any) -> LengthConfig:
        exact = {
            "local_max_tokens": 128,
            "local_cap_tokens": 512,
            "local_tokens_per_output_token": 8.0,
            "backlog_share_frac": 0.5,
            "decode_room_frac": 0.5,
            "decode_busy_frac": 0.25,
        }
        return LengthConfig.model_validate({**exact, **changes})

    return make


@pytest.fixture(scope="session")
def make_decode_load() -> Callable[..., DecodeLoad]:
    """An idle decode engine with 32 slots, whose answers were long."""

    def make(**changes: Any) -> DecodeLoad:
        idle = {"running_requests": 0, "max_running_requests": 32, "kv_usage_frac": 0.0, "output_tokens_mean": 1000.0}
        return DecodeLoad(**{**idle, **changes})

    return make


@pytest.fixture(scope="session")
def make_replicas() -> Callable[..., list[ReplicaView]]:
    """Replicas r0, r1, ... with these queued tokens."""

    def make(*queued_tokens: int) -> list[ReplicaView]:
        return [ReplicaView(replica_id=f"r{i}", queued_tokens=tokens) for i, tokens in enumerate(queued_tokens)]

    return make


@pytest.fixture(scope="session")
def make_autoscale() -> Callable[..., AutoscaleConfig]:
    """HeteroScale at 100 decode tokens/s a replica, without cooldown and damping, unless ``changes`` sets them."""

    def make(**changes: Any) -> AutoscaleConfig:
        calm = {
            "cooldown_out_s": 0.0,
            "cooldown_in_s": 0.0,
            "damping_in_frac": 1.0,
            "step_out_replicas": 64,
            "step_in_replicas": 64,
        }
        document = {
            "pd_ratio": "1:1",
            "policy": {"kind": "heteroscale", "target": 100.0},
            **changes,
            "guard": {**calm, **changes.get("guard", {})},
        }
        return AutoscaleConfig.model_validate(document)

    return make


@pytest.fixture(scope="session")
def run_python() -> Callable[..., Any]:
    """Run a Python script in its own process, in the repository. The result is its standard output, read as JSON."""

    def run(script: str, *arguments: str, env: dict[str, str] | None = None) -> Any:
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


@pytest.fixture
def short_pressure_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run of a pressure test in this process takes seconds of simulated time, not minutes."""
    short = {"_RUN_S": 20.0, "_WARM_UP_S": 5.0, "_LEAST_REQUESTS": 200, "_MANY_REQUESTS": 400, "_RATE_STEPS": 5}
    for name, value in short.items():
        monkeypatch.setattr(split, name, value)


@pytest.fixture
def make_endpoint() -> Iterator[Callable[..., FakeEndpoint]]:
    """A running endpoint on a free port of its own."""
    with ExitStack() as stack:

        def make(answer: Answer | None = None, metrics_page: str = "") -> FakeEndpoint:
            return stack.enter_context(FakeEndpoint(answer or tokens(), metrics_page))

        yield make


@pytest.fixture
def dead_url() -> Iterator[str]:
    """A URL on which no server listens: the port is bound, so that no other process can take it."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"


@pytest.fixture(scope="session")
def make_profile() -> Callable[..., EngineProfile]:
    """Prefill at 1 ms a token after 10 ms; a decode step of 20 ms plus 1 ms a request."""

    def make(**changes: Any) -> EngineProfile:
        return EngineProfile.model_validate(
            {
                "name": "by hand",
                "model": "none",
                "kv_tokens": 1000,
                "block_tokens": 10,
                "max_batch_tokens": 100,
                "max_running": 8,
                "prefill": {"tokens": [0, 1000], "seconds": [0.01, 1.01]},
                "decode": {"batch": [1, 100], "context_tokens": [100], "step_s": [[0.021], [0.12]]},
                "handoff": {"base_s": 0.01, "kv_bytes_per_token": 1000, "bytes_per_s": 1e6},
                "start_s": 1.0,
                "flops_per_token": 1.0,
                "peak_flops": 1000.0,
                "sources": [{"part": "all", "kind": "assumed", "text": "round numbers"}],
                **changes,
            }
        )

    return make
