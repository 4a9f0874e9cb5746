"""One engine, step by step, by hand and at random."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscale.engines.engine_model import EngineModel
from autoscale.engines.engine_step import ModelRequest, Step
from autoscale.engines.profile import EngineProfile

MakeProfile = Callable[..., EngineProfile]


def run(engine: EngineModel, now_s: float = 0.0, limit: int = 10_000) -> list[tuple[float, str]]:
    """When each output token came, and of which request it is."""
    outputs = []
    inside = [*engine.running, *engine.waiting, *engine.deferred]
    counts = {request: engine.produced(request) for request in inside}
    for _ in range(limit):
        step = engine.plan(now_s)
        if step is None:
            ready_s = engine.next_ready_s()
            if ready_s is None or ready_s <= now_s:
                return outputs
            now_s = ready_s
            continue
        now_s += step.duration_s
        engine.apply(step)
        for request, before in counts.items():
            counts[request] = engine.produced(request)
            outputs += [(round(now_s, 6), request.request_id)] * (counts[request] - before)
    raise AssertionError("it never ends")


def test_a_prompt_alone_takes_the_time_of_the_curve(make_profile: MakeProfile) -> None:
    engine = EngineModel(make_profile())
    engine.add(ModelRequest("a", input_tokens=90, output_tokens=1))
    assert run(engine) == [(0.1, "a")]
    assert engine.kv_usage_frac == 0.0
    assert engine.counters.prefill_tokens == 90


def test_a_prompt_that_another_engine_is_to_pull_keeps_its_kv_until_it_is_released(make_profile: MakeProfile) -> None:
    engine = EngineModel(make_profile())
    pulled = ModelRequest("a", input_tokens=90, output_tokens=1, keeps_kv=True)
    engine.add(pulled)
    run(engine)
    used_frac = engine.kv_usage_frac
    assert used_frac >= 90 / engine.profile.kv_tokens
    engine.add(ModelRequest("b", input_tokens=round(engine.profile.kv_tokens * (1 - used_frac)), output_tokens=1))
    assert engine.plan(0.0) is None  # the prompt and its next token do not fit
    engine.release(pulled)
    assert engine.kv_usage_frac == 0.0
    assert engine.plan(0.0) is not None


def test_a_long_prompt_is_cut_into_chunks_that_cost_a_step_each(make_profile: MakeProfile) -> None:
    engine = EngineModel(make_profile())
    engine.add(ModelRequest("a", input_tokens=250, output_tokens=1))
    assert run(engine) == [(0.28, "a")]  # 250 ms of tokens, and 10 ms for each of three steps
    assert engine.counters.steps == 3


def test_output_comes_step_by_step_and_prefill_of_others_slows_it(make_profile: MakeProfile) -> None:
    engine = EngineModel(make_profile())
    engine.add(ModelRequest("a", input_tokens=10, output_tokens=4))
    first = engine.plan(0.0)
    assert first is not None
    engine.apply(first)
    engine.add(ModelRequest("b", input_tokens=50, output_tokens=2))
    outputs = run(engine, 0.02)
    # A step with one decode and 50 prompt tokens, then a step with two decodes, then one with one decode.
    assert outputs == [(0.091, "a"), (0.091, "b"), (0.113, "a"), (0.113, "b"), (0.134, "a")]


def test_a_batch_may_take_longer_beside_prompts(make_profile: MakeProfile) -> None:
    beside = {"batch": [1, 100], "context_tokens": [100], "step_s": [[0.031], [0.13]]}
    engine = EngineModel(make_profile(decode_beside_prompts=beside))
    engine.add(ModelRequest("a", input_tokens=10, output_tokens=4))
    first = engine.plan(0.0)
    assert first is not None
    engine.apply(first)
    engine.add(ModelRequest("b", input_tokens=50, output_tokens=2))
    # As above, but the step with prompt tokens takes 10 ms more; steps without prompts do not.
    assert run(engine, 0.02) == [(0.101, "a"), (0.101, "b"), (0.123, "a"), (0.123, "b"), (0.144, "a")]


def test_a_cached_prefix_is_not_computed_again(make_profile: MakeProfile) -> None:
    engine = EngineModel(make_profile())
    engine.add(ModelRequest("a", 90, 1, block_hashes=(1, 2, 3)))
    run(engine)
    engine.add(ModelRequest("b", 90, 1, block_hashes=(1, 2, 7)))
    assert run(engine) == [(0.08, "b")]  # 70 of 90 tokens are computed
    engine.add(ModelRequest("c", 30, 1, block_hashes=(1, 2, 3)))
    assert run(engine) == [(0.011, "c")]  # the last token is always computed


def test_the_cache_gives_way_to_requests(make_profile: MakeProfile) -> None:
    engine = EngineModel(make_profile(kv_tokens=100))
    engine.add(ModelRequest("a", 40, 1, block_hashes=(1, 2, 3, 4)))
    run(engine)
    engine.add(ModelRequest("b", 80, 1, block_hashes=(9,)))
    run(engine)
    engine.add(ModelRequest("c", 40, 1, block_hashes=(1, 2, 3, 4)))
    assert run(engine) == [(0.04, "c")]  # the last blocks were dropped first, and thirty tokens are computed again


def test_requests_that_share_a_prefix_need_its_kv_once(make_profile: MakeProfile) -> None:
    engine = EngineModel(make_profile(kv_tokens=150))
    engine.add(ModelRequest("a", 90, 50, block_hashes=range(8)))
    first = engine.plan(0.0)
    assert first is not None
    engine.apply(first)
    engine.add(ModelRequest("b", 90, 10, block_hashes=range(8)))
    engine.add(ModelRequest("c", 90, 10, block_hashes=range(20, 28)))
    engine.plan(0.1)
    assert [request.request_id for request in engine.running] == ["a", "b"]
    assert engine.kv_usage_frac == (90 + 100 - 80) / 150
    (a, b) = engine.running
    engine.abort(a)
    assert engine.kv_usage_frac == 100 / 150
    engine.abort(b)
    assert (engine.kv_usage_frac, engine.prefixes.leading_tokens(range(8))) == (0.0, 80)


def test_kv_from_elsewhere_is_waited_for_and_saves_the_prompt(make_profile: MakeProfile) -> None:
    engine = EngineModel(make_profile())
    engine.add(ModelRequest("a", 500, 2, kv_ready_s=0.3))
    assert engine.plan(0.0) is None
    assert len(engine.deferred) == 1
    assert run(engine) == [(0.321, "a"), (0.342, "a")]  # its last prompt token is computed in a decode step
    assert engine.counters.prefill_tokens == 1


def test_a_prompt_whose_kv_was_pulled_is_cached_from_its_first_token_on(make_profile: MakeProfile) -> None:
    engine = EngineModel(make_profile())
    engine.add(ModelRequest("a", 90, 2, block_hashes=(1, 2, 3), kv_ready_s=0.0))
    run(engine)
    engine.add(ModelRequest("b", 90, 1, block_hashes=(1, 2, 7)))
    assert run(engine) == [(0.08, "b")]  # 70 of 90 tokens are computed


def test_an_aborted_request_is_forgotten_while_others_decode(make_profile: MakeProfile) -> None:
    engine = EngineModel(make_profile(kv_tokens=200_000))
    engine.add(ModelRequest("stays", 10, 100_000))
    for number in range(1000):
        engine.add(gone := ModelRequest(str(number), 10, 50_000))
        for _ in range(2):
            step = engine.plan(0.0)
            assert step is not None
            engine.apply(step)
        engine.abort(gone)
    assert len(engine._ends) < 100


def test_no_request_is_admitted_into_a_block_that_another_needs_next(make_profile: MakeProfile) -> None:
    engine = EngineModel(make_profile(kv_tokens=100))
    engine.add(ModelRequest("a", 45, 40))
    step = engine.plan(0.0)
    assert step is not None
    engine.apply(step)
    engine.add(ModelRequest("b", 45, 1))  # 50 tokens would be free, but within ten steps "a" takes ten of them
    step = engine.plan(0.0)
    assert step is not None
    assert not step.chunks
    assert engine.counters.preemptions == 0


def test_without_room_the_newest_request_is_preempted_and_finishes_later(make_profile: MakeProfile) -> None:
    engine = EngineModel(make_profile(kv_tokens=100))
    engine.add(ModelRequest("a", 40, 20))
    engine.add(ModelRequest("b", 40, 20))
    outputs = run(engine)
    assert engine.counters.preemptions >= 1
    assert sum(name == "a" for _, name in outputs) == sum(name == "b" for _, name in outputs) == 20
    assert max(at for at, name in outputs if name == "a") < max(at for at, name in outputs if name == "b")


def test_requests_wait_for_a_place_in_the_batch_in_order(make_profile: MakeProfile) -> None:
    engine = EngineModel(make_profile(max_running=1))
    for name in "abc":
        engine.add(ModelRequest(name, 10, 2))
    assert [name for _, name in run(engine)] == ["a", "a", "b", "b", "c", "c"]


def test_a_request_that_can_never_fit_is_refused(make_profile: MakeProfile) -> None:
    with pytest.raises(ValueError, match="1100 tokens do not fit the engine's KV of 1000"):
        EngineModel(make_profile()).add(ModelRequest("a", 1000, 100))


def test_an_abort_frees_everything_wherever_the_request_is(make_profile: MakeProfile) -> None:
    engine = EngineModel(make_profile(max_running=1))
    requests = [ModelRequest("a", 50, 9), ModelRequest("b", 50, 9), ModelRequest("c", 50, 9, kv_ready_s=9.0)]
    for request in requests:
        engine.add(request)
    step = engine.plan(0.0)
    assert step is not None
    for request in requests:
        engine.abort(request)
    assert engine.apply(step) == ([], [])
    assert engine.plan(0.0) is None
    assert engine.kv_usage_frac == 0.0


@given(
    sizes=st.lists(st.tuples(st.integers(1, 150), st.integers(1, 40), st.booleans()), min_size=1, max_size=30),
    kv=st.integers(20, 60),
)
def test_every_request_gets_every_token_and_kv_never_exceeds_its_memory(
    make_profile: MakeProfile, sizes: list[tuple[int, int, bool]], kv: int
) -> None:
    engine = EngineModel(make_profile(kv_tokens=kv * 10))
    wanted = {}
    for index, (prompt, output, is_remote) in enumerate(sizes):
        if prompt + output <= kv * 10 - 10:
            hashes = tuple(range(prompt // 10))
            request = ModelRequest(str(index), prompt, output, hashes, kv_ready_s=0.01 * index if is_remote else None)
            engine.add(request)
            wanted[str(index)] = output
    now_s, outputs = 0.0, dict.fromkeys(wanted, 0)
    for _ in range(20_000):
        step = engine.plan(now_s)
        if step is None:
            ready_s = engine.next_ready_s()
            if ready_s is None:
                break
            assert ready_s > now_s
            now_s = ready_s
            continue
        assert sum(count for _, count in step.chunks) + sum(r.ends_at_step is not None for r in engine.running) <= 100
        now_s += step.duration_s
        _, ended = engine.apply(step)
        for request in ended:
            outputs[request.request_id] = engine.produced(request)
        assert 0.0 <= engine.kv_usage_frac <= 1.0
        assert len(engine.running) <= 8
    assert outputs == wanted
    assert engine.kv_usage_frac == 0.0
    assert engine.counters.output_tokens == sum(wanted.values())


def test_sms_are_active_for_the_arithmetic_of_a_prompt(make_profile: MakeProfile) -> None:
    _, engine = timeline(make_profile(), [(0.0, 250, 1, False)], most_steps=1)
    assert engine.counters.sm_active_s == pytest.approx(250 * 1.0 / 1000.0)


def timeline(
    profile: EngineProfile, arrivals: list[tuple[float, int, int, bool]], *, most_steps: int
) -> tuple[dict[str, tuple[float, float]], EngineModel]:
    """When each request got its first and its last token, with at most ``most_steps`` steps at a time."""
    engine = EngineModel(profile)
    coming = [
        (at_s, ModelRequest(str(index), prompt, output, kv_ready_s=at_s if is_remote else None))
        for index, (at_s, prompt, output, is_remote) in enumerate(arrivals)
    ]
    first: dict[str, float] = {}
    ends: dict[str, tuple[float, float]] = {}
    began_s, step = 0.0, None

    def advance(steps: int) -> None:
        assert step is not None
        began, ended = engine.apply(step, steps)
        assert 0.0 <= engine.kv_usage_frac <= 1.0
        first.update((request.request_id, began_s + step.first_s) for request in began)
        assert steps == step.steps or not ended
        ends.update((r.request_id, (first[r.request_id], began_s + step.time_s(steps))) for r in ended)

    while True:
        step = step or engine.plan(began_s, most_steps)
        if step is None and not coming:
            return ends, engine
        if coming and (step is None or coming[0][0] < began_s + step.duration_s):
            at_s, request = coming.pop(0)
            engine.add(request)
            if step is None:
                began_s = at_s
                continue
            step = step.until(step.begun_by(at_s - began_s))
            continue
        assert step is not None
        advance(step.steps)
        began_s, step = began_s + step.duration_s, None


arrivals_of = st.lists(
    st.tuples(st.floats(0.0, 0.4), st.integers(1, 120), st.integers(1, 60), st.booleans()), min_size=1, max_size=30
)


def in_order(gaps: list[tuple[float, int, int, bool]]) -> list[tuple[float, int, int, bool]]:
    """Arrivals from the gaps between them."""
    at_s, arrivals = 0.0, []
    for gap_s, *rest in gaps:
        at_s += gap_s
        arrivals.append((at_s, *rest))
    return arrivals


@given(gaps=arrivals_of, kv=st.sampled_from([200, 300, 500, 100_000]))
def test_many_steps_at_a_time_are_the_same_as_one_by_one(
    make_profile: MakeProfile, gaps: list[tuple[float, int, int, bool]], kv: int
) -> None:
    by_context = {
        "batch": [1, 100],
        "context_tokens": [50, 100, 150],
        "step_s": [[0.02, 0.03, 0.025], [0.1, 0.2, 0.3]],
    }
    memory = {"weight_bytes": 4e5, "peak_bytes_per_s": 1e8}  # the limit from about 20 requests on
    profile = make_profile(kv_tokens=kv, decode=by_context, memory=memory)
    one, stepped = timeline(profile, in_order(gaps), most_steps=1)
    many, leapt = timeline(profile, in_order(gaps), most_steps=1000)
    assert many.keys() == one.keys() and len(one) == len(gaps)
    for name, times in one.items():
        assert many[name] == pytest.approx(times, abs=1e-6)
    assert leapt.counters.steps == stepped.counters.steps
    assert leapt.counters.preemptions == stepped.counters.preemptions
    assert leapt.counters.output_tokens == stepped.counters.output_tokens
    assert leapt.counters.busy_s == pytest.approx(stepped.counters.busy_s)
    assert leapt.counters.sm_active_s == pytest.approx(stepped.counters.sm_active_s)


@given(gaps=arrivals_of, kv=st.integers(20, 60))
def test_many_steps_at_a_time_never_exceed_the_kv_memory(
    make_profile: MakeProfile, gaps: list[tuple[float, int, int, bool]], kv: int
) -> None:
    profile = make_profile(kv_tokens=kv * 10)
    ends, engine = timeline(profile, in_order(gaps), most_steps=1000)
    assert len(ends) == len(gaps)
    assert engine.kv_usage_frac == 0.0
    assert engine.queued_prefill_tokens == 0
    assert engine.counters.output_tokens == sum(output for _, _, output, _ in gaps)


def test_steps_that_ended_and_began_follow_from_the_time() -> None:
    step = Step(first_s=0.1, more_s=0.02, steps=4)  # 0.1, 0.22, 0.36, 0.52
    assert [step.ended_by(at) for at in (-1.0, 0.0, 0.09, 0.1, 0.21, 0.36, 0.5, 0.52, 9.0)] == [
        0,
        0,
        0,
        1,
        1,
        3,
        3,
        4,
        4,
    ]
    assert [step.begun_by(at) for at in (0.0, 0.05, 0.1, 0.15, 0.4, 9.0)] == [1, 1, 1, 2, 4, 4]
    assert step.after(3).time_s(1) == pytest.approx(0.16)


def test_a_preempted_request_goes_before_those_that_wait(make_profile: MakeProfile) -> None:
    engine = EngineModel(make_profile(kv_tokens=100, max_running=2))
    for name in "abc":
        engine.add(ModelRequest(name, 40, 20))
    while not engine.counters.preemptions:
        step = engine.plan(0.0)
        assert step is not None
        engine.apply(step)
    assert [request.request_id for request in engine.waiting] == ["b", "c"]
