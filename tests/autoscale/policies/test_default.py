"""Laws of our own policy."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscale.engines.capacity import decode_batch, decode_tokens_per_s, prefill_engines
from autoscale.engines.profile import PrefillCurve
from autoscale.load_forecast import Accuracy, LoadForecast
from autoscale.policies.default import Default, DefaultConfig
from autoscale.ratio import PdRatio
from autoscale.slo import SloConfig
from autoscale.types import (
    ControllerState,
    Decision,
    Latency,
    PoolKey,
    PoolLimits,
    PoolStats,
    ReplicaStats,
    Snapshot,
    Traffic,
)
from kvtransfer.topology import LinkTier, Role
from tests.autoscale.load_forecasts import forecast_of

PROFILE = Path(__file__).parents[3] / "configs" / "profiles" / "h100_llama70b_fp8_tp2.json"
CONFIG = DefaultConfig.model_validate({"prefill": str(PROFILE), "decode": str(PROFILE), "prefill_start_s": 30.0})


def policy(**changes: Any) -> Default:
    return Default(CONFIG.model_copy(update=changes), ratio=PdRatio(1, 1), slo=SloConfig())


def arrivals(rate: float | None, inputs: float | None = 1200.0, outputs: float | None = 220.0, **more: Any) -> Traffic:
    return Traffic(requests_per_s=rate, input_tokens_mean=inputs, output_tokens_mean=outputs, **more)


def ticks(of: Default, rates: list[float], interval_s: float = 5.0, start_s: float = 1000.0) -> list[Decision]:
    """Decisions of a policy that sees one rate after another."""
    decisions: list[Decision] = []
    state = ControllerState()
    for index, rate in enumerate(rates):
        snapshot = Snapshot(now_s=start_s + interval_s * index, pools=(), traffic=arrivals(rate), state=state)
        decisions.append(of.decide(snapshot))
        state = replace(state, memory=decisions[-1].memory or {})
    return decisions


def full_prefill(rate: float) -> float:
    """Replicas that a number of requests/s fills up to ``prefill_busy_frac``."""
    return prefill_engines(CONFIG.prefill, rate, 1200.0) / CONFIG.prefill_busy_frac


def test_both_roles_by_hand() -> None:
    (decision,) = ticks(policy(), [50.0])
    assert decision.wanted is not None
    prefill = prefill_engines(CONFIG.prefill, 50.0, 1200.0)
    assert decision.wanted[Role.PREFILL] == pytest.approx(prefill + CONFIG.prefill_spare * math.sqrt(prefill))
    decode = 50.0 * 220.0 / decode_tokens_per_s(CONFIG.decode, 1310.0, 0.05)
    batch = decode_batch(CONFIG.decode, 1310.0, 0.05)
    assert decision.wanted[Role.DECODE] == pytest.approx(decode + CONFIG.decode_spare * math.sqrt(2 * decode / batch))
    assert decision.ratio == PdRatio.of(decision.wanted)


def test_uneven_lengths_cost_more() -> None:
    def prefill(weighted: float | None) -> float:
        traffic = arrivals(3.0, 12_000.0, 300.0, input_tokens_weighted_mean=weighted)
        wanted = policy().decide(Snapshot(now_s=0.0, pools=(), traffic=traffic)).wanted
        assert wanted is not None
        return wanted[Role.PREFILL]

    def prompt_s(tokens: float) -> float:
        return CONFIG.prefill.prefill.chunk_s(0.0, tokens)

    assert prefill(None) == prefill(12_000.0)
    busy = 3.0 * 12_000.0 * prompt_s(40_000.0) / 40_000.0
    assert prefill(40_000.0) == pytest.approx(busy + CONFIG.prefill_spare * math.sqrt(busy))
    assert prefill(40_000.0) > 1.2 * prefill(12_000.0)


def test_cached_prompt_tokens_cost_nothing() -> None:
    def prefill(cached_frac: float | None) -> float:
        traffic = arrivals(100.0, 12_000.0, 300.0, cached_frac=cached_frac)
        wanted = policy(prefill_spare=0.0).decide(Snapshot(now_s=0.0, pools=(), traffic=traffic)).wanted
        assert wanted is not None
        return wanted[Role.PREFILL]

    assert prefill(None) == prefill(0.0)
    computed_s = CONFIG.prefill.prefill.chunk_s(9_000.0, 12_000.0)
    assert prefill(0.75) == pytest.approx(100.0 * computed_s / CONFIG.prefill_busy_frac)
    assert 0.25 * prefill(0.0) < prefill(0.75) < 0.5 * prefill(0.0)  # the last quarter is the dearest


def test_decode_must_also_pull_the_prompts_of_short_answers() -> None:
    traffic = arrivals(139.0, 2000.0, 5.0)
    wanted = policy().decide(Snapshot(now_s=0.0, pools=(), traffic=traffic)).wanted
    assert wanted is not None
    cards = 139.0 * 2000.0 * 327_680 / 50e9
    assert cards == pytest.approx(1.82, abs=0.01)
    assert wanted[Role.DECODE] == pytest.approx(cards + CONFIG.prefill_spare * math.sqrt(cards))


def decoding(**load: float) -> PoolStats:
    """Ten decode replicas with this load each."""
    replicas = tuple(ReplicaStats(replica_id=f"d{n}", observed_s=0.0, **load) for n in range(10))
    return PoolStats(
        key=PoolKey("g0", Role.DECODE),
        replicas=replicas,
        target_replicas=10,
        limits=PoolLimits(lowest_replicas=1, highest_replicas=99),
    )


@pytest.mark.parametrize(
    ("load", "busy"),
    [
        ({"running_requests": 90.0, "waiting_requests": 20.0, "deferred_requests": 10.0}, 1200.0),
        ({"running_requests": 80.0, "kv_usage_frac": 0.72}, None),
    ],
)
def test_long_answers_are_counted_before_they_end(load: dict[str, float], busy: float | None) -> None:
    traffic = arrivals(10.0, 1200.0, 20.0)
    wanted = policy().decide(Snapshot(now_s=0.0, pools=(decoding(**load),), traffic=traffic)).wanted
    assert wanted is not None
    batch = decode_batch(CONFIG.decode, 1210.0, 0.05)
    filled = 8.0 if busy is None else busy / batch
    assert filled > 10 * 10.0 * 20.0 / decode_tokens_per_s(CONFIG.decode, 1210.0, 0.05)
    assert wanted[Role.DECODE] == pytest.approx(
        max(filled / CONFIG.decode_busy_frac, filled + CONFIG.decode_spare * math.sqrt(2 * filled / batch))
    )


def test_a_batch_of_long_contexts_is_smaller() -> None:
    slo = SloConfig(tpot_s=0.03)  # step time, and not KV, limits the batch
    load = decoding(running_requests=60.0, kv_usage_frac=0.6)
    traffic = arrivals(10.0, 1200.0, 20.0)
    decision = Default(CONFIG, ratio=PdRatio(1, 1), slo=slo).decide(Snapshot(now_s=0.0, pools=(load,), traffic=traffic))
    assert decision.wanted is not None
    filled = 600.0 / decode_batch(CONFIG.decode, 0.6 * CONFIG.decode.kv_tokens / 60.0, 0.03)
    assert filled > 1.2 * 600.0 / decode_batch(CONFIG.decode, 1210.0, 0.03)
    assert decision.wanted[Role.DECODE] > filled


def test_arriving_requests_count_with_the_contexts_of_those_in_progress_at_any_number_of_replicas() -> None:
    """Long answers come with long prompts, which the means over requests do not show."""
    context = 3000.0
    few = decoding(running_requests=10.0, kv_usage_frac=10.0 * context / CONFIG.decode.kv_tokens)
    wanted = policy().decide(Snapshot(now_s=0.0, pools=(few,), traffic=arrivals(100.0))).wanted
    assert wanted is not None
    decode = 100.0 * 220.0 / decode_tokens_per_s(CONFIG.decode, context, 0.05)
    assert decode > 1.5 * 100.0 * 220.0 / decode_tokens_per_s(CONFIG.decode, 1310.0, 0.05)
    assert wanted[Role.DECODE] > decode


def test_few_long_contexts_fill_decode_less_evenly_than_many_short_ones() -> None:
    traffic = arrivals(50.0, input_tokens_weighted_mean=20_000.0)
    wanted = policy().decide(Snapshot(now_s=0.0, pools=(), traffic=traffic)).wanted
    assert wanted is not None
    decode = 50.0 * 220.0 / decode_tokens_per_s(CONFIG.decode, 1310.0, 0.05)
    share = 20_110.0 / CONFIG.decode.kv_tokens
    assert wanted[Role.DECODE] == pytest.approx(decode + CONFIG.decode_spare * math.sqrt(2 * share * decode))


def test_a_rising_burst_is_not_extrapolated() -> None:
    wanted = ticks(policy(), [5.0] * 3 + [20.0, 35.0, 50.0, 65.0, 80.0])[-1].wanted
    assert wanted is not None
    assert wanted[Role.PREFILL] == pytest.approx(full_prefill(80.0))


def test_a_link_across_switches_carries_less() -> None:
    (near, far) = (
        policy().decide(
            Snapshot(
                now_s=0.0,
                pools=tuple(
                    PoolStats(
                        key=PoolKey("g0", role),
                        replicas=(),
                        target_replicas=1,
                        limits=PoolLimits(lowest_replicas=1, highest_replicas=9, link_tier=tier),
                    )
                    for role in Role
                ),
                traffic=arrivals(139.0, 2000.0, 5.0),
            )
        )
        for tier in (LinkTier.S1, LinkTier.S2)
    )
    cards = 139.0 * 2000.0 * 327_680 / 50e9
    for decision, busy in ((near, cards), (far, cards / 0.8)):
        assert decision.wanted is not None
        assert decision.wanted[Role.DECODE] == pytest.approx(busy + CONFIG.prefill_spare * math.sqrt(busy))


def test_uneven_prompts_come_unevenly_over_the_link_by_their_tokens() -> None:
    wanted = (
        policy()
        .decide(Snapshot(now_s=0.0, pools=(), traffic=arrivals(139.0, 2000.0, 5.0, input_tokens_weighted_mean=8000.0)))
        .wanted
    )
    cards = 139.0 * 2000.0 * 327_680 / 50e9
    assert wanted is not None
    assert wanted[Role.DECODE] == pytest.approx(cards + CONFIG.prefill_spare * math.sqrt(4.0 * cards))


def test_a_curve_that_begins_flat_gives_no_huge_counts() -> None:
    curve = PrefillCurve(tokens=(64, 256, 1024, 4096), seconds=(0.03, 0.03, 0.08, 0.3))
    flat = CONFIG.model_copy(update={"prefill": CONFIG.prefill.model_copy(update={"prefill": curve})})
    traffic = arrivals(10.0, 200.0, 20.0, input_tokens_weighted_mean=600.0)
    wanted = (
        Default(flat, ratio=PdRatio(1, 1), slo=SloConfig())
        .decide(Snapshot(now_s=0.0, pools=(), traffic=traffic))
        .wanted
    )
    assert wanted is not None
    assert all(count < 2.0 for count in wanted.values())


def test_memory_of_another_version_is_not_used() -> None:
    (decision,) = ticks(policy(), [50.0])
    older = {name: each for name, each in (decision.memory or {}).items() if name != "handoff"}
    state = ControllerState(memory=older)
    for now_s in (1005.0, 1010.0):
        again = policy().decide(Snapshot(now_s=now_s, pools=(), traffic=arrivals(50.0), state=state))
        assert again.wanted == decision.wanted
        state = replace(state, memory=again.memory or {})


@pytest.mark.parametrize(
    ("rise_s", "fall_s", "peak_frac", "is_burst"),
    # Three starts are 90 s. A rise or fall in 75 s is a burst if it is most of the peak; one in 200 s is not.
    [
        (75.0, 200.0, 0.75, True),
        (200.0, 75.0, 0.75, True),
        (75.0, 75.0, 0.6, False),
        (200.0, 200.0, 0.75, False),
    ],
)
def test_a_burst_is_most_of_the_peak_within_three_starts(
    rise_s: float, fall_s: float, peak_frac: float, is_burst: bool
) -> None:
    base = 100.0 * (1.0 - peak_frac)

    def ramp(seconds: float) -> list[float]:
        steps = round(seconds / 5.0)
        return [base + (100.0 - base) * n / steps for n in range(1, steps + 1)]

    rates = [base] * 30 + ramp(rise_s) + [100.0] * 6 + ramp(fall_s)[::-1] + [base] * 30
    wanted = ticks(policy(memory_s=20.0, stay_starts=2.0), rates)[-1].wanted
    level = ticks(policy(), [base] * 30)[-1].wanted
    assert wanted is not None and level is not None
    for role in Role:
        # Of a ramp's peak only the part that was not forecast stays.
        assert (wanted[role] > 2.0 * level[role]) is is_burst


def test_replicas_of_a_burst_stay_and_those_of_a_ramp_do_not() -> None:
    """The same peak, come and gone at once or over five minutes; only the burst's replicas are still there."""
    ramp = [5.0 + 1.25 * n for n in range(60)]
    burst = ticks(policy(stay_starts=2.0), [5.0] * 60 + [80.0] * 12 + [5.0] * 40)[-1].wanted
    slow = ticks(policy(stay_starts=2.0), [*ramp, *[80.0] * 12, *ramp[::-1], *[5.0] * 20])[-1].wanted
    assert burst is not None and slow is not None
    assert burst[Role.PREFILL] > 2.5 * slow[Role.PREFILL]


