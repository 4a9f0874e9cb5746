"""Traces planned window by window, and the highest rate of fixed GPUs."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from autoscale.operators.costs import Phase
from autoscale.operators.demand import PlanError, SloBelowServiceError, TooFewGpusError
from autoscale.operators.evaluation import Assumptions
from autoscale.operators.gpu import gpu_named
from autoscale.operators.options import Limits
from autoscale.operators.over_time import MODEL_START_S, OPERATOR_START_S, Elasticity, course
from autoscale.operators.planners import PLANNERS, Planner
from autoscale.operators.throughput import highest_rate
from autoscale.operators.window_demands import decode_demands, prefill_demands
from autoscale.traces.trace import TraceRequest
from tests.autoscale.operators.roofline import HandCosts
from tests.autoscale.operators.test_energy import POWER

MakePlanner = Callable[..., Planner]


@dataclass(frozen=True, kw_only=True)
class _ByLength(HandCosts):
    """The times of ``HandCosts`` at 500 tokens, and in proportion to the length."""

    def time_s(self, name: str, *, parallel: int, length_tokens: int, batch: int) -> float:
        return length_tokens / 500 * self.fixed_s[name]


@pytest.fixture
def make_planner(turns: Assumptions) -> MakePlanner:
    """Operators of 0.1 and 0.04 s, whatever the length; objective 0.2 s."""

    def make(name: str = "search", slo_s: float = 0.2) -> Planner:
        return Planner(
            costs=HandCosts(fixed_s={"a": 0.1, "b": 0.04}, each_s={"a": 0.0, "b": 0.0}, weights={"a": 1e9, "b": 1e9}),
            phase=Phase.PREFILL,
            gpu=gpu_named("A100"),
            limits=Limits(batches=(1,)),
            assumptions=turns,
            slo_s=slo_s,
            plan=PLANNERS[name],
        )

    return make


def _burst(counts: list[int], window_s: float = 10.0) -> list[TraceRequest]:
    """Requests evenly inside each window."""
    return [
        TraceRequest(at_s=number * window_s + window_s * (place + 0.5) / count, input_tokens=500, output_tokens=50)
        for number, count in enumerate(counts)
        for place in range(count)
    ]


def test_demands_of_prefill() -> None:
    requests = [
        TraceRequest(at_s=at, input_tokens=tokens, output_tokens=1) for at, tokens in ((0, 100), (9.9, 300), (25, 50))
    ]
    first, second, third = prefill_demands(requests, 10.0)
    assert (first.passes_per_s, first.length_tokens, first.arrivals_s) == (0.2, 200.0, (0, 9.9))
    assert (second.passes_per_s, second.length_tokens) == (0.0, 0.0)
    assert third.start_s == 20.0


def test_demands_of_decode_follow_the_tokens() -> None:
    """100 tokens of 0.1 s from 5 s to 15 s: 50 tokens in each of two windows, with a context of 1,050."""
    requests = [
        TraceRequest(at_s=5.0, input_tokens=1000, output_tokens=100),
        TraceRequest(at_s=29.0, input_tokens=1, output_tokens=1),
    ]
    demands = decode_demands(requests, 10.0, 0.1)
    assert [one.passes_per_s for one in demands] == pytest.approx([5.0, 5.0, 0.1])
    assert demands[1].length_tokens == pytest.approx(1050.0)
    assert demands[2].length_tokens == pytest.approx(1.5)


def test_traces_that_say_nothing_are_refused() -> None:
    with pytest.raises(PlanError, match="the trace has no request"):
        prefill_demands([], 10.0)
    with pytest.raises(PlanError, match="window_s is 0"):
        prefill_demands(_burst([1]), 0.0)
    with pytest.raises(PlanError, match="tpot_s is nan"):
        decode_demands(_burst([1]), 10.0, float("nan"))


def test_slow_starts_miss_the_objective_after_a_rise(make_planner: MakePlanner) -> None:
    """A rise from 1 to 12 requests/s. A plan sees it one window late; its replicas start 0.5 s or 25 s later.

    Operators: the whole window of the rise is missed, and 0.5 s of the next: 120 and 6 requests. A start of 25 s misses
    25 s: two windows more, and half of the third, which are 300 requests instead of 6.
    """
    demands = prefill_demands(_burst([10, 10, *[120] * 6]), 10.0)
    fast = course(make_planner(), demands, Elasticity(start_s=OPERATOR_START_S), POWER)
    slow = course(make_planner(), demands, Elasticity(start_s=25.0), POWER)
    assert fast.requests == 740
    assert fast.requests - round(fast.attained_frac * fast.requests) == 126
    assert slow.requests - round(slow.attained_frac * slow.requests) == 120 + 300
    assert fast.gpu_hours == slow.gpu_hours  # replicas that start are paid for
    assert [one.wanted.gpus for one in fast.windows[:4]] == [1, 1, 1, 3]
    assert MODEL_START_S > OPERATOR_START_S


def test_a_plan_that_knows_its_window_misses_only_the_start(make_planner: MakePlanner) -> None:
    demands = prefill_demands(_burst([10, 120, 120]), 10.0)
    known = course(make_planner(), demands, Elasticity(start_s=0.5, lag_windows=0), POWER)
    assert known.requests - round(known.attained_frac * known.requests) == 6


def test_a_dip_that_is_shorter_than_a_start_costs_requests(make_planner: MakePlanner) -> None:
    """A replica that was not wanted for one window must start again."""
    demands = prefill_demands(_burst([120, 120, 10, 120, 120]), 10.0)
    course_ = course(make_planner(), demands, Elasticity(start_s=12.0), POWER)
    assert [one.wanted.gpus for one in course_.windows] == [3, 3, 3, 1, 3]
    assert course_.attained_frac < 1.0


def test_hours_energy_and_memory(make_planner: MakePlanner) -> None:
    """Six windows of 12 requests/s at three GPUs: 18 x 10 s / 3600 GPU-hours. The rounded rate is at least 12/s."""
    demands = prefill_demands(_burst([120] * 6), 10.0)
    result = course(make_planner("model"), demands, Elasticity(start_s=0.0), POWER)
    assert result.gpu_hours == pytest.approx(18 * 10 / 3600)
    assert result.attained_frac == 1.0
    assert result.mean_memory_bytes == pytest.approx(6e9)
    rate = result.windows[0].wanted.table.demand.passes_per_s
    assert 12.0 <= rate < 12.0 * 1.1
    assert result.energy_kwh == pytest.approx((300 + 300 * 0.14 * rate) * 60 / 3.6e6)
    assert result.unplanned_windows == 0


def test_one_request_is_a_trace(make_planner: MakePlanner) -> None:
    result = course(make_planner(), prefill_demands(_burst([1]), 10.0), Elasticity(start_s=0.5), POWER)
    assert (result.requests, result.attained_frac, len(result.windows)) == (1, 1.0, 1)


def test_windows_without_requests_keep_a_plan(make_planner: MakePlanner) -> None:
    idle = TraceRequest(at_s=55.0, input_tokens=500, output_tokens=50)
    result = course(make_planner(), prefill_demands([*_burst([10]), idle], 10.0), Elasticity(start_s=0.5), POWER)
    assert [one.wanted.gpus for one in result.windows] == [1] * 6
    assert result.windows[2].judged is None
    assert result.windows[2].power_w == POWER.idle_w  # one GPU at rest


def test_a_demand_without_a_plan_is_counted(make_planner: MakePlanner) -> None:
    """Prompts of 1,000 tokens take 0.28 s, above the objective of 0.2 s: the last plan stays, and all of them miss."""
    planner = replace(make_planner(), costs=_ByLength(fixed_s={"a": 0.1, "b": 0.04}, each_s={"a": 0.0, "b": 0.0}))
    long = [TraceRequest(at_s=10.0 + at, input_tokens=1000, output_tokens=1) for at in range(5)]
    result = course(
        planner, prefill_demands([*_burst([10]), *long], 10.0), Elasticity(start_s=0.5, lag_windows=0), POWER
    )
    assert result.unplanned_windows == 1
    assert result.attained_frac == 10 / 15
    with pytest.raises(SloBelowServiceError):
        course(make_planner(slo_s=0.1), prefill_demands(_burst([5]), 10.0), Elasticity(start_s=0.5), POWER)
    with pytest.raises(PlanError, match="no window"):
        course(make_planner(), [], Elasticity(start_s=0.5), POWER)


def test_plans_of_demands_that_come_again_are_kept(make_planner: MakePlanner) -> None:
    planner = make_planner()
    assert planner.at(planner.rounded(12.0, 500)) is planner.at(planner.rounded(12.5, 510))
    rounded = planner.rounded(12.0, 500)
    assert rounded == planner.rounded(rounded.passes_per_s, rounded.length_tokens)
    assert planner.rounded(0.0, 1).passes_per_s == 0.0


def test_highest_rate_by_hand(make_planner: MakePlanner) -> None:
    """One GPU keeps 0.2 s up to 0.14 / (1 - 0.14 q) = 0.2: q = 2.143/s. Found within a hundredth."""
    planner = make_planner("model")
    found = highest_rate(planner, gpus=1, length_tokens=500)
    assert found.passes_per_s == pytest.approx((1 - 0.14 / 0.2) / 0.14, rel=0.01)
    assert found.plan.gpus == 1
    assert highest_rate(make_planner(), gpus=3, length_tokens=500).passes_per_s >= 12.0
    with pytest.raises(SloBelowServiceError):
        highest_rate(make_planner(slo_s=0.1), gpus=1, length_tokens=500)
    with pytest.raises(TooFewGpusError, match="0 GPUs do not hold"):
        highest_rate(planner, gpus=0, length_tokens=500)
