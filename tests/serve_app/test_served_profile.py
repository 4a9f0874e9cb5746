"""Laws of profiles that are read off a running application, and of what load adds to them."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from autoscale.profile import EngineProfile
from autoscale.report import RequestRecord
from router.config import RouterConfig
from serve_app.served_profile import (
    BATCHES,
    LOCAL_TOKENS,
    REMOTE_TOKENS,
    Calibration,
    Fit,
    Records,
    at_the_edge,
    fitted,
    served_profile,
)
from serve_app.sim_vs_real import comparison, figures, trace_slice

BASE = EngineProfile.load(Path(__file__).parents[2] / "configs" / "profiles" / "cpu_tiny.json")
STEP_S, HANDOFF_S = 0.004, 0.012


def records(ttft_s: float, tpot_s: float, *, error: str | None = None) -> Records:
    """Two requests that fared alike."""
    record = RequestRecord(
        sent_s=0.0,
        first_token_s=ttft_s,
        last_token_s=ttft_s + tpot_s * 10,
        input_tokens=1,
        output_tokens=11,
        error=error,
    )
    return [record] * 2


def prefill_s(tokens: int) -> float:
    return 0.01 + 1e-4 * tokens


def calibration() -> Calibration:
    """Prefill is a line, a step takes 1 ms more for each request and 1 us for each token of context."""
    rise_s = 1e-6 * (1024 - 32)
    over_link_s = BASE.handoff.kv_bytes_per_token / BASE.handoff.bytes_per_s
    alone: Mapping[int, Records] = {
        **{tokens: records(prefill_s(tokens), STEP_S) for tokens in LOCAL_TOKENS},
        **{
            tokens: records(prefill_s(tokens) + HANDOFF_S + tokens * over_link_s + STEP_S, STEP_S)
            for tokens in REMOTE_TOKENS
        },
    }
    steps = {batch: STEP_S + 1e-3 * (batch - 1) for batch in BATCHES}
    return Calibration(
        alone=alone,
        short={batch: records(0.1, step_s) for batch, step_s in steps.items()},
        long={batch: records(0.1, steps[batch] + batch * rise_s) for batch in (1, 2, 4)},
    )


def test_times_are_read_off_the_endpoint() -> None:
    profile = served_profile(BASE, calibration())
    # The first remote prompt's own time over the link, 0.4 ms, is taken for the handoff's base.
    assert profile.handoff.base_s == pytest.approx(HANDOFF_S, abs=5e-4)
    for tokens in (64, 512, 2000):
        assert profile.prefill.seconds_for(tokens) == pytest.approx(prefill_s(tokens), abs=5e-4)
    for batch, context in ((1, 96), (4, 1088), (16, 592)):
        expected_s = STEP_S + 1e-3 * (batch - 1) + 1e-6 * batch * (context - 96)
        assert profile.decode.seconds_for(batch, context) == pytest.approx(expected_s, rel=1e-4)
    assert profile.kv_tokens == BASE.kv_tokens


def test_a_failed_request_is_refused() -> None:
    whole = calibration()
    failed = records(0.1, 0.1, error="HTTP 500")
    for change in ("alone", "short", "long"):
        some = {**getattr(whole, change), 2: failed}
        with pytest.raises(ValueError, match="2 requests of the calibration failed, the first with 'HTTP 500'"):
            served_profile(BASE, replace(whole, **{change: some}))


def test_what_load_adds_is_found_again_and_foretells_other_requests() -> None:
    truth = Fit(contention_frac=1.0, wake_s=0.008, single_frac=1.1, batch_frac=0.9, handoff_s=0.004)
    router = RouterConfig()
    seen, other = trace_slice(0.0, 60.0), trace_slice(300.0, 30.0)
    fit = fitted(BASE, [(seen, [truth.simulated(BASE, seen, router)])], router)
    assert fit.contention_frac == pytest.approx(truth.contention_frac, abs=0.25)
    found, expected = figures(fit.simulated(BASE, other, router)), figures(truth.simulated(BASE, other, router))
    assert found == pytest.approx(expected, rel=0.05)


def test_every_load_and_every_replay_of_it_counts() -> None:
    """Of three replays the median is fitted to; of two loads, both."""
    router = RouterConfig()
    trace = trace_slice(0.0, 30.0)
    slow, quick = (Fit(wake_s=wake_s).simulated(BASE, trace, router) for wake_s in (0.02, 0.004))
    assert fitted(BASE, [(trace, [slow, quick, quick])], router).wake_s == pytest.approx(0.004, abs=0.002)
    both = fitted(BASE, [(trace, [quick]), (trace, [slow])], router)
    only = [fitted(BASE, [(trace, [each])], router) for each in (quick, slow)]
    assert both not in only
    assert at_the_edge(Fit(wake_s=0.03)) == ["wake_s"]
    assert at_the_edge(Fit(contention_frac=0.0, wake_s=0.0)) == []


def test_engines_on_the_same_cores_slow_each_other_only_while_both_compute() -> None:
    apart, beside = Fit(contention_frac=0.0, wake_s=0.0), Fit(contention_frac=1.0, wake_s=0.0)
    alone = trace_slice(0.0, 1.0)[:1]
    one, two = (figures(fit.simulated(BASE, alone, RouterConfig())) for fit in (apart, beside))
    assert two == pytest.approx(one)
    many = trace_slice(300.0, 20.0)
    one, two = (figures(fit.simulated(BASE, many, RouterConfig())) for fit in (apart, beside))
    assert all(two[name] > one[name] for name in one)


def test_an_error_may_be_half_of_what_real_replays_differ_by() -> None:
    found = comparison([{"ttft_p50_s": seconds} for seconds in (0.8, 1.0, 1.2)], {"ttft_p50_s": 1.19})["ttft_p50_s"]
    assert found["real_median"] == 1.0
    assert found["error_frac"] == pytest.approx(0.19)
    assert found["allowed_frac"] == pytest.approx(0.2)
    assert found["is_within"]
    close = comparison([{"ttft_p50_s": seconds} for seconds in (0.99, 1.0, 1.01)], {"ttft_p50_s": 1.19})["ttft_p50_s"]
    assert close["allowed_frac"] == 0.15
    assert not close["is_within"]
