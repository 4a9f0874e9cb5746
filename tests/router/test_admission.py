"""Who goes on, who waits and in which order, who is refused and who is dropped."""

import itertools
import random
from collections import deque

import pytest
from pydantic import ValidationError

from router.admission import Admission, AdmissionConfig, Asked, Priority
from router.rate_limit import KeyLimits

SLO = AdmissionConfig(ttft_s=1.0)


def admission(config: AdmissionConfig = SLO, *, replicas: int = 1) -> Admission:
    return Admission(config, replicas=replicas, prefill_replicas=1, now_s=0.0)


def asked(
    tokens: int = 1000, *, key: str | None = None, priority: Priority = Priority.NORMAL, is_stream: bool = True
) -> Asked:
    return Asked(tokens=tokens, most_output_tokens=None, is_stream=is_stream, key=key, priority=priority)


def busy(config: AdmissionConfig = SLO, *, waits_s: float = 0.5) -> tuple[Admission, float]:
    """One that has learned 1,000 prompt tokens per second, with a prompt on its way and one that has waited."""
    full = admission(config)
    now_s = 0.0
    for _ in range(60):
        one = asked()
        assert full.arrive(one, now_s) is None
        assert full.passed(now_s) == [one]
        now_s += 1.0
        full.output(one, 1, now_s)
        full.leave(one, now_s)
    for tokens in (1000, 3000):
        assert full.arrive(asked(tokens), now_s) is None
        full.passed(now_s)
    assert full.waiting == 1
    return full, now_s + waits_s


def test_without_an_objective_nobody_waits_and_nobody_is_refused() -> None:
    free = admission(AdmissionConfig())
    for number in range(500):
        one = asked(100_000)
        assert free.arrive(one, 0.01 * number) is None
        assert free.passed(0.01 * number) == [one]


def test_who_would_wait_too_long_is_refused_and_told_when_to_come_again() -> None:
    full, now_s = busy()
    refusal = full.arrive(asked(), now_s)
    assert refusal is not None
    # 1,000 tokens on their way and 3,000 before it, at 1,000 per second: 4 s, and 0.8 s would have been bearable.
    assert (refusal.reason, refusal.retry_after_s) == ("predicted_ttft", 4.0)
    assert "ttft_s" in refusal.message
    assert "4 s" in refusal.message


def test_nobody_is_refused_before_somebody_has_waited() -> None:
    full, now_s = busy(waits_s=0.1)
    assert full.arrive(asked(), now_s) is None


def test_who_waits_and_can_no_longer_be_in_time_is_dropped_and_others_go_on() -> None:
    full, now_s = busy()
    (late,) = full.late(now_s + 0.2)
    assert late.tokens == 3000
    assert full.waiting == 0
    assert "admission.ttft_s" in full.late_refusal(late, now_s + 0.2).message
    one = asked(10)
    assert full.arrive(one, now_s + 0.2) is None
    full.leave(late, now_s + 0.3)  # as its own end does
    assert full.passed(now_s + 0.3) == [one]
    assert full.here == 2


def test_long_prompts_have_the_time_that_they_need() -> None:
    full, now_s = busy(AdmissionConfig(ttft_s=1.0, ttft_s_per_input_token=0.005))
    assert full.arrive(asked(500), now_s) is not None
    assert full.arrive(asked(1000), now_s) is None


def test_higher_priorities_overtake_and_lower_ones_see_all_before_them() -> None:
    full, now_s = busy()
    high = asked(priority=Priority.HIGH)
    assert full.arrive(asked(priority=Priority.LOW), now_s) is not None
    assert full.arrive(high, now_s) is not None  # 1,000 tokens on their way
    roomy = AdmissionConfig(ttft_s=100.0)
    slow = admission(roomy)
    slow.arrive(asked(100_000), 0.0)
    slow.passed(0.0)
    order = [asked(priority=priority) for priority in (Priority.LOW, Priority.NORMAL, Priority.HIGH)]
    slow._capacity.tokens_s = 1.0  # so that all of them wait
    for one in order:
        slow.arrive(one, 0.0)
        assert slow.passed(0.0) == []
    first = next(iter(slow._held))
    assert first.priority is Priority.LOW
    slow._capacity.tokens_s = 1e9
    assert [one.priority for one in slow.passed(0.0)] == [Priority.HIGH, Priority.NORMAL, Priority.LOW]


def test_a_key_cannot_ask_for_more_than_its_highest_priority() -> None:
    config = AdmissionConfig(ttft_s=100.0, key=KeyLimits(highest_priority="normal"))
    held = admission(config)
    one = asked(key="a", priority=Priority.HIGH)
    held.arrive(one, 0.0)
    assert one.order[0] == Priority.NORMAL