@pytest.mark.parametrize(("work_frac", "rate"), [(0.85, 80.0), (1.0, 300.0)])
def test_replicas_stay_for_a_share_of_the_work_of_past_bursts(work_frac: float, rate: float) -> None:
    """One tick of 300 requests/s is 7 % of all work, and 12 % of the remembered work."""
    rates = ([5.0] * 3 + [80.0] * 9) * 5 + [300.0] + [5.0] * 20
    wanted = ticks(policy(burst_work_frac=work_frac), rates)[-1].wanted
    assert wanted is not None
    assert wanted[Role.PREFILL] == pytest.approx(full_prefill(rate))


def test_a_large_burst_fades_if_smaller_ones_follow() -> None:
    first = [200.0] * 6 + [5.0] * 40
    alone, followed = (ticks(policy(), rates)[-1].wanted for rates in (first, first + ([80.0] * 9 + [5.0] * 9) * 4))
    assert alone is not None and followed is not None
    for wanted, rate in ((alone, 200.0), (followed, 80.0)):
        assert wanted[Role.PREFILL] == pytest.approx(full_prefill(rate))


def test_no_replica_leaves_before_the_load_was_observed_for_a_while() -> None:
    limits = PoolLimits(lowest_replicas=1, highest_replicas=20)
    keys = [PoolKey("g0", role) for role in Role]
    pools = tuple(PoolStats(key=key, replicas=(), target_replicas=20, limits=limits) for key in keys)
    state = ControllerState(desired=dict.fromkeys(keys, 20))
    wanted = []
    for now_s in (0.0, 100.0, 200.0):
        decision = policy().decide(Snapshot(now_s=now_s, pools=pools, traffic=arrivals(10.0), state=state))
        assert decision.wanted is not None
        wanted.append(max(decision.wanted.values()))
        state = replace(state, memory=decision.memory or {})
    assert wanted[:2] == [20.0, 20.0] and wanted[2] < 10.0


