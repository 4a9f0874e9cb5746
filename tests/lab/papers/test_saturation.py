"""Which requests WVA's admission refuses."""

import random
from collections.abc import Callable

from autoscale.engines.profile import EngineProfile
from autoscale.traces.trace import TraceRequest
from autoscale.types import PoolKey
from kvtransfer.topology import Role
from router.config import RouterConfig
from tests.lab.papers.saturation import RefusingCluster, Saturation

MakeProfile = Callable[..., EngineProfile]
KEY = PoolKey("g0", Role.DECODE)


def request(at_s: float, input_tokens: int, output_tokens: int) -> TraceRequest:
    return TraceRequest(at_s=at_s, input_tokens=input_tokens, output_tokens=output_tokens)


def refusing(profile: EngineProfile, limit: Saturation) -> RefusingCluster:
    cluster = RefusingCluster({KEY: profile}, RouterConfig(), random.Random(0))
    cluster.refuse_at = limit
    return cluster


def test_a_request_is_refused_only_if_every_decode_replica_is_full(make_profile: MakeProfile) -> None:
    limit = Saturation(kv_usage_frac=0.5, waiting_requests=2)
    cluster = refusing(make_profile(), limit)
    for name in ("a", "b"):
        cluster.add(KEY, name)
    cluster.route(KEY, ["a", "b"])
    # Each request takes 510 of 1000 tokens. The third finds both replicas above half; the last comes after their end.
    cluster.submit([request(at_s, 500, 5) for at_s in (0.0, 0.05, 0.1, 5.0)])
    cluster.run()
    assert [record.error for record in cluster.records()] == [None, None, "refused", None]
    assert cluster.is_done


def test_a_queue_of_requests_makes_a_decode_replica_full(make_profile: MakeProfile) -> None:
    limit = Saturation(kv_usage_frac=1.1, waiting_requests=2)
    cluster = refusing(make_profile(max_running=1), limit)
    cluster.add(KEY, "a")
    cluster.route(KEY, ["a"])
    cluster.submit([request(at_s, 100, 50) for at_s in (0.0, 0.2, 0.3, 0.4)])  # one runs, two wait
    cluster.run()
    assert [record.error for record in cluster.records()] == [None, None, None, "refused"]


def test_a_request_is_refused_by_the_kv_at_its_arrival(make_profile: MakeProfile) -> None:
    """The decode steps of the first request are simulated all at once, up to the time at which the second comes."""
    limit = Saturation(kv_usage_frac=0.5, waiting_requests=9)
    cluster = refusing(make_profile(), limit)
    cluster.add(KEY, "a")
    cluster.route(KEY, ["a"])
    cluster.submit([request(0.0, 100, 600), request(10.0, 100, 5)])  # 100 + 470 of 1000 tokens by then
    cluster.run()
    assert [record.error for record in cluster.records()] == [None, "refused"]