@pytest.mark.parametrize(("share", "expected"), [(1.0, 0.5), (3.0, 0.25)])
def test_keys_share_by_their_shares_however_much_each_asks(share: float, expected: float) -> None:
    config = AdmissionConfig(ttft_s=200.0, keys={"many": KeyLimits(share=share)})
    held = admission(config)
    held.arrive(asked(100_000, key="first"), 0.0)
    held.passed(0.0)
    held._capacity.tokens_s = 1.0
    for number in range(90):
        held.arrive(asked(key="many"), 0.0)
        if number < 30:
            held.arrive(asked(key="few"), 0.0)
        assert held.passed(0.0) == []
    held._capacity.tokens_s = 200.0  # a window of 16,000 tokens
    held._window_tokens = 0
    gone = [one.key for one in held.passed(0.0)]
    assert len(gone) == 16
    assert gone.count("few") / len(gone) == pytest.approx(expected, abs=0.1)


def held_back(tokens_s: float) -> Admission:
    """One that knows its rate, and whose window is taken by a long prompt."""
    held = admission(AdmissionConfig(ttft_s=200.0))
    held.arrive(asked(100_000, key="first"), 0.0)
    held.passed(0.0)
    held._capacity.tokens_s = tokens_s
    return held


def test_a_key_that_comes_later_shares_from_then_on_and_is_owed_nothing() -> None:
    held = held_back(200.0)  # a window of 16,000 tokens
    for key in ("old", "new"):
        for _ in range(60):
            held.arrive(asked(key=key), 0.0)
        held._window_tokens = 0
        gone = [one.key for one in held.passed(0.0)]
        assert len(gone) == 16
    assert gone.count("old") == pytest.approx(8, abs=1)


def test_what_a_key_had_while_nobody_waited_is_forgotten() -> None:
    held = held_back(1e9)
    for _ in range(100):
        one = asked(key="old")
        held.arrive(one, 0.0)
        assert held.passed(0.0) == [one]
    held._capacity.tokens_s = 200.0
    for _ in range(30):
        held.arrive(asked(key="old"), 0.0)
        held.arrive(asked(key="new"), 0.0)
    held._window_tokens = 0
    gone = [one.key for one in held.passed(0.0)]
    assert gone.count("old") == pytest.approx(8, abs=1)


def test_only_what_is_before_a_request_counts_against_it() -> None:
    full, now_s = busy()
    full._capacity.tokens_s = 2000.0  # half a second for the one on its way
    assert full.arrive(asked(), now_s) is not None
    assert full.arrive(asked(priority=Priority.HIGH), now_s) is None


@pytest.mark.parametrize("limits", [KeyLimits(max_requests=1), KeyLimits(tokens_per_minute=6000.0)])
def test_a_key_has_its_limits_until_its_request_has_left(limits: KeyLimits) -> None:
    held = admission(AdmissionConfig(key=limits))
    one = asked(900, key="a")  # of 1,000 tokens at once
    assert held.arrive(one, 0.0) is None
    held.passed(0.0)
    held.output(one, 100, 0.0)
    refusal = held.arrive(asked(1, key="a"), 0.0)
    assert refusal is not None
    assert refusal.reason == "key"
    assert held.arrive(asked(1, key="b"), 0.0) is None
    held.leave(one, 0.5)
    assert held.arrive(asked(1, key="a"), 0.5) is None


def test_an_answer_in_one_piece_that_says_nothing_makes_room_after_its_time() -> None:
    held = held_back(1.0)
    held._window_tokens = 0
    silent = asked(5000, is_stream=False)
    held.arrive(silent, 0.0)
    assert held.passed(0.0) == []  # the long prompt is on its way still
    held._window_prompts = 0
    assert held.passed(0.0) == [silent]
    assert held._window_tokens == 5000
    held.late(199.0)
    assert held._window_tokens == 5000
    held.late(200.0)
    assert held._window_tokens == 0


def test_several_answers_to_one_prompt_count_as_what_they_are() -> None:
    held = held_back(200.0)
    for number in range(40):
        many = asked(key="many")
        many.answers = 1 + 9 * (number < 39)
        held.arrive(many, 0.0)
        held.arrive(asked(key="one"), 0.0)
    held._window_tokens = 0
    gone = [one.key for one in held.passed(0.0)]
    # 1,000 prompt tokens and 128 of each answer: 2,280 against 1,128.
    assert gone.count("many") / len(gone) == pytest.approx(0.33, abs=0.07)
    full = admission(AdmissionConfig(ttft_s=100.0, tpot_s=0.05))
    full._capacity.most_streams = 8.0
    ten = asked(10)
    ten.answers = 10
    full.arrive(ten, 0.0)
    assert full.passed(0.0) == [ten]
    last = asked(10)
    full.arrive(last, 0.0)
    assert full.passed(0.0) == []
    full.leave(ten, 1.0)
    assert full.passed(1.0) == [last]


