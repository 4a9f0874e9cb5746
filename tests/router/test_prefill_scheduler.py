"""Laws of the prefill queue: no idle replica while a prompt waits, late binding, bounded overtaking, the strategies."""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.config import PrefillQueueConfig
from router.prefill_order import ORDERS, WaitingPrompt
from router.prefill_scheduler import Binding, PrefillScheduler

WINDOW = 512
strategies = pytest.mark.parametrize("strategy", sorted(ORDERS))


def queue(strategy: str, replicas: int = 1, **changes: Any) -> PrefillScheduler:
    config = PrefillQueueConfig.model_validate({"strategy": strategy, "window_tokens": WINDOW, **changes})
    scheduler = PrefillScheduler(config)
    scheduler.set_replicas([f"r{number}" for number in range(replicas)], 0.0)
    return scheduler


def prompt(name: str, tokens: int = 1000, at_s: float = 0.0, within_s: float = 1.0, **more: Any) -> WaitingPrompt:
    return WaitingPrompt(prompt_id=name, tokens=tokens, arrived_s=at_s, deadline_s=at_s + within_s, **more)


def names(bindings: list[Binding]) -> list[str]:
    return [bound.prompt.prompt_id for bound in bindings]


def added(scheduler: PrefillScheduler, *prompts: WaitingPrompt, now_s: float = 0.0) -> list[str]:
    for one in prompts:
        scheduler.add(one, now_s)
    return names(scheduler.bind(now_s))


def drained(scheduler: PrefillScheduler, bound: list[str], now_s: float = 0.0) -> list[str]:
    """The names of all prompts in the order of their bindings, each ended before the next ones are bound."""
    order, running = list(bound), list(bound)
    while running:
        scheduler.end(running.pop(0), now_s)
        more = names(scheduler.bind(now_s))
        order += more
        running += more
    return order


@strategies
def test_a_prompt_is_bound_to_the_replica_that_has_room_first(strategy: str) -> None:
    scheduler = queue(strategy, replicas=2)
    assert len(added(scheduler, *(prompt(str(number)) for number in range(4)))) == 4
    assert added(scheduler, prompt("late")) == []
    scheduler.end("1", 0.1)
    assert [(one.prompt.prompt_id, one.replica_id) for one in scheduler.bind(0.1)] == [("late", "r1")]


@strategies
def test_a_replica_has_room_up_to_the_window_and_for_a_next_prompt_of_any_length(strategy: str) -> None:
    # 500 tokens are below the window, 600 are not.
    assert len(added(queue(strategy), *(prompt(str(n), tokens=100) for n in range(20)))) == 6
    assert len(added(queue(strategy), *(prompt(str(n), tokens=9000) for n in range(20)))) == 2


@strategies
def test_equal_prompts_go_in_the_order_of_their_arrival(strategy: str) -> None:
    scheduler = queue(strategy)
    prompts = [prompt(f"{number:02}", at_s=number / 1000) for number in range(30)]
    random.Random(0).shuffle(prompts)
    # The first call of ``bind`` sees all of them, in whatever order they were added.
    assert drained(scheduler, added(scheduler, *prompts)) == sorted(one.prompt_id for one in prompts)


def test_fcfs_goes_by_arrival_and_edf_by_deadline() -> None:
    prompts = [prompt("a", at_s=0.0, within_s=3.0), prompt("b", at_s=1.0, within_s=1.0), prompt("c", at_s=0.5)]
    for strategy, order in (("fcfs", ["a", "c", "b"]), ("edf", ["c", "b", "a"])):
        scheduler = queue(strategy)
        assert drained(scheduler, added(scheduler, *prompts)) == order


def full(strategy: str, *lengths: int) -> PrefillScheduler:
    """A queue with one full replica; prompts named by their lengths wait, the first one since 1.0 s."""
    scheduler = queue(strategy)
    added(scheduler, prompt("x", tokens=WINDOW), prompt("y", tokens=WINDOW))
    for number, tokens in enumerate(lengths):
        scheduler.add(prompt(str(tokens), tokens=tokens, at_s=1.0 + number / 1000, within_s=10.0), 1.0)
    return scheduler


def bound_after_both(scheduler: PrefillScheduler, now_s: float) -> list[str]:
    scheduler.end("x", now_s)
    scheduler.end("y", now_s)
    return names(scheduler.bind(now_s))