def test_many_replicas_need_a_smaller_share_to_spare() -> None:
    few, many = (ticks(policy(), [rate])[0].wanted for rate in (10.0, 1000.0))
    assert few is not None and many is not None
    for role in Role:
        assert many[role] < 100.0 * few[role]
    assert many[Role.PREFILL] == pytest.approx(full_prefill(1000.0))  # but never above prefill_busy_frac


def test_a_rise_is_forecast_and_a_fall_is_not() -> None:
    rising = ticks(policy(stay_starts=0.0), [20.0 + 2.0 * n for n in range(12)])
    level = ticks(policy(stay_starts=0.0), [42.0])[0]
    falling = ticks(policy(stay_starts=0.0), [64.0 - 2.0 * n for n in range(12)])
    assert rising[-1].wanted and level.wanted and falling[-1].wanted
    assert rising[-1].wanted[Role.PREFILL] > level.wanted[Role.PREFILL]
    # The load of decode comes later anyway.
    assert rising[-1].wanted[Role.DECODE] == pytest.approx(level.wanted[Role.DECODE], rel=0.01)
    for role in Role:
        assert falling[-1].wanted[role] >= level.wanted[role] * 0.99


def test_the_part_of_a_load_that_was_not_forecast_stays_as_spare() -> None:
    """A jump by a third was not forecast 40 s before. 40 s are a start and the age of an observation."""

    def wanted(rates: list[float], prefill_spare: float = 0.0) -> float:
        # With a memory this short the last observation alone counts.
        decision = ticks(policy(memory_s=0.1, stay_starts=0.0, prefill_spare=prefill_spare), rates)[-1]
        assert decision.wanted is not None
        return decision.wanted[Role.PREFILL]

    low, high = (prefill_engines(CONFIG.prefill, rate, 1200.0) for rate in (120.0, 160.0))
    full_frac = CONFIG.prefill_busy_frac
    assert wanted([120.0] * 40) == pytest.approx(low / full_frac)
    assert wanted([120.0] * 40 + [160.0] * 20) == pytest.approx(high + high - low)
    assert wanted([120.0] * 40 + [160.0] * 20 + [120.0] * 20) == pytest.approx(low + high - low)
    # It is added to the spare for chance by squares, because both at once are rare.
    both = wanted([120.0] * 40 + [160.0] * 20, prefill_spare=2.0)
    assert both == pytest.approx(high + math.hypot(2.0 * math.sqrt(high), high - low))
    # Not if the policy has just begun, and not for longer than its memory.
    assert wanted([120.0] * 10 + [160.0] * 20) == pytest.approx(high / full_frac)
    assert wanted([120.0] * 40 + [160.0] * 140) == pytest.approx(high / full_frac)


