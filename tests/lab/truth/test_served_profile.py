"""Laws of profiles that are read off a running application."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from autoscale.engines.profile import EngineProfile
from autoscale.report import RequestRecord
from tests.lab.truth.served_profile import (
    BATCHES,
    LOCAL_TOKENS,
    REMOTE_TOKENS,
    Calibration,
    Records,
    served_profile,
)

BASE = EngineProfile.load(Path(__file__).parents[3] / "configs" / "profiles" / "cpu_tiny.json")
STEP_S, HANDOFF_S = 0.004, 0.012


def records(ttft_s: float, tpot_s: float, *, error: str | None = None) -> Records:
    """Two requests with the same times."""
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
