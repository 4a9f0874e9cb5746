"""Every policy under real Ray Serve through a rise and a fall of load, with Serve's controller killed in the middle."""

import asyncio
from collections.abc import Iterator

import pytest

from tests.lab.stand.rise_and_fall import POLICIES, Stand, document, refused_after

pytestmark = [pytest.mark.ray, pytest.mark.vllm]

# The load stays high for this time, seconds. Serve's controller is killed once the first new replicas serve: replicas
# that start while it dies are started again by the next one, which takes half a minute.
_RISE_S, _FALL_S, _KILL_S = 34.0, 10.0, 15.0


@pytest.fixture(scope="module")
def stand() -> Iterator[Stand]:
    """One application for all policies."""
    from serve_app.sdk import deploy

    with deploy(document()) as app:
        yield Stand(app)


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_serves_the_rise_loses_nothing_and_gives_back_after_the_fall(stand: Stand, name: str) -> None:
    stand.rest()
    passage = asyncio.run(stand.passage(POLICIES[name], rise_s=_RISE_S, fall_s=_FALL_S, kill_after_s=_KILL_S))
    assert passage.lost == []
    if name == "periodic":
        stand.wait_until(lambda: stand.serving() == (4, 2))
        stand.wait_until(lambda: stand.serving() == (2, 1))
        return
    assert passage.asked_s is not None, passage.reasons
    assert (enough_s := passage.enough_s(_RISE_S)) is not None, (passage.counts, passage.reasons)
    assert refused_after(passage.records, enough_s, _RISE_S) <= 0.05 * len(passage.records)
    peak = passage.peak
    stand.wait_until(lambda: (now := stand.serving()) is not None and now[0] < peak[0])
