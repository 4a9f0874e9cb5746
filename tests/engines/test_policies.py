"""Every policy under real Ray Serve through a rise and a fall of load, with Serve's controller killed in the middle."""

import asyncio
from collections.abc import Iterator

import pytest

from tests.lab.stand.forked_worker import forked
from tests.lab.stand.rise_and_fall import POLICIES, Stand, document

pytestmark = [pytest.mark.ray, pytest.mark.vllm]

# The load stays high until enough replicas serve, at most this time, seconds. Serve's controller is killed when the
# first new replicas may serve: replicas that start while it dies are started again by the next one.
_MOST_RISE_S, _FALL_S, _KILL_S = 120.0, 7.5, 15.0
# The policies that `make test` runs; `make test-slow` runs the others.
_OFTEN = {"heteroscale decode_tps"}


@pytest.fixture(scope="module")
def stand() -> Iterator[Stand]:
    """One application for all policies."""
    from serve_app.sdk import deploy

    with deploy(forked(document())) as app:
        yield Stand(app)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in _OFTEN else pytest.mark.slow) for name in POLICIES]
)
def test_a_policy_serves_the_rise_loses_nothing_and_gives_back_after_the_fall(stand: Stand, name: str) -> None:
    stand.rest()
    passage = asyncio.run(
        stand.passage(
            POLICIES[name],
            most_rise_s=20.0 if name == "periodic" else _MOST_RISE_S,
            fall_s=_FALL_S,
            kill_after_s=_KILL_S,
            ends_early=True,
        )
    )
    assert passage.lost == []
    if name == "periodic":
        # The slow group serves too then, and each group that serves has a decode replica of its own: 1.0 becomes more.
        stand.wait_until(lambda: (now := stand.serving()) is not None and now[0] == 3.0 and now[1] >= 1.0)
        stand.wait_until(lambda: stand.serving() == (2.0, 1.0))
        return
    enough_s = passage.enough_s(passage.fell_s, since_s=_KILL_S)
    assert enough_s is not None, (passage.counts, passage.reasons)
    peak = passage.peak
    stand.wait_until(lambda: (now := stand.serving()) is not None and now[0] < peak[0])
