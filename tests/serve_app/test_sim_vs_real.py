"""Laws of the comparison with real engines."""

import pytest

from serve_app.sim_vs_real import comparison


def test_an_error_may_be_half_of_what_real_replays_differ_by() -> None:
    found = comparison([{"ttft_p50_s": seconds} for seconds in (0.8, 1.0, 1.2)], {"ttft_p50_s": 1.19})["ttft_p50_s"]
    assert found["real_median"] == 1.0
    assert found["error_frac"] == pytest.approx(0.19)
    assert found["allowed_frac"] == pytest.approx(0.2)
    assert found["is_within"]
    close = comparison([{"ttft_p50_s": seconds} for seconds in (0.99, 1.0, 1.01)], {"ttft_p50_s": 1.19})["ttft_p50_s"]
    assert close["allowed_frac"] == 0.15
    assert not close["is_within"]
