"""When start hosts are missing, and on which nodes a pool's replicas could need one."""

import pytest

from deployments.actors.start_hosts import HostCount, HostPool, fits

pytestmark = pytest.mark.ray

PLACE = ("kind", "node")
WANTED = [PLACE]


def notes(**hosts: int) -> dict[tuple[str, str, str], bytes]:
    return {(*PLACE, name): str(beat).encode() for name, beat in hosts.items()}


def test_a_node_without_hosts_gets_all_of_them_at_once_and_is_not_asked_again_while_they_start() -> None:
    count = HostCount(2)
    assert count.missing(WANTED, 0.0) == {PLACE: 2}
    assert count.missing(WANTED, 5.0) == {}
    count.lost(notes(a=0, b=0), 10.0)
    assert count.missing(WANTED, 10.0) == {}


def test_hosts_that_do_not_come_are_requested_again_after_twice_the_time() -> None:
    count = HostCount(1)
    requested = [now_s for now_s in range(0, 2000, 10) if count.missing(WANTED, float(now_s))]
    assert requested == [0, 60, 180, 420, 900, 1860]


def test_a_host_that_a_replica_has_taken_is_replaced_once_the_start_is_over() -> None:
    count = HostCount(2)
    count.missing(WANTED, 0.0)
    count.lost(notes(a=0, b=0), 10.0)
    count.missing(WANTED, 10.0)
    count.lost(notes(b=1), 15.0)  # a replica has taken the other
    assert count.missing(WANTED, 15.0) == {}
    count.lost(notes(b=2), 30.0)
    assert count.missing(WANTED, 30.0) == {}
    count.lost(notes(b=3), 46.0)
    assert count.missing(WANTED, 46.0) == {PLACE: 1}


def test_a_host_whose_note_stays_the_same_has_died_and_is_named_and_replaced() -> None:
    count = HostCount(1)
    assert count.lost(notes(a=0), 0.0) == []
    assert count.lost(notes(a=0), 19.0) == []
    assert count.lost(notes(a=0), 21.0) == [(*PLACE, "a")]
    assert count.missing(WANTED, 21.0) == {PLACE: 1}


@pytest.mark.parametrize(
    ("resources", "labels", "can_run"),
    [
        ({"CPU": 8.0, "GPU": 8.0}, {"zone": "a"}, True),
        ({"CPU": 8.0}, {"zone": "a"}, False),
        ({"CPU": 8.0, "GPU": 0.5}, {"zone": "a"}, False),
        ({"CPU": 8.0, "GPU": 8.0}, {"zone": "b"}, False),
        ({"CPU": 8.0, "GPU": 8.0}, None, False),
    ],
)
def test_hosts_wait_only_where_a_replica_could_run(
    resources: dict[str, float], labels: dict[str, str] | None, can_run: bool
) -> None:
    pool = HostPool(kind="k", resources={"CPU": 1.0, "GPU": 1.0}, node_labels={"zone": "a"}, runtime_env="{}")
    assert fits(pool, {"Resources": resources, "Labels": labels}) is can_run