def test_wanted_replicas_stay_for_a_while() -> None:
    decisions = ticks(policy(stay_starts=2.0, memory_s=5.0), [80.0] * 6 + [40.0] * 30)
    wanted = [decision.wanted[Role.PREFILL] for decision in decisions if decision.wanted]
    assert wanted[6] == wanted[5]
    assert min(wanted[6:16]) > 1.5 * wanted[-1]


def test_replicas_stay_longer_in_a_role_that_starts_slowly() -> None:
    of = policy(stay_starts=4.0, prefill_start_s=10.0, decode_start_s=30.0, memory_s=1.0)
    wanted = [decision.wanted for decision in ticks(of, [80.0] * 30 + [40.0] * 30) if decision.wanted]
    for role, stays_s in ((Role.PREFILL, 40.0), (Role.DECODE, 120.0)):
        counts = [each[role] for each in wanted]
        stayed = sum(count > 0.9 * counts[29] for count in counts[30:])
        assert 5.0 * stayed == pytest.approx(stays_s, abs=10.0)


def test_replicas_leave_even_if_a_start_is_longer_than_the_history() -> None:
    of = policy(prefill_start_s=900.0, history_s=200.0)
    memory = ticks(of, [20.0] * 60)[-1].memory or {}
    state = ControllerState(memory=memory, desired={PoolKey("g0", role): 50 for role in Role})
    snapshot = Snapshot(now_s=1300.0, pools=(), traffic=arrivals(20.0), state=state)
    wanted = of.decide(snapshot).wanted
    assert wanted is not None and wanted[Role.PREFILL] < 10.0


