"""What routers of a virtual cluster learn of the replicas' caches."""

import random
from collections.abc import Callable

import pytest

from autoscale.engines.profile import EngineProfile
from autoscale.sim.cluster import VirtualCluster
from autoscale.sim.prefix_feed import Sight
from autoscale.traces.trace import TraceRequest
from autoscale.types import PoolKey
from kvtransfer.topology import Role
from router.config import RouterConfig

MakeProfile = Callable[..., EngineProfile]
P, D = PoolKey("g0", Role.PREFILL), PoolKey("g0", Role.DECODE)
ORACLE = Sight(report_delay_s=0.0, is_shared=True)


def turn(at_s: float, conversation: int, blocks: int = 9, output_tokens: int = 2) -> TraceRequest:
    """A request of one of several conversations, with blocks of 100 tokens."""
    ids = tuple(100 * conversation + block for block in range(blocks))
    return TraceRequest(at_s=at_s, input_tokens=100 * blocks + 50, output_tokens=output_tokens, hash_ids=ids)


def cluster_of(profile: EngineProfile, sight: Sight | None = None, **router: object) -> VirtualCluster:
    """A cluster of one group that routes by prefixes; all prompts are computed on prefill."""
    config = RouterConfig.model_validate(
        {"policy": "prefix", "length": {"local_max_tokens": 0, "local_cap_tokens": 0}, **router}
    )
    return VirtualCluster({P: profile, D: profile}, config, random.Random(1), prefix_block_tokens=100, sight=sight)


def computed(cluster: VirtualCluster, replicas: int) -> int:
    """Prompt tokens that prefill replicas have computed."""
    return sum(cluster.replica(P, f"prefill-{i}").work().prefill_tokens for i in range(replicas))


@pytest.mark.parametrize("sight", [Sight(), Sight(endpoint_routers=4), ORACLE])
def test_each_conversation_stays_where_its_prefix_is(make_profile: MakeProfile, sight: Sight) -> None:
    cluster = cluster_of(make_profile(kv_tokens=40_000), sight)
    trace = [turn(2.0 * i, i % 3) for i in range(12)]
    records = cluster.replay(trace, {P: 3, D: 3})
    assert computed(cluster, 3) == 3 * 950 + 9 * 50
    assert all(record.error is None for record in records)
    maps = [*cluster.prefix_maps(P), *cluster.prefix_maps(D)]
    assert sum(each.false_hits for each in maps) == 0
    assert sum(each.found_tokens for each in maps) == sum(each.expected_tokens for each in maps) == 2 * 9 * 900


def test_without_reports_a_router_knows_what_it_has_sent_alone(make_profile: MakeProfile) -> None:
    trace = [turn(2.0 * i, 0) for i in range(4)]

    def expected(sight: Sight) -> int:
        cluster = cluster_of(make_profile(kv_tokens=40_000), sight)
        cluster.replay(trace, {P: 2, D: 2})
        return sum(each.expected_tokens for each in cluster.prefix_maps(D))

    assert expected(Sight(report_delay_s=None)) == 3 * 900
    assert expected(Sight(report_delay_s=None, endpoint_routers=4)) == 0
    assert expected(Sight(endpoint_routers=4)) == 3 * 900


def test_a_report_is_at_the_routers_after_its_delay(make_profile: MakeProfile) -> None:
    cluster = cluster_of(make_profile(kv_tokens=40_000), Sight(endpoint_routers=2, report_delay_s=5.0))
    cluster.replay([turn(0.0, 0), turn(4.9, 0), turn(11.0, 0)], {P: 2, D: 1})
    first, second = cluster.prefix_maps(D)
    assert (first.expected_tokens, second.expected_tokens) == (900, 0)


def test_blocks_that_an_engine_drops_are_forgotten(make_profile: MakeProfile) -> None:
    cluster = cluster_of(make_profile(kv_tokens=1200))
    cluster.replay([turn(0.0, 0), turn(5.0, 1), turn(10.0, 0)], {P: 1, D: 1})
    (known,) = cluster.prefix_maps(P)
    held = set(cluster.replica(P, "prefill-0").engine.prefixes.hashes())
    assert 9 <= known.pieces("prefill-0") <= len(held) < 18
    assert known.false_hits == 0


def test_a_replica_that_has_gone_holds_nothing_and_a_new_router_knows_all(make_profile: MakeProfile) -> None:
    cluster = cluster_of(make_profile(kv_tokens=40_000))
    cluster.replay([turn(0.0, 0)], {P: 1, D: 2})
    maps = cluster.prefix_maps(P)
    assert [each.pieces("prefill-0") for each in maps] == [9, 9]
    cluster.kill(cluster.replica(D, "decode-0"))
    cluster.add(D, "decode-2")
    assert [each.pieces("prefill-0") for each in cluster.prefix_maps(P)] == [9, 9]
    cluster.kill(cluster.replica(P, "prefill-0"))
    assert [each.pieces("prefill-0") for each in cluster.prefix_maps(P)] == [0, 0]


def test_a_hot_prefix_spreads_over_the_pool(make_profile: MakeProfile) -> None:
    profile = make_profile(kv_tokens=40_000, max_running=64)
    fast = profile.handoff.model_copy(update={"bytes_per_s": 1e9})
    cluster = cluster_of(profile.model_copy(update={"handoff": fast}), Sight(endpoint_routers=2))
    # They need more than two replicas of each role.
    records = cluster.replay([turn(0.025 * i, 0, output_tokens=40) for i in range(300)], {P: 4, D: 4})
    for key, name in ((P, "prefill"), (D, "decode")):
        busy_s = [cluster.replica(key, f"{name}-{i}").work().busy_s for i in range(4)]
        assert max(busy_s) < 1.5 * sum(busy_s) / 4
    ttfts = [record.ttft_s for record in records if record.ttft_s is not None]
    assert max(ttfts) < 2 * ttfts[0]  # the first found an empty cache


def test_other_policies_have_no_maps_and_several_routers_too(make_profile: MakeProfile) -> None:
    cluster = cluster_of(make_profile(), Sight(endpoint_routers=3), policy="least_tokens")
    records = cluster.replay([turn(0.0, i) for i in range(6)], {P: 2, D: 2})
    assert not cluster.prefix_maps(P) and not cluster.prefix_maps(D)
    assert all(record.error is None for record in records)
