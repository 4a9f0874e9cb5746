"""The length-aware rule."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.config import LengthConfig
from router.length import DecodeLoad, PathDecision, PathReason, PrefillPath, prefill_path

TOKENS = st.integers(0, 100_000)
FRACS = st.floats(0.0, 1.0)


@st.composite
def configs(draw: st.DrawFn) -> LengthConfig:
    local_max, cap = sorted(draw(st.tuples(st.integers(0, 4096), st.integers(0, 8192))))
    busy, room = sorted(draw(st.tuples(st.floats(0.01, 1.0), st.floats(0.01, 1.0))))
    return LengthConfig(
        local_max_tokens=local_max,
        local_cap_tokens=cap,
        local_tokens_per_output_token=draw(st.floats(0.0, 32.0)),
        backlog_share_frac=draw(FRACS),
        decode_room_frac=room,
        decode_busy_frac=busy,
    )


@st.composite
def loads(draw: st.DrawFn) -> DecodeLoad:
    return DecodeLoad(
        running_requests=draw(st.none() | st.integers(0, 80)),
        max_running_requests=draw(st.none() | st.integers(1, 64)),
        kv_usage_frac=draw(st.none() | FRACS),
        local_prefill_tokens=draw(TOKENS),
        output_tokens_mean=draw(st.none() | st.floats(1.0, 4096.0)),
    )


@st.composite
def growing_loads(draw: st.DrawFn) -> tuple[DecodeLoad, DecodeLoad]:
    """A load and one that is at least as heavy in every part; parts not observed stay so."""
    lighter = draw(loads())
    heavier = replace(lighter, local_prefill_tokens=lighter.local_prefill_tokens + draw(TOKENS))
    if lighter.running_requests is not None:
        heavier = replace(heavier, running_requests=lighter.running_requests + draw(st.integers(0, 40)))
    if lighter.kv_usage_frac is not None:
        heavier = replace(heavier, kv_usage_frac=draw(st.floats(lighter.kv_usage_frac, 1.0)))
    if lighter.output_tokens_mean is not None:
        heavier = replace(heavier, output_tokens_mean=draw(st.floats(1.0, lighter.output_tokens_mean)))
    return lighter, heavier


def decide(
    config: LengthConfig, load: DecodeLoad, *, tokens: int = 1, cached: int = 0, backlog: int | None = 0
) -> PathDecision:
    return prefill_path(
        input_tokens=tokens, cached_tokens=cached, prefill_backlog_tokens=backlog, decode=load, config=config
    )


@pytest.mark.parametrize(
    ("tokens", "cached", "backlog", "load", "bound", "path", "reason"),
    [
        # An idle pair: the bound is local_max_tokens, inclusive.
        (128, 0, 0, {}, 128.0, PrefillPath.LOCAL, PathReason.SHORT),
        (129, 0, 0, {}, 128.0, PrefillPath.REMOTE, PathReason.LONG),
        # Only 1000 - 900 = 100 tokens are left to compute.
        (1000, 900, 0, {}, 128.0, PrefillPath.LOCAL, PathReason.CACHED),
        (1000, 871, 0, {}, 128.0, PrefillPath.REMOTE, PathReason.LONG),
        # Also while the backlog raises the bound: 300 tokens are not short, and 100 would be local without a backlog.
        (300, 200, 400, {}, 328.0, PrefillPath.LOCAL, PathReason.CACHED),
        # 128 + 0.5 * 400 = 328.
        (328, 0, 400, {}, 328.0, PrefillPath.LOCAL, PathReason.PREFILL_BACKLOG),
        (329, 0, 400, {}, 328.0, PrefillPath.REMOTE, PathReason.LONG),
        # 128 + 0.5 * (400 - 100) = 278: what decode itself has to prefill counts against it.
        (278, 0, 400, {"local_prefill_tokens": 100}, 278.0, PrefillPath.LOCAL, PathReason.PREFILL_BACKLOG),
        (1, 0, 400, {"local_prefill_tokens": 500}, 128.0, PrefillPath.LOCAL, PathReason.SHORT),
        # 128 + 0.5 * 10000, cut at the cap.
        (512, 0, 10_000, {}, 512.0, PrefillPath.LOCAL, PathReason.PREFILL_BACKLOG),
        (513, 0, 10_000, {}, 512.0, PrefillPath.REMOTE, PathReason.LONG),
        # With answers of 32 tokens, backlog raises the bound to at most 8 * 32; with answers of 4 it raises nothing.
        (256, 0, 10_000, {"output_tokens_mean": 32.0}, 256.0, PrefillPath.LOCAL, PathReason.PREFILL_BACKLOG),
        (257, 0, 10_000, {"output_tokens_mean": 32.0}, 256.0, PrefillPath.REMOTE, PathReason.LONG),
        (129, 0, 10_000, {"output_tokens_mean": 4.0}, 128.0, PrefillPath.REMOTE, PathReason.LONG),
        (129, 0, 10_000, {"output_tokens_mean": None}, 128.0, PrefillPath.REMOTE, PathReason.LONG),
        # Backlog not observed.
        (129, 0, None, {}, 128.0, PrefillPath.REMOTE, PathReason.LONG),
        # Free 0.375: neither room (0.5) nor busy (0.25), so no backlog moves the bound.
        (129, 0, 10_000, {"kv_usage_frac": 0.625}, 128.0, PrefillPath.REMOTE, PathReason.LONG),
        # Exactly at decode_room_frac the bound rises, exactly at decode_busy_frac it does not fall yet.
        (328, 0, 400, {"kv_usage_frac": 0.5}, 328.0, PrefillPath.LOCAL, PathReason.PREFILL_BACKLOG),
        (128, 0, 400, {"kv_usage_frac": 0.75}, 128.0, PrefillPath.LOCAL, PathReason.SHORT),
        # Free 0.125 of the slots, half of decode_busy_frac: half the bound.
        (64, 0, 10_000, {"running_requests": 28}, 64.0, PrefillPath.LOCAL, PathReason.SHORT),
        (65, 0, 10_000, {"running_requests": 28}, 64.0, PrefillPath.REMOTE, PathReason.DECODE_BUSY),
        (129, 0, 10_000, {"running_requests": 28}, 64.0, PrefillPath.REMOTE, PathReason.LONG),
        # Free 0.1875: 128 * 0.1875 / 0.25.
        (96, 0, 0, {"kv_usage_frac": 0.8125}, 96.0, PrefillPath.LOCAL, PathReason.SHORT),
        # Nothing free, and even more running than there are slots: all to prefill.
        (1, 0, 0, {"kv_usage_frac": 1.0}, 0.0, PrefillPath.REMOTE, PathReason.DECODE_BUSY),
        (1, 0, 0, {"running_requests": 40}, 0.0, PrefillPath.REMOTE, PathReason.DECODE_BUSY),
    ],
)
def test_hand_computed_decision(
    tokens: int,
    cached: int,
    backlog: int | None,
    load: dict[str, float],
    bound: float,
    path: PrefillPath,
    reason: PathReason,
    make_length_config: Callable[..., LengthConfig],
    make_decode_load: Callable[..., DecodeLoad],
) -> None:
    decision = decide(make_length_config(), make_decode_load(**load), tokens=tokens, cached=cached, backlog=backlog)
    assert decision == PathDecision(path=path, reason=reason, effective_tokens=tokens - cached, bound_tokens=bound)


def test_unobserved_decode_keeps_the_plain_bound(make_length_config: Callable[..., LengthConfig]) -> None:
    assert decide(make_length_config(), DecodeLoad(), backlog=10_000).bound_tokens == 128.0


def test_zero_bounds_send_every_prompt_to_prefill(
    make_length_config: Callable[..., LengthConfig], make_decode_load: Callable[..., DecodeLoad]
) -> None:
    config = make_length_config(local_max_tokens=0, local_cap_tokens=0)
    assert decide(config, make_decode_load(), tokens=1, backlog=10_000).path is PrefillPath.REMOTE


def test_more_cached_tokens_than_input_tokens_leave_nothing_to_compute(
    make_length_config: Callable[..., LengthConfig], make_decode_load: Callable[..., DecodeLoad]
) -> None:
    assert decide(make_length_config(), make_decode_load(), tokens=10, cached=20).effective_tokens == 0


@given(configs(), loads(), TOKENS, TOKENS, st.none() | TOKENS)
def test_path_is_local_exactly_when_effective_length_is_within_bound(
    config: LengthConfig, load: DecodeLoad, tokens: int, cached: int, backlog: int | None
) -> None:
    decision = decide(config, load, tokens=tokens, cached=cached, backlog=backlog)
    assert (decision.path is PrefillPath.LOCAL) == (max(0, tokens - cached) <= decision.bound_tokens)


@given(configs(), loads(), TOKENS, st.none() | TOKENS)
def test_bound_stays_between_zero_and_the_cap(
    config: LengthConfig, load: DecodeLoad, tokens: int, backlog: int | None
) -> None:
    assert 0.0 <= decide(config, load, tokens=tokens, backlog=backlog).bound_tokens <= config.local_cap_tokens


@given(configs(), loads(), TOKENS, TOKENS)
def test_bound_never_falls_as_prefill_backlog_grows(
    config: LengthConfig, load: DecodeLoad, backlog: int, more: int
) -> None:
    lower = decide(config, load, backlog=backlog).bound_tokens
    assert decide(config, load, backlog=backlog + more).bound_tokens >= lower
    assert decide(config, load, backlog=None).bound_tokens <= lower


@given(configs(), growing_loads(), st.none() | TOKENS)
def test_bound_never_rises_as_decode_load_grows(
    config: LengthConfig, pair: tuple[DecodeLoad, DecodeLoad], backlog: int | None
) -> None:
    lighter, heavier = pair
    bound = decide(config, lighter, backlog=backlog).bound_tokens
    assert decide(config, heavier, backlog=backlog).bound_tokens <= bound


@given(configs(), loads(), TOKENS, TOKENS, st.none() | TOKENS)
def test_same_input_gives_the_same_decision(
    config: LengthConfig, load: DecodeLoad, tokens: int, cached: int, backlog: int | None
) -> None:
    first = decide(config, load, tokens=tokens, cached=cached, backlog=backlog)
    assert decide(config, load, tokens=tokens, cached=cached, backlog=backlog) == first


@given(configs(), loads(), TOKENS, TOKENS, st.none() | TOKENS)
def test_reason_agrees_with_the_path(
    config: LengthConfig, load: DecodeLoad, tokens: int, cached: int, backlog: int | None
) -> None:
    decision = decide(config, load, tokens=tokens, cached=cached, backlog=backlog)
    expected = {
        PrefillPath.LOCAL: {PathReason.SHORT, PathReason.CACHED, PathReason.PREFILL_BACKLOG},
        PrefillPath.REMOTE: {PathReason.LONG, PathReason.DECODE_BUSY},
    }
    assert decision.reason in expected[decision.path]
    if decision.reason is PathReason.SHORT:
        assert tokens <= config.local_max_tokens
    if decision.reason is PathReason.CACHED:
        assert cached > 0
    if decision.reason is PathReason.PREFILL_BACKLOG:
        assert config.local_max_tokens < decision.effective_tokens
    if decision.reason is PathReason.DECODE_BUSY:
        assert decision.bound_tokens < config.local_max_tokens


@pytest.mark.parametrize(
    ("load", "headroom"),
    [
        (DecodeLoad(), None),
        (DecodeLoad(running_requests=8), None),  # a count without its limit says nothing
        (DecodeLoad(kv_usage_frac=0.25), 0.75),
        (DecodeLoad(running_requests=8, max_running_requests=32), 0.75),
        (DecodeLoad(running_requests=8, max_running_requests=32, kv_usage_frac=0.5), 0.5),
        (DecodeLoad(running_requests=24, max_running_requests=32, kv_usage_frac=0.5), 0.25),
        (DecodeLoad(running_requests=40, max_running_requests=32, kv_usage_frac=0.0), 0.0),
    ],
)
def test_headroom_is_the_free_share_of_the_scarcer_resource(load: DecodeLoad, headroom: float | None) -> None:
    assert load.headroom_frac() == headroom


def test_zero_is_a_measurement() -> None:
    assert DecodeLoad(running_requests=0, max_running_requests=32).headroom_frac() == 1.0
    assert DecodeLoad(kv_usage_frac=0.0).headroom_frac() == 1.0
