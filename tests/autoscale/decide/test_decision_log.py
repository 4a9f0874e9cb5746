"""A log replays to the same plans, and shows what another configuration would have done."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from autoscale.decide.config import AutoscaleConfig
from autoscale.decide.controller import Controller
from autoscale.decide.decision_log import (
    PLAN,
    LogLine,
    config_line,
    is_news,
    is_traffic_due,
    load_lines,
    parse_line,
    replay,
    traffic_line,
)
from autoscale.policies.peers import SIM_POLICIES
from autoscale.sim.config import SimAutoscaleConfig
from autoscale.types import PoolKey, Traffic
from kvtransfer.topology import Role
from tests.autoscale.recording import recorded
from tests.autoscale.virtual_serve import VirtualServe

P, D = Role.PREFILL, Role.DECODE
GOLDEN = sorted((Path(__file__).parents[1] / "replay").glob("*.jsonl"))


@pytest.fixture(scope="module", name="log")
def _log(make_autoscale: Callable[..., AutoscaleConfig]) -> list[str]:
    """Log lines of a virtual cluster; each decision has the snapshot from which its plan was made."""
    config = make_autoscale(pd_ratio="1:3", gate={"observation_s": 6.0})
    return recorded(config)


def test_a_log_replays_to_the_same_plans(log: list[str]) -> None:
    assert 8 < len(log) < 60
    assert list(replay(log)) == [None] * (len(log) - 1)


def test_any_line_replays_alone(log: list[str], make_autoscale: Callable[..., AutoscaleConfig]) -> None:
    config = make_autoscale(pd_ratio="1:3", gate={"observation_s": 6.0})
    for line in log[1:]:
        assert list(replay([line], config)) == [None]


def test_lines_of_traffic_change_no_replay(log: list[str]) -> None:
    line = traffic_line("m", 1000.0, Traffic(requests_per_s=2.5))
    assert list(replay([log[0], line, *log[1:], line])) == list(replay(log))


def test_a_line_is_read_as_what_it_is(log: list[str]) -> None:
    traffic = Traffic(requests_per_s=2.5, input_tokens_mean=100.0)
    assert parse_line(traffic_line("m", 1000.0, traffic)) == LogLine(service="m", at_s=1000.0, traffic=traffic)
    first, second = map(parse_line, log[:2])
    assert first.config is not None and first.traffic is None
    assert second.traffic is not None and second.pools is not None and second.config is None
    for wrong in ("{", "[]", "{}", '{"traffic": 1}', '{"service": "m", "at_s": 1, "config": {}}'):
        with pytest.raises(ValueError, match="no line of a decision log"):
            parse_line(wrong)


def test_traffic_is_due_a_minute_after_the_last_line() -> None:
    assert is_traffic_due(100.0, None)
    assert not is_traffic_due(100.0, 40.1)
    assert is_traffic_due(100.0, 40.0)


def test_another_config_shows_what_it_would_have_done(
    log: list[str], make_autoscale: Callable[..., AutoscaleConfig]
) -> None:
    other = make_autoscale(pd_ratio="1:3", gate={"observation_s": 6.0}, policy={"kind": "heteroscale", "target": 50.0})
    differences = [difference for difference in replay(log, other) if difference is not None]
    assert differences
    first = differences[0]
    assert first.fields["counts"][0] != first.fields["counts"][1]
    assert json.loads(log[first.line - 1])["snapshot"]["now_s"] == first.now_s


def test_the_configuration_may_change_in_the_middle(
    log: list[str], make_autoscale: Callable[..., AutoscaleConfig]
) -> None:
    half = len(log) // 2
    other = config_line("m", make_autoscale(pd_ratio="1:1"), 2000.0, "tuned")
    results = list(replay([*log[:half], other, *log[half:]]))
    assert results[: half - 1] == [None] * (half - 1)
    assert any(results[half - 1 :])


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["{"], "line 1 is no line of a decision log"),
        (["[]"], "line 1 is no line of a decision log"),
        (["{}"], "line 1 is no line of a decision log"),
        (['{"config": {"pd_ratio": "1:99"}}'], "line 1 is no line of a decision log"),
        (['{"snapshot": {"now_s": "x"}, "plan": {}}'], "line 1 is no line of a decision log"),
        (
            ['{"snapshot": {"now_s": 1, "pools": []}, "plan": {"held_back": [5]}}'],
            "line 1 is no line of a decision log",
        ),
        (['{"snapshot": {"now_s": 1, "pools": []}, "plan": []}'], "line 1 is no line of a decision log"),
    ],
)
def test_an_invalid_line_of_a_log_is_named_by_its_number(lines: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        list(replay(lines))


def test_a_decision_before_any_configuration_is_refused(log: list[str]) -> None:
    with pytest.raises(ValueError, match="line 1 is a decision before any configuration: give one with --config"):
        list(replay(log[1:]))


def test_a_plan_without_another_decision_is_no_news(make_autoscale: Callable[..., AutoscaleConfig]) -> None:
    cluster = VirtualServe(Controller(make_autoscale()), {P: 1.0, D: 1.0})
    plans = [cluster.tick(90.0) for _ in range(5)]
    assert [is_news(plan, last) for last, plan in zip([None, *plans], plans, strict=False)] == [True] + [False] * 4
    assert plans[0].counts == {PoolKey("g0", P): 1, PoolKey("g0", D): 1}


def test_a_plan_keeps_the_kinds_of_its_notes(make_autoscale: Callable[..., AutoscaleConfig]) -> None:
    cluster = VirtualServe(Controller(make_autoscale(guard={"cooldown_out_s": 60.0})), {P: 1.0, D: 1.0})
    plans = [cluster.tick(load) for load in (90.0, 200.0, 400.0)]
    notes = [note for plan in plans for note in plan.held_back]
    assert notes
    assert [PLAN.validate_json(PLAN.dump_json(plan)) for plan in plans] == plans


def test_notes_are_compared_by_their_kind_if_they_have_one_and_not_by_their_text(
    make_autoscale: Callable[..., AutoscaleConfig],
) -> None:
    config = make_autoscale(pd_ratio="1:3", guard={"cooldown_in_s": 60.0}, gate={"observation_s": 6.0})
    lines = [json.loads(line) for line in recorded(config)]
    logged = next(line for line in lines if line.get("plan", {}).get("held_back"))

    def replayed(*notes: object) -> list[bool]:
        line = json.dumps({**logged, "plan": {**logged["plan"], "held_back": notes}})
        return [difference is None for difference in replay([line], config)]

    notes = logged["plan"]["held_back"]
    assert replayed(*({**note, "text": "other words"} for note in notes)) == [True]
    assert replayed(*(note["text"] for note in notes)) == [True]
    assert replayed(*({**note, "kind": "woken_group"} for note in notes)) == [False]
    assert replayed() == [False]


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_golden_logs_replay_as_they_were_written(path: Path) -> None:
    first, *decisions = load_lines(path)
    results = list(replay(decisions, SimAutoscaleConfig.model_validate(json.loads(first)["config"])))
    assert results
    assert results == [None] * len(results)


def test_there_is_a_golden_log_of_every_policy() -> None:
    kinds = {json.loads(load_lines(path)[0])["config"]["policy"]["kind"] for path in GOLDEN}
    assert kinds == set(SIM_POLICIES)
