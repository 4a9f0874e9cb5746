"""`tandem curate --from`: a proposal from a decision log, and what happens to it."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from autoscale.decide.config import AutoscaleConfig
from autoscale.decide.decision_log import config_line, decision_line, traffic_line
from autoscale.decide.tuning import merged
from autoscale.types import ControllerState, Decision, Plan, PoolKey, PoolLimits, PoolStats, Snapshot, Traffic
from kvtransfer.topology import Role
from serve_app.checks.yaml_checks import ConfigError
from serve_app.cli import curate_log
from serve_app.cli.main import cli
from serve_app.running import ray_control
from tests.serve_app.virtual_control import VirtualApplication

# A target far below what the engines serve: the service has many more replicas than it needs.
CONFIG = {
    "pd_ratio": "1:1",
    "policy": {"kind": "heteroscale", "target": 10.0},
    "slo": {"ttft_s": 5.0, "tpot_s": 0.2, "quantile_frac": 0.9},
}


@pytest.fixture(scope="module", name="settings")
def _settings() -> AutoscaleConfig:
    return AutoscaleConfig.model_validate(CONFIG)


@pytest.fixture(scope="module", name="log")
def _log(settings: AutoscaleConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A quarter of an hour of traffic."""
    traffic = Traffic(requests_per_s=1.0, input_tokens_mean=100.0, output_tokens_mean=30.0)
    limits = PoolLimits(lowest_replicas=1, highest_replicas=8)
    pools = tuple(PoolStats(key=PoolKey("g0", role), replicas=(), target_replicas=1, limits=limits) for role in Role)
    decision = Decision(wanted=None, reason="test")
    plan = Plan(counts={}, admitted=(), withdrawn=(), victims=(), decision=decision, state=ControllerState())
    lines = [
        config_line("m", settings, 0.0, "start"),
        decision_line("m", Snapshot(now_s=0.0, pools=pools, traffic=traffic), plan),
        *(traffic_line("m", 60.0 * minute, traffic) for minute in range(1, 16)),
    ]
    path: Path = tmp_path_factory.mktemp("log") / "decisions.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module", name="engines")
def _engines(make_profile: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A simulator's configuration with one small engine."""
    folder: Path = tmp_path_factory.mktemp("engines")
    (folder / "engine.json").write_text(make_profile().model_dump_json())
    engine = {"profile": "engine.json", "start_s": 5.0}
    document = {"groups": [{"prefill": engine, "decode": engine}], "oracle_simulated_requests": 1, "warm_up_s": 60.0}
    path = folder / "sim.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def curate(log: Path, *options: str, answer: str | None = None) -> Result:
    return CliRunner().invoke(cli, ["curate", "--from", str(log), *options], input=answer)


@pytest.fixture(scope="module", name="found")
def _found(log: Path, engines: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, dict[str, Any], str]:
    """Output, report and patch of one search."""
    folder = tmp_path_factory.mktemp("found")
    report, patch = folder / "report.json", folder / "patch.yaml"
    options = ["--config", str(engines), "--policy", "heteroscale", "--tries", "6", "--gpus", "2", "--jobs", "1"]
    ran = curate(log, *options, "--json", str(report), "--out", str(patch))
    assert ran.exit_code == 0, ran.output + str(ran.exception)
    return ran, json.loads(report.read_text()), patch.read_text()


def test_a_cheaper_target_is_proposed_and_named_as_a_command(
    found: tuple[Result, dict[str, Any], str], settings: AutoscaleConfig
) -> None:
    ran, report, patch = found
    assert report["proposed"]["gpu_hours"] < report["now"]["gpu_hours"]
    assert report["proposed"]["slo_attainment_frac"] >= 0.9
    assert report["changes"]["policy"]["target"] > 10.0
    assert yaml.safe_load(patch) == report["changes"]
    assert "GPU-hours" in patch.splitlines()[1]
    out = ran.stdout.replace("\n", " ")
    assert "now" in out and "proposed" in out
    assert "note: the log has 0.2 hours of traffic, not a day" in out
    # The printed command makes exactly these changes.
    from serve_app.cli.scaling import _nested

    command = next(line for line in ran.stdout.splitlines() if line.strip().startswith("tandem tune"))
    pairs = shlex.split(command)[2:]
    assert pairs[-2:] == ["--service", "m"]
    assert merged({}, _nested(pairs[:-2])) == report["changes"]
    changed = AutoscaleConfig.model_validate(merged(settings.model_dump(mode="json"), report["changes"]))
    assert changed != settings


def test_nothing_changes_until_a_person_accepts(
    log: Path, engines: Path, settings: AutoscaleConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    application = VirtualApplication(settings)
    monkeypatch.setattr(ray_control, "ask", application.ask)
    monkeypatch.setattr(curate_log, "connect", lambda address: None)
    options = ["--config", str(engines), "--policy", "static", "--tries", "1", "--gpus", "2", "--jobs", "1", "--apply"]
    declined = curate(log, *options, answer="n\n")
    assert "nothing was changed" in str(declined.exception), declined.output
    assert application.config == settings
    accepted = curate(log, *options, answer="y\n")
    assert accepted.exit_code == 0, accepted.output + str(accepted.exception)
    assert application.config.policy.kind == "static"
    stale = curate(log, *options, answer="y\n")
    assert "the application has other settings now than at the end of the log" in str(stale.exception)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--trace", "x.csv"), "give --trace, or a decision log with --from"),
        (("--serve", "x.yaml"), "are for --trace: leave them out"),
        (("--rate-scale", "2"), "are for --trace: leave them out"),
        (("--service", "x"), "the log has no service 'x': it has m"),
        (("--policy", "hpa"), "--policy hpa: for the simulator only"),
    ],
)
def test_options_that_do_not_fit_a_log_are_refused(
    log: Path, engines: Path, options: tuple[str, ...], says: str
) -> None:
    ran = curate(log, "--config", str(engines), *options)
    assert isinstance(ran.exception, ConfigError)
    assert says in str(ran.exception)


def test_a_file_that_is_no_log_is_named(engines: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    for text, says in (("", "the log is empty"), ("hello\nyou\n", "line 1 is no line of a decision log")):
        other.write_text(text)
        ran = curate(other, "--config", str(engines))
        assert f"{other}: {says}" in str(ran.exception)
    ran = curate(tmp_path / "none.jsonl", "--config", str(engines))
    assert "none.jsonl: cannot be read" in str(ran.exception)


def test_a_search_on_a_trace_needs_a_file_to_write() -> None:
    for arguments in (["--trace", "x.csv"], ["--trace", "x.csv", "--out", "y.yaml", "--apply"]):
        ran = CliRunner().invoke(cli, ["curate", *arguments])
        assert "--trace needs --out, and --apply is for --from" in str(ran.exception)