def test_without_traffic_the_policy_wants_no_replica() -> None:
    snapshot = Snapshot(now_s=0.0, pools=(), traffic=arrivals(0.0, None, None))
    assert policy().decide(snapshot).wanted == {Role.PREFILL: 0.0, Role.DECODE: 0.0}


@pytest.mark.parametrize(
    "traffic", [arrivals(None), arrivals(5.0, is_whole=False), arrivals(5.0, outputs=None), arrivals(5.0, inputs=None)]
)
def test_traffic_that_was_not_observed_changes_nothing_and_is_not_remembered(traffic: Traffic) -> None:
    decision = policy().decide(Snapshot(now_s=0.0, pools=(), traffic=traffic))
    assert decision.wanted is None
    assert decision.memory is None


def test_a_clock_that_was_set_back_forgets_what_lies_ahead() -> None:
    (decision,) = ticks(policy(), [50.0], start_s=5000.0)
    state = ControllerState(memory=decision.memory or {})
    again = policy().decide(Snapshot(now_s=1000.0, pools=(), traffic=arrivals(10.0), state=state))
    assert again.wanted == ticks(policy(), [10.0])[0].wanted


@given(st.lists(st.floats(0.0, 2000.0), min_size=1, max_size=80), st.sampled_from([0.5, 5.0, 60.0]))
def test_decisions_are_finite_and_deterministic_and_memory_ends_with_the_history(
    rates: list[float], every_s: float
) -> None:
    decisions = ticks(policy(), rates, every_s)
    assert decisions == ticks(policy(), rates, every_s)
    for decision in decisions:
        assert decision.wanted is not None and decision.memory is not None
        assert all(math.isfinite(count) and count >= 0.0 for count in decision.wanted.values())
        assert {len(each) for each in decision.memory.values()} <= {len(decision.memory["at_s"])}
        assert len(decision.memory["at_s"]) <= CONFIG.history_s / every_s + 2


