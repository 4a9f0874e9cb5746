"""Counts that a test sets are given back, however it ends; the application is virtual, with the real controller."""

import os
import shlex
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from autoscale.decide.config import AutoscaleConfig
from kvtransfer.topology import Role
from serve_app.checks.yaml_checks import ConfigError
from serve_app.cli import scaling
from serve_app.cli.main import cli
from serve_app.local.cluster import DeployError
from serve_app.running import fixed_counts, ray_control
from serve_app.running.fixed_counts import CountsTakenError, FixedCounts
from serve_app.running.ray_control import Control
from tests.serve_app.virtual_control import VirtualApplication

MakeApplication = Callable[..., VirtualApplication]


@pytest.fixture(name="make")
def _make(monkeypatch: pytest.MonkeyPatch) -> MakeApplication:
    monkeypatch.setattr(fixed_counts, "_POLL_S", 0.01)

    def make(capacity: float = 1.0, **changes: Any) -> VirtualApplication:
        policy = {"kind": "static", "prefill": 2, "decode": 4}
        base = AutoscaleConfig.model_validate({"pd_ratio": "1:2", "policy": policy, "gate": {"observation_s": 0.0}})
        application = VirtualApplication(base, capacity)
        monkeypatch.setattr(ray_control, "ask", application.ask)
        if changes:
            Control("tandem").tune(changes, "before")
            for _ in range(5):
                Control("tandem").status()
        return application

    return make


def counts(prefill: int, decode: int) -> dict[Role, int]:
    return {Role.PREFILL: prefill, Role.DECODE: decode}


def ready(fixed: FixedCounts) -> None:
    for _ in range(50):
        if fixed.is_ready(fixed.status().last):
            return
    raise AssertionError("the counts never served")


BEFORE: list[dict[str, Any]] = [
    {},
    {"policy": {"prefill": 3, "decode": 6}},
    {"override": {"prefill": 1, "decode": 3}},
    {"is_paused": True},
    {"override": {"prefill": 2, "decode": 2}, "is_paused": True},
]


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize(
    "end", [None, RuntimeError("a bug"), KeyboardInterrupt(), SystemExit(143), DeployError("dead")]
)
def test_counts_and_settings_are_afterwards_as_before(
    make: MakeApplication, before: dict[str, Any], end: BaseException | None
) -> None:
    application = make(**before)
    config, desired = application.config, application.desired
    raised: BaseException | None = None
    try:
        with FixedCounts(Control("tandem")) as fixed:
            for pair in ((1, 1), (2, 1), (1, 3)):
                fixed.set(counts(*pair))
                ready(fixed)
                assert application.desired == pair
            if end is not None:
                raise end
    except BaseException as error:
        raised = error
    assert raised is end
    for _ in range(5):
        Control("tandem").status()
    assert application.config == config
    assert application.desired == desired


def test_the_policy_goes_on_from_the_counts_of_before_and_not_from_the_last_ones(make: MakeApplication) -> None:
    application = make()
    with FixedCounts(Control("tandem")) as fixed:
        fixed.set(counts(1, 1))
        ready(fixed)
    _, (_, back), (_, end) = application.asked
    assert back == {"override": {"prefill": 2, "decode": 4}, "is_paused": False}
    assert end == {"override": None, "is_paused": False}


def test_counts_are_in_standard_replicas(make: MakeApplication) -> None:
    application = make(capacity=0.5)
    assert application.desired == (4, 8)  # 2P4D in standard replicas
    with FixedCounts(Control("tandem")) as fixed:
        fixed.set(counts(1, 2))
        ready(fixed)
        assert application.desired == (2, 4)
    _, (_, back), _ = application.asked
    assert back == {"override": {"prefill": 2, "decode": 4}, "is_paused": False}
    for _ in range(5):
        Control("tandem").status()
    assert application.desired == (4, 8)


def test_rest_keeps_the_counts_of_before_until_the_test_is_forgotten(make: MakeApplication) -> None:
    application = make()
    with FixedCounts(Control("tandem")) as fixed:
        fixed.set(counts(1, 1))
        ready(fixed)
        fixed.rest(0.05)
        assert application.config.override is not None
        assert application.desired == (2, 4)
    assert application.config == application.base


def test_nothing_is_changed_if_no_counts_were_set_or_they_were_refused(make: MakeApplication) -> None:
    application = make()
    with FixedCounts(Control("tandem")) as fixed, pytest.raises(ConfigError, match="lies outside 1P1D to 8P8D"):
        fixed.set(counts(9, 1))
    assert application.config == application.base
    assert len(application.asked) == 1  # the refused one


@pytest.mark.parametrize("change", [{"override": {"prefill": 5, "decode": 5}}, {"override": None}, {"is_paused": True}])
def test_counts_that_others_changed_meanwhile_stay(make: MakeApplication, change: dict[str, Any]) -> None:
    application = make()
    with pytest.raises(CountsTakenError, match="by others during the test"), FixedCounts(Control("tandem")) as fixed:
        fixed.set(counts(1, 1))
        Control("tandem").tune(change, "by others")
        changed = application.config
        fixed.status()
    assert application.config == changed


def test_other_settings_that_were_tuned_meanwhile_stay(make: MakeApplication) -> None:
    application = make()
    with FixedCounts(Control("tandem")) as fixed:
        fixed.set(counts(1, 1))
        Control("tandem").tune({"policy": {"decode": 6, "prefill": 3}}, "by others")
    assert application.config.override is None
    assert application.config.policy.model_dump()["decode"] == 6


def test_a_coordinator_that_restarts_is_asked_again_until_the_counts_are_back(make: MakeApplication) -> None:
    application = make()
    with FixedCounts(Control("tandem")) as fixed:
        fixed.set(counts(1, 1))
        application.silent_asks = 5
    assert application.config == application.base


def test_a_dead_coordinator_leaves_the_command_that_gives_the_counts_back(
    make: MakeApplication, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fixed_counts, "_PATIENCE_S", 0.05)
    application = make(override={"prefill": 2, "decode": 3})
    with (
        pytest.raises(DeployError, match=r"could not be given back .* run `tandem tune "),
        FixedCounts(Control("tandem")) as fixed,
    ):
        fixed.set(counts(1, 1))
        application.silent_asks = 10**9


@pytest.fixture(name="handlers")
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_counts_are_given_back_waits_for_that(
    make: MakeApplication, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, handlers: None
) -> None:
    application = make()
    tune = application._tune

    def interrupted(changes: Any) -> str | None:
        if changes["override"] is None:
            os.kill(os.getpid(), number)
            time.sleep(0.05)
        return tune(changes)

    with pytest.raises(SystemExit) as ended, FixedCounts(Control("tandem")) as fixed:
        fixed.set(counts(1, 1))
        monkeypatch.setattr(application, "_tune", interrupted)
    assert ended.value.code == 128 + number
    assert application.config == application.base


@pytest.mark.parametrize("before", BEFORE)
def test_the_command_that_gives_the_counts_back_does_what_it_says(
    make: MakeApplication, before: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    application = make(**before)
    config = application.config
    fixed = FixedCounts(Control("tandem", "m"))
    fixed.set(counts(1, 1))
    monkeypatch.setattr(scaling, "connect", lambda address: None)
    program, *arguments = shlex.split(fixed.command_back)
    assert (program, arguments[-2:]) == ("tandem", ["--service", "m"])
    ran = CliRunner().invoke(cli, arguments)
    assert ran.exit_code == 0, ran.output
    assert application.config == config
