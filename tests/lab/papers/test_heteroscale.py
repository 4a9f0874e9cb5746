"""HeteroScale's rows: what they measure by hand, the rules that decide them, and one figure in the simulator."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from autoscale.engines.profile import EngineProfile
from autoscale.policies.heteroscale import HeteroScaleConfig, Signal
from autoscale.pressure.rate_search import PressurePoint
from autoscale.traces.trace import TraceRequest
from kvtransfer.topology import Role
from tests.lab.papers.heteroscale import ratio_claim, schedule_of, signal_claims
from tests.lab.papers.heteroscale_setting import (
    ATTAINMENT_FRAC,
    DAY_FRAC,
    DAY_S,
    HOUR_S,
    NODES,
    PEAK_HOUR,
    PEAK_NODES,
    PROFILE,
    SERVICE_A,
    SERVICE_B,
    Dialogue,
    pressure,
    throughput,
)
from tests.lab.papers.heteroscale_signals import Tracking, Tried, signal_configs, tracking

H100 = EngineProfile.load(PROFILE)


def point(prefill: int, requests_per_s: float) -> PressurePoint:
    """A split, at which every signal shows 0.5."""
    return PressurePoint(
        prefill=prefill,
        decode=NODES - prefill,
        requests_per_s=requests_per_s,
        attainment_frac=0.95,
        signals=dict.fromkeys(Signal, 0.5),
    )


# Its 16 nodes, 9 of them prefill, carry 20 requests/s at 0.8 of their highest rate.
DIALOGUE = Dialogue(sim=SERVICE_A.cluster(H100), best=point(9, 25.0))


def test_tracking_by_hand() -> None:
    # 1 of 4, 0 of 5 and 2 of 8 away from the need; at most 10 replicas for a need of 8, and at least 5.
    seen = tracking(np.array([5.0, 5.0, 10.0]), np.array([4.0, 5.0, 8.0]))
    assert seen.error_frac == pytest.approx((0.25 + 0.0 + 0.25) / 3)
    assert (seen.overshoot, seen.swing) == (1.25, 2.0)


def test_following_exactly_is_no_error() -> None:
    needed = np.array([3.0, 6.0, 2.0])
    assert tracking(needed, needed) == Tracking(error_frac=0.0, overshoot=1.0, swing=3.0)


def test_need_is_the_load_at_the_thresholds() -> None:
    assert DIALOGUE.nodes(np.array([10.0, 20.0])) == pytest.approx([8.0, 16.0])
    assert DIALOGUE.needed(np.array([PEAK_HOUR * HOUR_S])) == pytest.approx([PEAK_NODES])
    assert DIALOGUE.counts(16.0) == {Role.PREFILL: 9, Role.DECODE: 7}
    assert DIALOGUE.counts(8.0) == {Role.PREFILL: 5, Role.DECODE: 4}  # 4.5 and 3.5, rounded up


def test_the_day_has_the_papers_shape() -> None:
    morning, noon, afternoon = DAY_FRAC[PEAK_HOUR], DAY_FRAC[12], DAY_FRAC[14]
    assert len(DAY_FRAC) == 24
    assert morning == max(DAY_FRAC) > afternoon > noon > min(DAY_FRAC) == DAY_FRAC[4]


def test_a_schedule_holds_what_the_busiest_minute_of_each_period_needed() -> None:
    """20 requests/s need all 16 nodes; they come for a minute of the second period, and 5 in every other one."""
    busy_s = 5 * HOUR_S
    rates = [20 if at == busy_s // 60 else 5 for at in range(int(DAY_S // 60))]
    day = [
        TraceRequest(at_s=60.0 * minute + second, input_tokens=1, output_tokens=1)
        for minute, rate in enumerate(rates)
        for second in range(60)
        for _ in range(rate)
    ]
    periods = schedule_of(DIALOGUE, day).periods
    assert [period.begins for period in periods] == [
        f"{minute % 60} {minute // 60} * * *" for minute in (0, 16, 32, 48, 64, 80)
    ]
    assert [(period.prefill, period.decode) for period in periods] == [(3, 2), (9, 7), *[(3, 2)] * 4]


@pytest.mark.parametrize(
    ("rates", "is_reproduced"),
    [((2.0, 10.0, 3.0), True), ((9.0, 10.0, 3.0), False), ((12.0, 10.0, 3.0), False), ((2.0, 3.0, 3.5), False)],
)
def test_a_peak_is_in_the_middle_and_the_ends_are_lower(rates: Sequence[float], is_reproduced: bool) -> None:
    curve = [point(prefill, rate) for prefill, rate in zip((1, 9, 15), rates, strict=True)]
    assert ratio_claim(SERVICE_A, curve).is_reproduced is is_reproduced


def test_service_b_serves_most_at_a_middle_split() -> None:
    """The middle split serves 8 requests/s within the objective; the ends not even 0.8 of that: the claim's rule."""
    test = pressure(SERVICE_B, H100)
    assert test.run(9, 7, 8.0).attainment_frac >= ATTAINMENT_FRAC
    assert test.run(1, 15, 6.4).attainment_frac < ATTAINMENT_FRAC
    assert test.run(15, 1, 6.4).attainment_frac < ATTAINMENT_FRAC