@given(st.floats(0.0, 500.0), st.floats(0.0, 500.0))
def test_more_arrivals_never_want_fewer_replicas(rate: float, more: float) -> None:
    less, much = (ticks(policy(), [each])[0].wanted for each in (rate, rate + more))
    assert less is not None and much is not None
    assert all(much[role] >= less[role] - 1e-9 for role in Role)


@pytest.mark.parametrize(
    ("latency", "kv_usage_frac", "grown"),
    [
        (Latency(ttft_s=3.0), 0.1, Role.PREFILL),
        (Latency(ttft_s=3.0), 0.97, Role.DECODE),
        (Latency(ttft_s=0.2, tpot_s=0.09), 0.1, Role.DECODE),
    ],
)
def test_the_role_that_keeps_users_waiting_gets_more_replicas(
    latency: Latency, kv_usage_frac: float, grown: Role
) -> None:
    def wanted(observed: Latency, running: int = 20) -> dict[Role, float]:
        keys = {role: PoolKey("g0", role) for role in Role}
        pools = tuple(
            PoolStats(
                key=keys[role],
                replicas=tuple(
                    ReplicaStats(replica_id=f"{role}{n}", observed_s=0.0, kv_usage_frac=kv_usage_frac)
                    for n in range(running)
                ),
                target_replicas=20,
                limits=PoolLimits(lowest_replicas=1, highest_replicas=99),
            )
            for role in Role
        )
        state = ControllerState(desired=dict.fromkeys(keys.values(), 20))
        snapshot = Snapshot(now_s=0.0, pools=pools, traffic=arrivals(50.0), latency=observed, state=state)
        return dict(policy(stay_starts=0.0).decide(snapshot).wanted or {})

    calm, late = wanted(Latency(ttft_s=0.2, tpot_s=0.02)), wanted(latency)
    assert late[grown] == max(22.0, calm[grown])  # if its KV is full, the model alone may want more than 22
    (other,) = set(Role) - {grown}
    assert late[other] == calm[other] < 20.0
    # While a replica starts, its effect on latency is not known yet.
    assert wanted(latency, running=19) == wanted(Latency(ttft_s=0.2, tpot_s=0.02), running=19)