def test_dopd_sends_a_long_prompt_before_short_ones_that_make_no_batch() -> None:
    # The mean length is 512 before 900 and 60 come, and 496 after them.
    assert bound_after_both(full("dopd", 900, 60), 1.0) == ["900", "60"]
    assert bound_after_both(full("dopd", 60, 900), 1.0) == ["900", "60"]


def test_dopd_sends_a_batch_of_the_shortest_up_to_the_mean_length_before_a_long_prompt() -> None:
    # Mean length (512 + 512 + 900 + 150 + 90 + 120 + 100) / 7 = 341; the short ones have 460 tokens together. Then the
    # replica has 310 tokens and room; the other 150 tokens are no batch.
    assert bound_after_both(full("dopd", 900, 150, 90, 120, 100), 1.0) == ["90", "100", "120", "900"]


def test_dopd_sends_short_prompts_at_once_if_no_long_one_waits() -> None:
    assert bound_after_both(full("dopd", 60, 50), 1.0) == ["50", "60"]


def test_dopd_sends_short_prompts_that_have_waited_for_their_share_of_kingmans_wait() -> None:
    def first(timeout_frac: float, now_s: float) -> str:
        scheduler = queue("dopd", timeout_frac=timeout_frac)
        for second in range(100):  # one prompt a second, each takes 0.8 s; lengths 400 and 600: W_q = 64 ms
            scheduler.add(prompt("p", tokens=400 + 200 * (second % 2), at_s=float(second)), float(second))
            scheduler.bind(float(second))
            scheduler.end("p", second + 0.8)
        at_s = 100.0
        for name in ("x", "y"):
            scheduler.add(prompt(name, at_s=at_s, within_s=50.0), at_s)
            scheduler.bind(at_s)
        scheduler.add(prompt("short", tokens=60, at_s=at_s, within_s=50.0), at_s)
        scheduler.add(prompt("long", tokens=900, at_s=at_s, within_s=50.0), at_s)
        scheduler.end("x", now_s)
        return names(scheduler.bind(now_s))[0]

    assert first(1.0, 100.001) == "long"
    assert first(1.0, 101.0) == "short"


@strategies
def test_a_prompt_avoids_excluded_replicas_and_others_pass_it(strategy: str) -> None:
    scheduler = queue(strategy, replicas=2)
    added(scheduler, *(prompt(str(number)) for number in range(4)))
    scheduler.add(prompt("picky", exclude=frozenset({"r0"})), 0.0)
    scheduler.add(prompt("other"), 0.1)
    scheduler.end("0", 0.2)
    assert [(one.prompt.prompt_id, one.replica_id) for one in scheduler.bind(0.2)] == [("other", "r0")]
    scheduler.end("1", 0.3)
    assert [(one.prompt.prompt_id, one.replica_id) for one in scheduler.bind(0.3)] == [("picky", "r1")]
    assert scheduler.has_replica(prompt("p", exclude=frozenset({"r0"})))
    assert not scheduler.has_replica(prompt("p", exclude=frozenset({"r0", "r1"})))


@strategies
def test_a_prompt_that_leaves_is_not_bound_and_its_place_goes_to_another(strategy: str) -> None:
    scheduler = queue(strategy)
    assert added(scheduler, prompt("a"), prompt("b"), prompt("c"), prompt("d")) == ["a", "b"]
    scheduler.end("c", 0.0, is_computed=False)
    scheduler.end("a", 0.0, is_computed=False)
    scheduler.end("unknown", 0.0)
    assert names(scheduler.bind(0.0)) == ["d"]
    assert scheduler.waiting == 0


def entries(scheduler: PrefillScheduler) -> int:
    """Entries in the largest heap of the queue."""
    heaps = [each for each in vars(scheduler._order).values() if hasattr(each, "_entries")]
    return max(len(heap._entries) for heap in heaps)