def test_the_curve_names_each_split_with_its_rate() -> None:
    (point,) = throughput(pressure(SERVICE_B, H100), (15,))
    assert point.name == "15P1D"
    assert 0.5 < point.requests_per_s < 2.0


def test_all_signals_act_at_the_same_load() -> None:
    configs = signal_configs(replace(DIALOGUE, best=point(9, 40.0)), pressure(SERVICE_A, H100))
    assert list(configs) == list(Signal)
    policies = {}
    for signal, config in configs.items():
        assert isinstance(config.policy, HeteroScaleConfig)
        policies[signal] = config.policy
    latencies = [policies.pop(signal) for signal in (Signal.TTFT, Signal.TPOT)]
    assert {policy.target for policy in policies.values()} == {0.4}  # 0.8 of what each shows at the best split
    for policy in latencies:  # less load, less latency; at the highest rate more
        assert policy.latency.relaxed_frac < policy.latency.moderate_frac == 1.0 < policy.latency.severe_frac
    assert configs[Signal.TTFT].slo.ttft_s < SERVICE_A.ttft_s
    assert configs[Signal.TPOT].slo.tpot_s < SERVICE_A.tpot_s


def tried(error_frac: float, overshoot: float, events: int, half_load_frac: float) -> Tried:
    seen = Tracking(error_frac=error_frac, overshoot=overshoot, swing=2.0)
    return Tried(tracking=seen, scale_events=events, half_load_frac=half_load_frac)


def test_signals_that_behave_as_in_the_paper_are_reproduced() -> None:
    found = dict.fromkeys(Signal, tried(0.1, 1.1, 20, 0.5))
    found |= dict.fromkeys((Signal.DECODE_GPU_UTILIZATION, Signal.DECODE_SM_ACTIVITY), tried(0.9, 2.0, 5, 0.95))
    found |= {Signal.TTFT: tried(0.4, 1.5, 40, 0.5), Signal.TPOT: tried(0.3, 1.2, 30, 0.7)}
    rows = dict(zip(Signal, signal_claims(found), strict=True))
    assert all(row.is_reproduced for row in rows.values())

    found[Signal.DECODE_TPS] = tried(0.3, 1.1, 20, 0.5)  # replicas follow the load badly
    found[Signal.DECODE_SM_ACTIVITY] = tried(0.9, 2.0, 5, 0.5)  # the signal falls with the load
    found[Signal.TPOT] = tried(0.3, 1.2, 50, 0.7)  # more restless than TTFT, which then is not the most restless
    rows = dict(zip(Signal, signal_claims(found), strict=True))
    failed = {name for name, row in rows.items() if not row.is_reproduced}
    assert failed == {Signal.DECODE_TPS, Signal.DECODE_SM_ACTIVITY, Signal.TPOT, Signal.TTFT}
