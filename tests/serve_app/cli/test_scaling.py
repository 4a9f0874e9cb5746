"""The commands for the size of a running application: what they refuse, and how they read their arguments."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from autoscale.decide.config import AutoscaleConfig, OverrideConfig
from autoscale.decide.status import PlanRecord, ServiceStatus, Status
from autoscale.decide.tuning import Pools
from autoscale.load_forecast import Accuracy, LoadForecast, SeriesForecast
from autoscale.types import (
    ControllerState,
    Decision,
    Latency,
    Note,
    NoteKind,
    Plan,
    PolicyFault,
    PoolKey,
    PoolLimits,
    Refused,
    Shown,
    Traffic,
)
from kvtransfer.topology import Role
from serve_app.checks.yaml_checks import ConfigError
from serve_app.cli.main import cli
from serve_app.cli.scaling import _nested
from serve_app.cli.scaling_view import scaling_view
from tests.autoscale.recording import recorded


@pytest.mark.parametrize(
    ("pairs", "nested"),
    [
        (["pd_ratio=1:2"], {"pd_ratio": "1:2"}),
        (["auto_ratio.lowest=1:2"], {"auto_ratio": {"lowest": "1:2"}}),
        (["policy.target=500", "policy.signal=ttft"], {"policy": {"target": 500, "signal": "ttft"}}),
        (["guard.budget_gpus=null"], {"guard": {"budget_gpus": None}}),
        (["is_paused=true"], {"is_paused": True}),
        (
            ["policy={kind: queue_depth, decode_requests_per_s: 2}"],
            {"policy": {"kind": "queue_depth", "decode_requests_per_s": 2}},
        ),
    ],
)
def test_pairs_are_read_as_yaml_under_their_path(pairs: list[str], nested: dict[str, Any]) -> None:
    assert _nested(pairs) == nested


@pytest.mark.parametrize("pair", ["pd_ratio", "=1", ".a=1", "a..b=1", "policy={"])
def test_an_invalid_pair_is_refused_with_an_example(pair: str) -> None:
    with pytest.raises(ConfigError, match=r"no FIELD=VALUE, such as pd_ratio=1:2"):
        _nested([pair])


def test_a_field_below_a_value_is_refused() -> None:
    with pytest.raises(ConfigError, match="policy is given a value and fields"):
        _nested(["policy=1", "policy.target=2"])


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["scale"], "give both --prefill and --decode, or --resume alone"),
        (["scale", "--prefill", "1"], "give both --prefill and --decode, or --resume alone"),
        (["scale", "--prefill", "1", "--decode", "1", "--resume"], "give both --prefill and --decode, or --resume"),
        (["tune"], "give FIELD=VALUE pairs, or --reset alone"),
        (["tune", "pd_ratio=1:2", "--reset"], "give FIELD=VALUE pairs, or --reset alone"),
        (["replay", "none.jsonl"], "none.jsonl: cannot be read"),
    ],
)
def test_commands_with_missing_or_contradicting_options_are_refused(command: list[str], said: str) -> None:
    result = CliRunner().invoke(cli, command)
    assert isinstance(result.exception, ConfigError)
    assert said in str(result.exception)


@pytest.fixture(scope="module", name="log")
def _log(make_autoscale: Callable[..., AutoscaleConfig], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("log") / "decisions.jsonl"
    path.write_text("\n".join(recorded(make_autoscale(pd_ratio="1:3"))) + "\n")
    return path


def test_a_log_replays_to_the_same_plans(log: Path) -> None:
    result = CliRunner().invoke(cli, ["replay", str(log)])
    assert result.exit_code == 0
    assert result.stdout.strip().endswith(" decisions, 0 different")


def test_another_config_shows_its_differences_and_exits_with_1(
    log: Path, tmp_path: Path, make_app_args: Callable[..., dict[str, Any]]
) -> None:
    import yaml

    group = {"name": "g0", "prefill": {"max_replicas": 9}, "decode": {"max_replicas": 9}}
    autoscale = {"pd_ratio": "1:1", "policy": {"kind": "heteroscale", "target": 50.0}}
    document = {"applications": [{"args": make_app_args(groups=[group], autoscale=autoscale)}]}
    config = tmp_path / "other.yaml"
    config.write_text(yaml.safe_dump(document))
    result = CliRunner().invoke(cli, ["replay", str(log), "--config", str(config)])
    assert result.exit_code == 1
    assert "counts: {" in result.stdout
    assert "0 different" not in result.stdout


P, D = PoolKey("g0", Role.PREFILL), PoolKey("g0", Role.DECODE)
POOLS = Pools({key: PoolLimits(lowest_replicas=1, highest_replicas=9) for key in (P, D)})
CONFIG = AutoscaleConfig.model_validate({"pd_ratio": "1:3", "policy": {"kind": "heteroscale", "target": 50}})
PLAN = Plan(
    counts={P: 2, D: 5},
    admitted=("p0", "d0", "d1"),
    withdrawn=("d2",),
    reinstated=(),
    victims=("d3",),
    decision=Decision(wanted=None, reason="paused by hand", shown=(Shown(name="decode_tps", value=40.0, target=50.0),)),
    held_back=(Note(NoteKind.COOLDOWN, "cooldown: 3.0 s left"),),
    state=ControllerState(desired={P: 2, D: 4}, missing_since_s={P: (90.0, 1)}, capped={P: (130.0, 1)}, ticked_s=98.0),
)
LAST = PlanRecord(
    plan=PLAN,
    running={P: ("p0",), D: ("d0", "d1", "d2", "d3", "d4")},
    draining={},
    latency=Latency(ttft_s=0.4567),
    traffic=Traffic(requests_per_s=12.34, input_tokens_mean=1200.0),
)


def shown(*, is_hooked: bool = True, **changes: Any) -> str:
    service = ServiceStatus(**{"config": CONFIG, "tuned": {}, "pools": POOLS, "last": LAST, **changes})
    status = Status(
        log_path="/logs/decisions.jsonl", cordoned=(), topology=None, services={"m": service}, is_hooked=is_hooked
    )
    console = Console(width=100, record=True, file=None, force_terminal=False)
    with console.capture() as captured:
        console.print(scaling_view("tandem", service, status, 100.0))
    return captured.get()


def test_top_names_the_group_in_whose_replicas_a_role_is_counted() -> None:
    limits = {P: POOLS.root[P], D: replace(POOLS.root[D], capacity=0.5)}
    assert "serving 1P1D in replicas of group g0" in shown(pools=Pools(limits))
    assert "in replicas of" not in shown()


def test_top_shows_how_many_replicas_serve_wait_are_withdrawn_and_end() -> None:
    text = shown()
    decode = next(line.split() for line in text.splitlines() if line.strip().startswith("decode:g0"))
    assert decode == ["decode:g0", "4", "5", "5", "2", "1", "1", "1"]
    prefill = next(line.split() for line in text.splitlines() if line.strip().startswith("prefill:g0"))
    assert prefill == ["prefill:g0", "2", "2", "1", "1", "0", "0", "0", "10", "s"]
    assert "TTFT 0.457 of 1 s, TPOT - of 0.05 s" in text
    assert "last decision 2 s ago: paused by hand" in text
    assert "decode_tps 40, target 50" in text
    assert "12.34 requests/s of 1200 input and - output tokens on average" in text
    assert "held back: cooldown: 3.0 s left" in text
    assert "ratio 1:3, policy heteroscale, serving 1P2D" in text
    assert "no room for more than 1 of prefill:g0" in text
    assert "tried again in 30 s" in text
    assert "Serve's choice" not in text


def test_top_shows_the_forecast_its_errors_and_why_the_last_value_is_used() -> None:
    accuracy = Accuracy(
        forecasts=12,
        mape_frac=0.1,
        last_mape_frac=0.2,
        error_ratio=0.5,
        near_frac=0.75,
        last_near_frac=0.5,
        coverage_frac=0.83,
    )
    rate = SeriesForecast(value=7.0, low=6.0, high=8.0, last=5.0, model="ARIMA(0, 1, 1)", accuracy=accuracy)
    length = SeriesForecast(value=90.0, last=90.0, model="last value", fallback="the series is constant")
    forecast = LoadForecast(
        issued_s=60.0, horizon_s=120.0, requests_per_s=rate, input_tokens=length, output_tokens=length
    )
    text = " ".join(shown(last=replace(LAST, forecast=forecast)).split())
    assert "forecast in 80 s: requests_per_s 7 (6 to 8), ARIMA(0, 1, 1); MAPE 10.0%, of the last value 20.0%" in text
    assert "75% near (last value 50%), 83% in the 80 % interval, of 12" in text
    assert "input_tokens 90, last value: the series is constant" in text
    assert "forecast" not in shown()


def test_top_shows_demand_that_is_not_served_at_once() -> None:
    refused = (Refused(reason="late", priority="low", requests_per_s=4.2),)
    text = shown(last=replace(LAST, traffic=Traffic(served_per_s=1.8, waiting_requests=2.0, refused=refused)))
    assert "1.8/s get a first token, 2 wait at the endpoint, refused: 4.2/s late (low)" in text
    assert "wait at the endpoint" not in shown()


def test_top_shows_how_many_replicas_have_no_place_and_why() -> None:
    plan = replace(PLAN, pending={Role.PREFILL: 1, Role.DECODE: 3}, passed_over={"g0": "no node has room"})
    text = shown(last=replace(LAST, plan=plan))
    assert "no place for 1P3D" in text and "g0 passed over: no node has room" in text
    assert "no place" not in shown()


def test_top_shows_the_floors_that_hold_and_the_next_one() -> None:
    def text(begins: str, ends: str) -> str:
        period = {"begins": begins, "ends": ends, "decode": 4}
        document = {**CONFIG.model_dump(mode="json"), "floors": {"prewarm_s": 300.0, "periods": [period]}}
        return " ".join(shown(config=AutoscaleConfig.model_validate(document)).split())

    # The view shows the second 100 of Thursday, 1 January 1970.
    in_force = text("0 0 * * *", "30 0 * * *")
    assert "floor of 4 decode replicas since Thu 01 Jan 00:00, until Thu 01 Jan 00:30 (UTC)" in in_force
    assert "next: floor of 4 decode replicas from Fri 02 Jan 00:00" in in_force
    prewarm = text("5 0 * * *", "30 0 * * *")
    assert "prewarm for the floor of 4 decode replicas from Thu 01 Jan 00:05" in prewarm
    assert "next:" not in prewarm
    later = text("0 6 * * *", "0 10 * * *")
    assert "next: floor of 4 decode replicas from Thu 01 Jan 06:00 until Thu 01 Jan 10:00 (UTC), prewarm" in later
    assert "floor" not in shown()


def test_top_names_a_policy_that_fails_and_what_is_wrong_with_a_collector() -> None:
    reason = "policy my_pkg.policies:Mine raised KeyError: 'x'; the counts stay"
    decision = Decision(wanted=None, reason=reason, fault=PolicyFault.RAISED)
    faults = ("collector file: ttft_s is nan: it is not finite",)
    text = shown(last=replace(LAST, plan=replace(PLAN, decision=decision), collector_faults=faults))
    assert reason in " ".join(text.split()) and faults[0] in text


def test_top_names_every_unusual_state() -> None:
    assert "RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH" in shown(is_hooked=False)
    override = OverrideConfig(prefill=1, decode=2)
    config = CONFIG.model_copy(update={"is_paused": True, "is_observing": True, "override": override})
    text = shown(config=config, tuned={"is_paused": True})
    assert all(word in text for word in ("PAUSED", "ONLY OBSERVING", "SET BY HAND to 1P2D", "tuned since"))
    assert "no decision yet" in shown(last=None)