@strategies
def test_prompts_that_leave_or_are_passed_over_do_not_fill_the_memory(strategy: str) -> None:
    scheduler = queue(strategy, replicas=2)
    added(scheduler, *(prompt(str(number)) for number in range(4)))
    scheduler.add(prompt("picky", tokens=500, exclude=frozenset({"r0"})), 0.0)
    scheduler.end("0", 0.0)
    for number in range(1000):
        scheduler.add(prompt(f"gone {number}", tokens=number + 1), 0.0)
        scheduler.add(prompt(f"bound {number}", tokens=number + 1), 0.0)
        scheduler.end(f"gone {number}", 0.0)
        assert names(scheduler.bind(2.0)) == [f"bound {number}"]  # past the deadline of all
        scheduler.end(f"bound {number}", 2.0)
    assert scheduler.waiting == 1
    assert entries(scheduler) < 100


@strategies
def test_a_lost_replica_gets_no_prompts_and_is_forgotten_with_its_last_one(strategy: str) -> None:
    scheduler = queue(strategy, replicas=2)
    added(scheduler, *(prompt(str(number)) for number in range(6)))
    scheduler.set_replicas(["r1", "new"], 0.0)
    assert {one.replica_id for one in scheduler.bind(0.0)} == {"new"}
    for number in range(4):
        scheduler.end(str(number), 0.0)
    added(scheduler, prompt("x"), prompt("y"), prompt("z"))
    assert scheduler.waiting == 1  # two are at r1
    scheduler.set_replicas(["r0", "r1", "new"], 0.0)  # it is back, and empty
    assert {one.replica_id for one in scheduler.bind(0.0)} == {"r0"}


@strategies
def test_a_replica_that_not_all_routers_know_yet_has_no_more_prompts_than_others(strategy: str) -> None:
    scheduler = queue(strategy, replicas=2)
    bound: Counter[str] = Counter()
    for number in range(40):
        scheduler.set_replicas(["r0", "r1", "new"] if number % 2 else ["r0", "r1"], 0.0)
        scheduler.add(prompt(str(number)), 0.0)
        bound.update(one.replica_id for one in scheduler.bind(0.0))
    assert bound == {"r0": 2, "r1": 2, "new": 2}


@strategies
def test_a_decode_replica_that_is_gone_frees_all_its_places(strategy: str) -> None:
    scheduler = queue(strategy)
    added(scheduler, prompt("a", caller="gone"), prompt("b", caller="here"))
    added(scheduler, prompt("c", caller="gone"), prompt("d", caller="here"))
    assert scheduler.drop("gone", 1.0) == ["c"]
    assert names(scheduler.bind(1.0)) == ["d"]


def test_a_prompt_that_was_bound_too_long_ago_is_bound_no_more() -> None:
    scheduler = queue("fcfs")
    added(scheduler, prompt("a"), now_s=0.0)
    added(scheduler, prompt("b"), now_s=5.0)
    added(scheduler, prompt("c"), now_s=5.0)
    scheduler.expire(30.0, 30.0)
    assert scheduler.bind(30.0) == []
    scheduler.expire(30.0, 31.0)
    assert names(scheduler.bind(31.0)) == ["c"]


def test_a_replica_with_a_part_of_the_prompt_in_its_cache_is_chosen_and_computes_the_rest() -> None:
    scheduler = queue("fcfs", replicas=2)
    scheduler.add(prompt("a", tokens=100), 0.0)
    first = scheduler.bind(0.0)[0].replica_id
    # 100 + 400 - 350 tokens there are more than 0 + 400 - 0 elsewhere would be after this one.
    scheduler.add(prompt("b", tokens=400, overlap_tokens={first: 350}), 0.0)
    assert scheduler.bind(0.0)[0].replica_id == first
    added(scheduler, *(prompt(str(number), tokens=1) for number in range(1000)))
    assert scheduler.waiting == 1000 - (WINDOW - 150) - WINDOW


@dataclass
class Engine:
    """Computes all the prompts that it has when it has computed those before; they end one after the other."""

    computed: list[WaitingPrompt] = field(default_factory=list)
    next: list[WaitingPrompt] = field(default_factory=list)

    def add(self, one: WaitingPrompt) -> None:
        (self.next if self.computed else self.computed).append(one)

    def end(self, number: int) -> WaitingPrompt:
        ended = self.computed.pop(number % len(self.computed))
        if not self.computed:
            self.computed, self.next = self.next, []
        return ended


