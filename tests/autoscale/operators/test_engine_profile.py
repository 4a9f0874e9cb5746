"""Profiles from operators: each step is the sum of its operators."""

from dataclasses import replace

import pytest

from autoscale.engines.engine_model import EngineModel
from autoscale.engines.engine_step import ModelRequest
from autoscale.engines.profile import EngineProfile
from autoscale.operators.engine_profile import MemoryShortageError, engine_profile, kv_tokens
from autoscale.operators.gpu import GPUS
from autoscale.operators.graph import operator_graph
from autoscale.operators.kinds import Pass
from autoscale.operators.step_times import EngineSettings, HostTimes, ParallelSizeError, StepTimes
from autoscale.operators.tables import OperatorTables
from autoscale.operators.times import OperatorTimes
from tests.autoscale.operators.test_graph import config_of

LLAMA = operator_graph(config_of("llama-3.1-8b"))
TIMES = OperatorTimes(GPUS["H100"], OperatorTables.empty())
SETTINGS = EngineSettings(
    parallel=1, max_batch_tokens=1024, max_running=8, longest_tokens=4096, host=HostTimes(step_s=0.001)
)


@pytest.fixture(scope="module")
def profile() -> EngineProfile:
    return engine_profile("test", "llama-3.1-8b", LLAMA, TIMES, SETTINGS)


def test_a_step_is_the_sum_of_its_operators_and_the_host() -> None:
    step = Pass(decoding=4, context_tokens=100)
    working = [each for each in LLAMA.operators if TIMES.time(each, step, 1).seconds]
    wanted = 0.001 + sum(each.copies * TIMES.time(each, step, 1).seconds for each in working)
    assert StepTimes(LLAMA, TIMES, SETTINGS).seconds(step) == pytest.approx(wanted)  # rounding


def test_tables_of_single_kernels_lack_the_gaps_between_them() -> None:
    rtx = GPUS["RTX-PRO-6000"]
    times = OperatorTimes(rtx, OperatorTables.empty())
    gapless = OperatorTimes(replace(rtx, kernel_gap_s=0.0), OperatorTables.empty())
    step = Pass(decoding=1, context_tokens=100)
    gaps_s = StepTimes(LLAMA, times, SETTINGS).seconds(step) - StepTimes(LLAMA, gapless, SETTINGS).seconds(step)
    # 32 layers of 9 operators without exchanges, and embedding, last norm, head and sampler.
    assert gaps_s == pytest.approx((32 * 9 + 4) * 1e-6)


def test_a_host_may_take_time_for_each_request() -> None:
    slow = replace(SETTINGS, host=HostTimes(step_s=0.001, request_s=0.01))
    step = Pass(prompts=2, new_tokens=7, decoding=3, context_tokens=9)
    more_s = StepTimes(LLAMA, TIMES, slow).seconds(step) - StepTimes(LLAMA, TIMES, SETTINGS).seconds(step)
    assert more_s == pytest.approx(0.05)  # rounding


def test_decode_points_are_steps(profile: EngineProfile) -> None:
    steps = StepTimes(LLAMA, TIMES, SETTINGS)
    assert profile.decode.batch == (1, 2, 4, 8)
    assert profile.decode.seconds_for(8, 4096) == pytest.approx(steps.seconds(Pass(decoding=8, context_tokens=4096)))


def test_a_long_prompt_is_computed_in_chunks(profile: EngineProfile) -> None:
    steps = StepTimes(LLAMA, TIMES, SETTINGS)
    first, second = (Pass(prompts=1, new_tokens=1024, past_tokens=past) for past in (0, 1024))
    assert profile.prefill.seconds_for(2048) == pytest.approx(steps.seconds(first) + steps.seconds(second))


def test_a_mixed_step_takes_what_its_operators_take(profile: EngineProfile) -> None:
    """The engine model adds a chunk to a decode step; at the sizes of which the surface is the mean, it is near."""
    steps, engine = StepTimes(LLAMA, TIMES, SETTINGS), EngineModel(profile)
    for number in range(4):
        engine.add(ModelRequest(f"d{number}", 64, 50))
    engine.apply(engine.plan(0.0))  # type: ignore[arg-type]
    engine.add(ModelRequest("p", 512, 50))
    step = engine.plan(0.0)
    assert step is not None
    wanted = steps.seconds(Pass(prompts=1, new_tokens=512, decoding=4, context_tokens=64))
    # The surface is the mean over prompts of 256, 512 and 1,024 tokens.
    assert step.first_s == pytest.approx(wanted, rel=0.03)


def test_kv_is_what_the_weights_leave() -> None:
    room_bytes = 80e9 * 0.9 - 3 * 1024**3 - 2 * 8_030_261_248
    assert kv_tokens(LLAMA, 80e9, SETTINGS) == int(room_bytes / 131_072) // 16 * 16


def test_copied_kv_heads_halve_the_tokens() -> None:
    qwen = operator_graph(config_of("qwen3-30b-a3b"))  # 4 KV heads on 8 ranks
    room_bytes = 8 * (80e9 * 0.9 - 3 * 1024**3) - qwen.weight_bytes
    wanted = int(room_bytes / (2 * 2 * 48 * 4 * 128 * 2)) // 16 * 16
    assert kv_tokens(qwen, 80e9, EngineSettings(parallel=8)) == wanted


def test_weights_beyond_the_memory_are_named() -> None:
    with pytest.raises(MemoryShortageError, match=r"16.1 GB of weights leave no room for KV on 1 GPUs of 20.0 GB"):
        kv_tokens(LLAMA, 20e9, SETTINGS)


def test_a_size_that_does_not_divide_the_heads_is_named() -> None:
    with pytest.raises(ParallelSizeError, match="cannot be divided over 3 GPUs: its shape allows 1, 2, 4, 8"):
        StepTimes(LLAMA, TIMES, EngineSettings(parallel=3))


def test_the_profile_says_that_it_is_computed(profile: EngineProfile) -> None:
    assert {source.kind for source in profile.sources} == {"derived", "assumed"}
    (speed,) = [source for source in profile.sources if source.part == "prefill, decode"]
    assert "roofline: " in speed.text
    assert "qkv_proj" in speed.text
    assert EngineProfile.model_validate_json(profile.model_dump_json()) == profile


def test_flops_count_weights_that_compute_a_token(profile: EngineProfile) -> None:
    assert profile.flops_per_token == 2 * (8_030_261_248 - 128256 * 4096)
    mixtral = operator_graph(config_of("mixtral-8x7b"))
    two = EngineSettings(parallel=2, max_running=2, longest_tokens=128)
    active = engine_profile("m", "m", mixtral, TIMES, two).flops_per_token / 2
    # Mixtral's card says 12.9 billion active parameters; the embedding, 0.13 billion, computes nothing.
    assert active / 1e9 == pytest.approx(12.75, abs=0.02)
