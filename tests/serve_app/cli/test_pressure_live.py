"""`tandem pressure-test --live` on a fake endpoint and a virtual application, which has the real controller."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from click.testing import Result
from typer.testing import CliRunner

from autoscale.decide.config import AutoscaleConfig
from serve_app.checks.yaml_checks import ConfigError
from serve_app.cli import pressure_live, pressure_plan
from serve_app.cli.main import cli
from serve_app.local.cluster import DeployError
from serve_app.running import fixed_counts, ray_control
from serve_app.running.step import StepRunner
from tests.serve_app.fake_endpoint import FakeEndpoint, refuse, tokens
from tests.serve_app.virtual_control import VirtualApplication

MakeEndpoint = Callable[..., FakeEndpoint]
TINY = str(Path(__file__).parents[3] / "configs" / "profiles" / "cpu_tiny.json")
CONFIG = {
    "pd_ratio": "1:2",
    "policy": {"kind": "heteroscale", "target": 300.0},
    "slo": {"ttft_s": 0.5, "tpot_s": 0.2, "quantile_frac": 0.8},
    "gate": {"observation_s": 0.0},
    "interval_s": 0.2,
    "window_s": 2.0,
}


@pytest.fixture(name="application")
def _application(monkeypatch: pytest.MonkeyPatch) -> VirtualApplication:
    """A running application; a step counts from its first instant on, and steps may be short."""
    application = VirtualApplication(AutoscaleConfig.model_validate(CONFIG))
    monkeypatch.setattr(ray_control, "ask", application.ask)
    monkeypatch.setattr(pressure_plan, "connect", lambda address: None)
    for module in (fixed_counts, pressure_live):
        monkeypatch.setattr(module, "_POLL_S", 0.01)
    monkeypatch.setattr(StepRunner, "window_s", 0.1)
    return application


@pytest.fixture(name="trace")
def _trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text("timestamp_s,input_tokens,output_tokens\n0,4,2\n1,5000,2\n")
    return path


def live(url: str, trace: Path, *options: str, answer: str | None = None) -> Result:
    command = ["pressure-test", "--live", "--url", url, "--trace", str(trace), *options]
    return CliRunner().invoke(cli, command if answer else [*command, "--yes"], input=answer)


QUICK = ("--ratios", "1:1", "--first-rate", "10", "--step-s", "1")


def test_a_test_finds_ratio_and_target_and_gives_the_counts_back(
    application: VirtualApplication, make_endpoint: MakeEndpoint, trace: Path, tmp_path: Path
) -> None:
    endpoint, report, patch = make_endpoint(), tmp_path / "report.json", tmp_path / "patch.yaml"
    options = ["--ratios", "1:1,1:2", "--first-rate", "10", "--most-rate", "12", "--step-s", "1"]
    ran = live(endpoint.url, trace, *options, "--json", str(report), "--out", str(patch))
    assert ran.exit_code == 0, ran.output + str(ran.exception)
    assert application.config == application.base
    found = json.loads(report.read_text())
    assert [point["requests_per_s"] for point in found["points"]] == [12.0, 12.0]
    assert all(point["is_capped"] for point in found["points"])
    # The virtual replicas make 100 tokens/s each: fewer GPUs for the same rate are better.
    assert yaml.safe_load(patch.read_text()) == {"pd_ratio": "1:1", "policy": {"target": 80.0}}
    assert "tandem tune pd_ratio=1:1 policy.target=80.0" in ran.stdout
    assert "1P2D kept the objectives at the highest rate that was allowed" in ran.stdout.replace("\n", " ")
    assert all(len(body["prompt"]) + body["max_tokens"] <= 1000 for body in endpoint.bodies)  # the model's context
    assert found["command"] == "tandem tune pd_ratio=1:1 policy.target=80.0"
    assert {"date", "tandem_version", "limits", "slo", "trace", "application"} <= found.keys()


def test_rates_that_miss_the_objectives_are_lowered_and_their_steps_are_cut_short(
    application: VirtualApplication, make_endpoint: MakeEndpoint, trace: Path, tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    ran = live(make_endpoint(tokens(first_s=0.8)).url, trace, *QUICK, "--first-rate", "40", "--json", str(report))
    assert isinstance(ran.exception, ConfigError)
    assert "no rate kept the objectives: give a lower --first-rate" in str(ran.exception)
    found = json.loads(report.read_text())
    rates = [step["step"]["requests_per_s"] for step in found["steps"]]
    assert rates == [40.0, 20.0, 10.0, 5.0, 2.5]
    assert all(step["is_cut"] for step in found["steps"])
    assert application.config == application.base


def test_an_endpoint_that_fails_all_requests_ends_the_test_and_gives_the_counts_back(
    application: VirtualApplication, make_endpoint: MakeEndpoint, trace: Path, tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    endpoint = make_endpoint(refuse(503))
    ran = live(endpoint.url, trace, *QUICK, "--most-errors", "3", "--json", str(report))
    assert isinstance(ran.exception, DeployError)
    assert "requests of the step failed: does the endpoint answer?" in str(ran.exception)
    assert len(endpoint.bodies) < 10
    assert "failed" in json.loads(report.read_text())["stopped"]
    assert application.config == application.base


def test_too_many_errors_make_a_step_bad_although_others_succeed(
    application: VirtualApplication, make_endpoint: MakeEndpoint, trace: Path, tmp_path: Path
) -> None:
    async def answer(endpoint: FakeEndpoint, request: web.Request, index: int) -> web.StreamResponse:
        return await (refuse(503) if index == 3 else tokens())(endpoint, request, index)

    report = tmp_path / "report.json"
    options = ["--most-errors", "0", "--tolerance", "0.9", "--json", str(report)]
    ran = live(make_endpoint(answer).url, trace, *QUICK, *options)
    assert ran.exit_code == 0, ran.output + str(ran.exception)
    first, second = json.loads(report.read_text())["steps"]
    assert (first["failed"], first["is_cut"], second["failed"]) == (1, True, 0)
    assert json.loads(report.read_text())["best"]["requests_per_s"] == 5.0


def test_requests_of_others_end_the_test(
    application: VirtualApplication, make_endpoint: MakeEndpoint, trace: Path
) -> None:
    application.busy_requests_per_s = 500.0
    ran = live(make_endpoint().url, trace, *QUICK)
    assert isinstance(ran.exception, DeployError)
    assert "others sent 49" in str(ran.exception) and "--beside-traffic" in str(ran.exception)
    assert application.config == application.base


def test_beside_traffic_the_requests_of_others_count_for_the_rate(
    application: VirtualApplication, make_endpoint: MakeEndpoint, trace: Path, tmp_path: Path
) -> None:
    application.requests_per_s, application.busy_requests_per_s = 30.0, 50.0
    report = tmp_path / "report.json"
    options = ["--most-rate", "10", "--beside-traffic", "--json", str(report)]
    ran = live(make_endpoint().url, trace, *QUICK, *options)
    assert ran.exit_code == 0, ran.output + str(ran.exception)
    (point,) = json.loads(report.read_text())["points"]
    # 10 of the test and 40 of others; in a second, 10 random arrivals may be 3 to 17.
    assert 42.0 < point["requests_per_s"] < 58.0


@pytest.mark.parametrize(
    ("changes", "options", "says"),
    [
        ({"override": {"prefill": 2, "decode": 2}}, (), "were set to 2P2D by hand: run `tandem scale --resume`"),
        ({"is_paused": True}, (), "the application is paused: run `tandem scale --resume` first"),
        ({"is_observing": True}, ("--despite-override",), "is_observing is on"),
        ({}, ("--ratios", "1:7"), "--ratios: a P/D ratio of 1:7 is impossible"),
        ({}, ("--ratios", "9:1"), "no counts at the ratio 9:1 lie between 1P1D and 8P8D"),
        ({}, ("--gpus", "2"), "no counts at the ratio 1:2 lie between"),
        (
            {"pd_ratio": "auto", "auto_ratio": {"prefill": TINY, "decode": TINY, "lowest": "1:3", "highest": "1:3"}},
            ("--gpus", "2"),
            "no counts at the ratio 0.33:1 lie between",
        ),
        ({}, ("--service", "other"), "tandem has no service 'other': it has m"),
        ({}, ("--config", "sim.yaml"), "--config and --strict are for engine models"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_changed(
    application: VirtualApplication,
    make_endpoint: MakeEndpoint,
    trace: Path,
    changes: dict[str, Any],
    options: tuple[str, ...],
    says: str,
) -> None:
    if changes:
        application.ask("tandem", "tune", "m", changes, "before")
    before, asked = application.config, len(application.asked)
    ran = live(make_endpoint().url, trace, *options)
    assert isinstance(ran.exception, ConfigError), ran.output
    assert says in str(ran.exception)
    assert (application.config, len(application.asked)) == (before, asked)


def test_real_traffic_is_refused(application: VirtualApplication, make_endpoint: MakeEndpoint, trace: Path) -> None:
    application.requests_per_s = 0.2
    ran = live(make_endpoint().url, trace)
    assert "the application serves 0.2 requests/s now, more than 5% of the first rate (1/s)" in str(ran.exception)
    assert not application.asked


def test_without_a_yes_nothing_starts(
    application: VirtualApplication, make_endpoint: MakeEndpoint, trace: Path
) -> None:
    endpoint = make_endpoint()
    ran = live(endpoint.url, trace, answer="n\n")
    assert "not started" in str(ran.exception)
    assert "counts    1P2D, 1P1D, 1P3D, at most 4 GPUs" in ran.stdout.replace("2P2D", "1P1D")
    assert "`tandem scale --resume` gives the counts back" in ran.stdout
    assert not endpoint.bodies and not application.asked


def test_a_dead_endpoint_is_named_before_anything_is_changed(
    application: VirtualApplication, dead_url: str, trace: Path
) -> None:
    ran = live(dead_url, trace)
    assert isinstance(ran.exception, DeployError)
    assert f"no endpoint answers at {dead_url}" in str(ran.exception)
    assert not application.asked


def test_counts_that_never_serve_end_the_test_with_its_time(
    application: VirtualApplication, make_endpoint: MakeEndpoint, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvtransfer.topology import Role

    application.serve.room = dict.fromkeys(Role, 1)
    ran = live(make_endpoint().url, trace, "--ratios", "2:2,1:3", "--most-minutes", "0.1", "--step-s", "1")
    assert ran.exit_code == 1
    assert application.config == application.base


def test_without_live_a_trace_is_needed() -> None:
    ran = CliRunner().invoke(cli, ["pressure-test"])
    assert "--trace is missing: only --live has a sample of its own" in str(ran.exception)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--first-rate", "60", "--most-rate", "50"), "--first-rate 60 is above --most-rate 50"),
        (("--most-minutes", "0.1", "--step-s", "600"), "--most-minutes 0.1 is shorter than one step of 600 s"),
    ],
)
def test_limits_that_leave_no_step_are_refused_before_anything_runs(
    trace: Path, options: tuple[str, ...], message: str
) -> None:
    ran = live("http://127.0.0.1:1", trace, *options)
    assert message in str(ran.exception)