@dataclass
class Cluster:
    """Engines, and the prompts that wait for them."""

    scheduler: PrefillScheduler
    engines: dict[str, Engine]
    now_s: float = 0.0
    waiting: dict[str, WaitingPrompt] = field(default_factory=dict)

    def bind(self) -> list[Binding]:
        bindings = self.scheduler.bind(self.now_s)
        for one in bindings:
            del self.waiting[one.prompt.prompt_id]
            self.engines[one.replica_id].add(one.prompt)
        return bindings


# Each event: prompts that arrive (lengths and objectives), then the number of ends, then time that passes.
events = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(1, 2000), st.sampled_from([0.1, 0.5, 1.0, 3.0])), max_size=6),
        st.integers(0, 5),
        st.floats(0.0, 0.7),
    ),
    max_size=30,
)


def played(strategy: str, replicas: int, script: Any) -> Iterator[tuple[Cluster, list[Binding]]]:
    engines = {f"r{number}": Engine() for number in range(replicas)}
    cluster, number, rng = Cluster(queue(strategy, replicas), engines), 0, random.Random(0)
    for arrivals, ends, passes_s in script:
        for tokens, within_s in arrivals:
            one = prompt(str(number), tokens=tokens, at_s=cluster.now_s, within_s=within_s)
            cluster.waiting[one.prompt_id] = one
            cluster.scheduler.add(one, cluster.now_s)
            number += 1
        yield cluster, cluster.bind()
        for _ in range(ends):
            if busy := [engine for engine in engines.values() if engine.computed]:
                cluster.scheduler.end(rng.choice(busy).end(rng.randrange(100)).prompt_id, cluster.now_s)
                yield cluster, cluster.bind()
        cluster.now_s += passes_s


@strategies
@given(replicas=st.integers(1, 4), script=events)
def test_while_a_prompt_waits_each_engine_computes_and_has_a_next_prompt_and_a_window_of_tokens(
    strategy: str, replicas: int, script: Any
) -> None:
    for cluster, _ in played(strategy, replicas, script):
        assert cluster.scheduler.waiting == len(cluster.waiting)
        for engine in cluster.engines.values():
            if cluster.waiting:
                assert engine.computed and engine.next
                assert sum(one.tokens for one in (*engine.computed, *engine.next)) >= WINDOW


@strategies
@given(replicas=st.integers(1, 4), script=events)
def test_an_engine_with_a_next_prompt_and_a_window_of_tokens_gets_no_more(
    strategy: str, replicas: int, script: Any
) -> None:
    for cluster, bindings in played(strategy, replicas, script):
        for name, engine in cluster.engines.items():
            new = sum(one.replica_id == name for one in bindings)
            # DOPD's batches go together. Its first prompt found room.
            before = engine.next[:-1] if strategy != "dopd" else engine.next[: len(engine.next) - new]
            assert not new or not before or sum(one.tokens for one in (*engine.computed, *before)) < WINDOW


@strategies
@given(replicas=st.integers(1, 3), script=events)
def test_no_prompt_is_overtaken_after_its_deadline_by_one_that_came_later(
    strategy: str, replicas: int, script: Any
) -> None:
    for cluster, bindings in played(strategy, replicas, script):
        for one in bindings:
            for left in cluster.waiting.values():
                is_overdue = left.deadline_s <= cluster.now_s
                assert not is_overdue or one.prompt.arrived_s <= left.deadline_s


@pytest.mark.parametrize("strategy", ["edf", "dopd"])
@pytest.mark.parametrize(("victim", "others"), [(5000, 300), (10, 5000)])
def test_neither_a_long_nor_a_short_prompt_starves_among_the_others(strategy: str, victim: int, others: int) -> None:
    """The others come faster than they are computed, with earlier deadlines while the victim's has not passed."""
    scheduler = queue(strategy)
    running = added(scheduler, prompt("x", tokens=others), prompt("y", tokens=others))
    scheduler.add(prompt("victim", tokens=victim, at_s=0.0, within_s=2.0), 0.0)
    now_s, number = 0.0, 0
    while "victim" not in running:
        for _ in range(3):
            number += 1
            scheduler.add(prompt(str(number), tokens=others, at_s=now_s, within_s=0.5), now_s)
        scheduler.end(running.pop(0), now_s)
        running += names(scheduler.bind(now_s))
        now_s += 0.1
        assert now_s < 10.0
    assert now_s > (2.0 if victim > others else 0.0)