def test_little_traffic_is_no_sign_of_little_capacity() -> None:
    free = admission()
    for second, tokens in enumerate([2000] * 60 + [10] * 60):
        one = asked(tokens)
        free.arrive(one, float(second))
        free.passed(float(second))
        free.output(one, 1, second + 0.5)
        free.leave(one, second + 0.5)
    assert free._capacity.tokens_s == pytest.approx(2000.0)


def test_prompt_tokens_that_wait_are_bounded() -> None:
    full, now_s = busy(AdmissionConfig(ttft_s=1.0, max_queued_tokens=3500), waits_s=0.0)
    refusal = full.arrive(asked(501), now_s)
    assert refusal is not None
    assert refusal.reason == "queued_tokens"
    assert full.arrive(asked(500), now_s) is None


def test_requests_are_bounded() -> None:
    full = admission(AdmissionConfig(max_requests=2))
    here = [asked(), asked()]
    assert [full.arrive(one, 0.0) for one in here] == [None, None]
    refusal = full.arrive(asked(), 0.0)
    assert refusal is not None
    assert "2 requests are here" in refusal.message
    full.passed(0.0)
    full.leave(here[0], 1.0)
    assert full.arrive(asked(), 1.0) is None


def test_who_leaves_while_waiting_takes_nothing_along() -> None:
    full, now_s = busy(waits_s=0.0)
    gone = asked(500)
    assert full.arrive(gone, now_s) is None
    full.leave(gone, now_s)
    full.leave(gone, now_s)
    assert full.waiting == 1
    assert gone not in full.passed(now_s)


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize("replicas", [1, 3])
def test_five_times_too_much_keeps_what_engines_can_do(is_stream: bool, replicas: int) -> None:
    """A prefill pool that computes 10,000 prompt tokens per second, one prompt after the other."""
    rng = random.Random(0)
    pools = [admission(AdmissionConfig(ttft_s=1.0), replicas=replicas) for _ in range(replicas)]
    queue: deque[tuple[Admission, Asked]] = deque()
    here: dict[Asked, Admission] = {}
    left_tokens, next_s, in_time, answered = 0.0, 0.0, 0, 0
    for step in range(8000):
        now_s = 0.005 * step
        while next_s <= now_s:
            next_s += rng.expovariate(50.0)
            one, pool = asked(rng.randrange(200, 1800), is_stream=is_stream), rng.choice(pools)
            if pool.arrive(one, now_s) is None:
                here[one] = pool
        for pool in pools:
            if step % 10 == 0:
                for one in pool.late(now_s):
                    del here[one]
            queue.extend((pool, one) for one in pool.passed(now_s))
        left_tokens += 50.0
        while queue and left_tokens >= queue[0][1].tokens:
            pool, one = queue.popleft()
            left_tokens -= one.tokens
            pool.first(one, now_s)
            pool.output(one, 1, now_s)
            pool.leave(one, now_s)
            if now_s > 10.0:
                answered += 1
                in_time += now_s - one.arrived_s <= 1.0
            del here[one]
        left_tokens = min(left_tokens, 0.0) if not queue else left_tokens
    # 10 requests per second in 30 seconds.
    assert answered > 270
    assert in_time > (0.9 if replicas == 1 else 0.8) * answered


def test_streams_are_as_many_as_keep_their_pace() -> None:
    """A batch of n takes 10 + n ms for a step, so 36 streams keep 0.92 of 50 ms each."""
    full = admission(AdmissionConfig(ttft_s=2.0, tpot_s=0.05))
    streams: list[Asked] = []
    counts, slow = [], 0
    rng = random.Random(1)
    for step in itertools.count():
        now_s = 0.01 * step
        if now_s > 120.0:
            break
        one = asked(10)
        full.arrive(one, now_s)
        full.late(now_s)
        for new in full.passed(now_s):
            full.output(new, 1, now_s)
            streams.append(new)
        pace_s = 0.01 + 0.001 * len(streams)
        for stream in list(streams):
            if rng.random() < 0.01 / pace_s:
                full.output(stream, 1, now_s)
                if rng.random() < 0.01:
                    full.leave(stream, now_s)
                    streams.remove(stream)
        if now_s > 60.0:
            counts.append(len(streams))
            slow += pace_s > 0.05
    assert 32 <= sum(counts) / len(counts) <= 40
    assert slow < 0.02 * len(counts)


def test_a_pace_or_a_queue_without_a_first_token_is_refused() -> None:
    for without in ({"tpot_s": 0.05}, {"max_queued_tokens": 1000}):
        with pytest.raises(ValidationError, match="give both"):
            AdmissionConfig.model_validate(without)
