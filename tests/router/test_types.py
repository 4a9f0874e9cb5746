"""The values of a routing decision."""

import pytest

from router.types import DecodeLoad


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
