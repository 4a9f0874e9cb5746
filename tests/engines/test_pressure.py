"""`tandem pressure-test --live` on a running application of emulated engines."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from autoscale.policies.heteroscale import Signal
from autoscale.sim.config import SimConfig
from autoscale.sim.split import SplitSimulator
from autoscale.traces.synthesis import save_trace
from autoscale.traces.trace import TraceRequest, load_trace
from tests.engines.endpoint import WAIT_S, forked_yaml

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
PROFILE = ROOT / "configs" / "profiles" / "h100_llama70b_fp8_tp1.json"
NAME = "pressed"
# One prefill replica limits the rate to 8.6 requests/s, which two cores can send and answer. Near it the queue grows
# fast, so the rate at which TTFT misses its objective depends little on chance. TPOT never misses its objective.
SLO = {"ttft_s": 2.0, "tpot_s": 0.1}
COMMAND = [sys.executable, "-m", "serve_app.cli.main", "pressure-test", "--live", "--app", NAME, "--yes"]


@pytest.fixture(scope="module")
def app() -> Iterator[Any]:
    """1P2D of emulated engines that start at once; the policy never wants other counts."""
    from serve_app.sdk import deploy

    document = forked_yaml(NAME)
    application = document["applications"][0]
    group = application["args"]["groups"][0]
    for role in ("prefill", "decode"):
        group[role]["max_replicas"] = 2
        group[role]["emulator"] |= {"start_s": 0.0, "profile": str(PROFILE)}
    group["decode"]["replicas"] = 2
    application["args"]["autoscale"] = {
        "pd_ratio": "1:2",
        "policy": {"kind": "heteroscale", "target": 100_000.0},
        "slo": SLO,
        "gate": {"observation_s": 2.0},
        "interval_s": 1.0,
        "window_s": 6.0,
    }
    with deploy(document) as app:
        yield app


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Requests of equal lengths, so that a short step shows what a long one would; all prompts go to prefill."""
    path = tmp_path_factory.mktemp("trace") / "even.csv"
    save_trace(path, [TraceRequest(at_s=float(i), input_tokens=800, output_tokens=30) for i in range(50)])
    return path


def status() -> Any:
    from serve_app.running.ray_control import Control

    return Control(NAME).status()


def settled(serving: tuple[int, int]) -> Any:
    """The status once these counts serve."""
    from deployments.actors.scaling_metrics import serving_replicas

    deadline = time.monotonic() + WAIT_S
    while True:
        now = status()
        counts = None if now.last is None else tuple(serving_replicas(now).values())
        if counts == serving:
            return now
        assert time.monotonic() < deadline, now
        time.sleep(0.5)


def test_a_target_is_found_that_the_profile_implies_and_all_is_as_before(app: Any, trace: Path, tmp_path: Path) -> None:
    before = settled((1, 2))
    report, patch = tmp_path / "report.json", tmp_path / "patch.yaml"
    options = ["--trace", str(trace), "--ratios", "1:2", "--first-rate", "4", "--step-s", "15", "--most-minutes", "8"]
    options += ["--tolerance", "0.1", "--json", str(report), "--out", str(patch)]
    ran = subprocess.run([*COMMAND, *options], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    after = settled((1, 2))
    assert (after.config, after.tuned) == (before.config, before.tuned)

    engine = {"profile": str(PROFILE)}
    slo = {
        "ttft_least_s": SLO["ttft_s"],
        "ttft_unloaded_factor": 1.0,
        "tpot_s": SLO["tpot_s"],
        "attainment_frac": after.config.slo.quantile_frac,
    }
    config = SimConfig.model_validate({"groups": [{"prefill": engine, "decode": engine}], "slo": slo})
    expected = SplitSimulator(config, load_trace(trace), 0).find_highest_rate(1, 2)
    implied = expected.signals[Signal.DECODE_TPS]
    assert implied is not None
    found = json.loads(report.read_text())
    changes = yaml.safe_load(patch.read_text())
    assert changes == found["changes"]
    assert changes["pd_ratio"] == "1:2"
    assert changes["policy"]["target"] == pytest.approx(0.8 * implied, rel=0.15)
    assert "tandem tune pd_ratio=1:2 policy.target=" in ran.stdout
    assert found["best"]["requests_per_s"] == pytest.approx(expected.requests_per_s, rel=0.2)
    assert all(step["step"]["requests_per_s"] <= 50.0 for step in found["steps"])


def test_an_interrupt_in_the_middle_gives_everything_back(app: Any, trace: Path, tmp_path: Path) -> None:
    before = settled((1, 2))
    report = tmp_path / "report.json"
    # A shell lets background processes ignore interrupts; if it runs these tests so, the command would ignore them too.
    command = ["env", "--default-signal=INT", *COMMAND, "--trace", str(trace), "--ratios", "1:1", "--json", str(report)]
    running = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        during = settled((2, 2))
        assert during.config.override is not None
        time.sleep(5.0)  # a step runs
        os.kill(running.pid, signal.SIGINT)
        out, err = running.communicate(timeout=120)
    finally:
        running.kill()
    assert running.returncode == 130, out + err
    assert "Traceback" not in out + err
    after = settled((1, 2))
    assert (after.config, after.tuned) == (before.config, before.tuned)
    assert json.loads(report.read_text())["stopped"] == "KeyboardInterrupt"


def test_counts_that_were_set_by_hand_are_refused_unless_told_and_come_back(app: Any, trace: Path) -> None:
    from serve_app.running.ray_control import Control

    control = Control(NAME)
    control.scale(2, 2)
    settled((2, 2))
    options = ["--trace", str(trace), "--ratios", "1:1", "--most-minutes", "0.1", "--step-s", "5"]
    refused = subprocess.run([*COMMAND, *options], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert refused.returncode == 1
    assert "were set to 2P2D by hand" in refused.stderr.replace("\n", " ")
    assert status().config.override.prefill == 2
    control.resume()