@pytest.mark.parametrize("lengths", [((500.0, 1.0),), ((250.0, 0.5), (750.0, 0.5))])
def test_prefill_is_sized_by_the_offered_lengths_where_admission_lets_only_shorter_prompts_pass(
    lengths: tuple[tuple[float, float], ...],
) -> None:
    """The mean of the offered prompts is 4,000 tokens, and of the admitted ones 500."""

    def prefill(admitted: tuple[tuple[float, float], ...]) -> float:
        traffic = arrivals(20.0, 4000.0, 200.0, served_per_s=5.0, input_lengths=admitted)
        wanted = policy().decide(Snapshot(now_s=0.0, pools=(), traffic=traffic)).wanted
        assert wanted is not None
        return wanted[Role.PREFILL]

    assert prefill(lengths) == pytest.approx(prefill(tuple((8.0 * tokens, share) for tokens, share in lengths)))
    assert prefill(lengths) >= prefill(()) - 1e-9  # without lengths: as if each prompt had the mean length


def proven(rate: float, *, error_ratio: float = 0.8, forecasts: int = 10) -> LoadForecast:
    """A forecast of requests by a model whose errors are known."""
    of = forecast_of(rate, 1200.0, 220.0)
    accuracy = Accuracy(
        forecasts=forecasts,
        mape_frac=0.1,
        last_mape_frac=0.1,
        error_ratio=error_ratio,
        near_frac=1.0,
        last_near_frac=1.0,
        coverage_frac=0.8,
    )
    return replace(of, requests_per_s=replace(of.requests_per_s, accuracy=accuracy))


def test_prefill_starts_for_a_proven_forecast_if_that_is_wanted_and_none_leaves_for_it() -> None:
    def wanted(forecast: LoadForecast | None, starts_by_forecast: bool = True) -> tuple[float, float]:
        snapshot = Snapshot(now_s=0.0, pools=(), traffic=arrivals(50.0), forecast=forecast)
        decision = policy(starts_by_forecast=starts_by_forecast).decide(snapshot)
        assert decision.wanted is not None
        assert ("are forecast" in decision.reason) == (decision.wanted[Role.PREFILL] > 9.0)
        return decision.wanted[Role.PREFILL], decision.wanted[Role.DECODE]

    without = wanted(None)
    rising = prefill_engines(CONFIG.prefill, 100.0, 1200.0)
    assert wanted(proven(100.0)) == (pytest.approx(rising + CONFIG.prefill_spare * math.sqrt(rising)), without[1])
    assert wanted(proven(10.0)) == without  # a forecast removes nothing
    assert wanted(proven(100.0), starts_by_forecast=False) == without
    assert wanted(proven(100.0, error_ratio=1.0)) == without  # no better than the last value
    assert wanted(proven(100.0, forecasts=9)) == without  # too few to tell
    stepped_back = replace(proven(100.0), requests_per_s=replace(proven(100.0).requests_per_s, fallback="worse"))
    assert wanted(stepped_back) == without
