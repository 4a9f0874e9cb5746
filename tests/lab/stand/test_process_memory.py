"""The kind of a process, and when its memory has grown."""

from collections.abc import Sequence
from typing import Any

import psutil
import pytest

from tests.lab.stand.process_memory import Memory, has_grown

MIB = 2**20


class Fake:
    """A process: a title and how many MiB it has."""

    def __init__(self, pid: int, title: str, mib: float = 0.0) -> None:
        self.pid = pid
        self.title = title
        self.mib = mib

    def cmdline(self) -> list[str]:
        return [self.title]

    def memory_info(self) -> Any:
        if self.mib < 0.0:
            raise psutil.NoSuchProcess(self.pid)
        return self

    @property
    def rss(self) -> int:
        return round(self.mib * MIB)


def decode(pid: int) -> Fake:
    return Fake(pid, "ray::ServeReplica:tandem:decode:g0")


def sampled(processes: list[Fake], *seen: tuple[float, Sequence[float]], warm_up_frac: float = 0.15) -> Memory:
    """Memory samples of these processes: the share of the time, and the MiB of each; below 0: it has ended."""
    known: Any = processes
    memory = Memory(lambda: [one for one in known if one.mib >= 0.0], warm_up_frac)
    for done, sizes in seen:
        for one, mib in zip(processes, sizes, strict=True):
            one.mib = mib
        memory.sample(done)
    return memory


def over_time(mib: Sequence[float]) -> list[tuple[float, list[float]]]:
    """A hundred samples after the warm-up, between these sizes at equal distances."""
    last = len(mib) - 1
    places = [number / 100 * last for number in range(101)]
    sizes = [
        mib[int(at)] + (at - int(at)) * (mib[min(int(at) + 1, last)] - mib[int(at)]) for at in places
    ]  # linear between the given sizes
    return [(0.15 + 0.85 * number / 100, [size]) for number, size in enumerate(sizes)]


def test_memory_is_compared_between_the_thirds_after_the_warm_up() -> None:
    sizes = ((0.0, 900), (0.1, 900), (0.2, 100), (0.4, 100), (0.6, 500), (0.8, 104), (1.0, 104))
    memory = sampled([decode(7)], *((done, [mib]) for done, mib in sizes))
    assert memory.growth() == {
        "decode replica": {
            "first_third_mib": 100.0,
            "last_third_mib": 104.0,
            "growth_frac": pytest.approx(0.04),
            "steady_mib": 0.0,
        }
    }


def test_the_warm_up_has_the_given_length() -> None:
    seen = [(done / 100, [100 + min(done, 50)]) for done in range(101)]
    assert has_grown(sampled([decode(7)], *seen).growth()["decode replica"])
    assert not has_grown(sampled([decode(7)], *seen, warm_up_frac=0.5).growth()["decode replica"])
    seen = [(done / 100, [100 + max(50, done)]) for done in range(101)]
    assert has_grown(sampled([decode(7)], *seen, warm_up_frac=0.5).growth()["decode replica"])
    assert has_grown(sampled([decode(7)], *seen, warm_up_frac=0.5).means()["decode replica"])


def test_a_zombie_has_no_memory() -> None:
    memory = sampled([decode(7)], *((done / 10, [100 if done < 5 else 0]) for done in range(11)))
    assert memory.growth() == {}
    assert sampled([decode(7)], *((done / 10, [0]) for done in range(11))).growth() == {}


def test_the_process_that_grew_most_counts_for_its_kind() -> None:
    memory = sampled([decode(7), decode(8)], *((done / 10, (100, 100 + done)) for done in range(11)))
    assert memory.growth()["decode replica"]["growth_frac"] > 0.04


def test_means_are_of_processes_that_replace_each_other_in_any_number() -> None:
    processes = [decode(7), decode(8), decode(9), Fake(10, "haproxy -db"), Fake(11, "python train.py")]
    memory = sampled(
        processes,
        *((done, (100, -1, -1, 10, 5)) for done in (0.2, 0.3)),
        *((done, (-1, 120, 140, 10, 500)) for done in (0.8, 0.9, 1.0)),
    )
    means = memory.means()
    assert {kind: row["growth_frac"] for kind, row in means.items()} == {
        "decode replica": pytest.approx(0.3),
        "haproxy": 0.0,
    }
    assert set(memory.growth()) == {"haproxy"}  # no replica was there all the time


def test_a_process_takes_its_title_later_and_keeps_it_when_it_ends() -> None:
    late = Fake(7, "ray::IDLE", 100)
    memory = sampled([late], (0.2, [100]))
    assert (memory.kind(7), memory.kinds()) == ("other", set())
    late.title = "ray::ServeReplica:tandem:prefill:g0"
    memory.sample(0.9)
    late.title = ""
    memory.sample(1.0)
    assert (memory.kind(7), memory.kinds()) == ("prefill replica", {"prefill replica"})
    assert memory.growth()["prefill replica"]["first_third_mib"] == 100.0


def test_a_process_that_ends_while_it_is_sampled_is_left_out() -> None:
    gone: Any = Fake(7, "haproxy -db", -1)
    memory = Memory(lambda: [gone])
    memory.sample(0.5)
    assert memory.growth() == {}


@pytest.mark.parametrize(
    ("mib", "grown"),
    [
        ([700, 700], False),
        ([700, 709], True),  # 6 kB for each of 2,000 requests are 12 MB
        ([700, 706], False),  # less than 8 MiB
        ([700, 712, 712, 712, 712], False),  # a cache has filled
        ([700, 704, 708, 704, 708, 704], False),
        ([708, 700], False),
        ([40, 43], False),  # less than 4 MiB
        ([40, 42, 46, 46, 46], True),  # more than a twentieth, and more than 4 MiB
    ],
)
def test_growth_is_a_twentieth_between_thirds_or_a_steady_rise(mib: list[float], grown: bool) -> None:
    (row,) = sampled([decode(7)], *over_time(mib)).growth().values()
    assert has_grown(row) is grown


def test_a_steady_rise_is_given_for_the_whole_run() -> None:
    (row,) = sampled([decode(7)], *over_time([700, 717])).growth().values()
    # 17 MiB in 85 % of the time; a hundred samples in fifths.
    assert row["steady_mib"] == pytest.approx(20.0, rel=0.02)
