"""Settings of engines by their operators: laws on small models, and hand-computed experts and overlaps."""

import json
from pathlib import Path

import pytest

from autoscale.operators.expert_parallel import chance_load, expert_load, redundant_experts
from autoscale.operators.gpu import gpu_named
from autoscale.operators.graph import operator_graph
from autoscale.operators.kinds import Pass
from autoscale.operators.model_shape import Experts
from autoscale.operators.overlap import overlap
from autoscale.operators.pair_load import PairLoad
from autoscale.operators.role_settings import RoleEngines
from autoscale.operators.step_times import EngineSettings, StepTimes
from autoscale.operators.tables import load_operator_tables
from autoscale.operators.times import OperatorTimes
from autoscale.traces.trace import TraceRequest

CONFIGS = Path(__file__).parents[3] / "configs" / "operators"
LOAD = PairLoad.of_requests(
    [TraceRequest(at_s=0.1 * number, input_tokens=1000, output_tokens=200) for number in range(100)]
)


@pytest.fixture(scope="module")
def times() -> OperatorTimes:
    return OperatorTimes(gpu_named("H100"), load_operator_tables(CONFIGS / "tables" / "H100"))


def engines(times: OperatorTimes, tpot_s: float, model: str = "qwen2-7b") -> RoleEngines:
    graph = operator_graph(json.loads((CONFIGS / "models" / f"{model}.json").read_text()))
    return RoleEngines(model, graph, times, LOAD, tpot_s)


def test_the_batch_of_decode_keeps_tpot_and_a_longer_objective_allows_more(times: OperatorTimes) -> None:
    base = EngineSettings(parallel=1, longest_tokens=2048)
    batches = []
    for tpot_s in (0.009, 0.02):
        chosen = engines(times, tpot_s).decode(base)
        step_s = chosen.profile.decode.seconds_for(chosen.settings.max_running, LOAD.lengths.context_tokens)
        assert step_s <= tpot_s
        assert chosen.settings.max_batch_tokens >= chosen.settings.max_running
        batches.append(chosen.settings.max_running)
    assert batches[0] < batches[1]
    assert batches[0] % 8 == 0


def test_prompts_on_decode_keep_tpot_beside_half_a_batch_and_never_the_whole_one(times: OperatorTimes) -> None:
    base = EngineSettings(parallel=1, longest_tokens=2048)
    asked = engines(times, 0.005, "qwen2-0.5b")
    settings = asked.decode(base).settings
    steps = StepTimes(asked.graph, times, settings)
    context, tokens = round(LOAD.lengths.context_tokens), settings.max_batch_tokens

    def seconds(tokens: int, decoding: int) -> float:
        return steps.seconds(Pass(prompts=1, new_tokens=tokens, decoding=decoding, context_tokens=context))

    assert seconds(tokens, settings.max_running // 2) <= 0.005 < seconds(2 * tokens, settings.max_running // 2)
    assert seconds(tokens, settings.max_running) > 0.005


def test_a_step_has_room_for_a_token_of_each_request(times: OperatorTimes) -> None:
    """512 prompt tokens would keep TPOT, but vLLM refuses a step with fewer tokens than requests."""
    settings = engines(times, 0.03).decode(EngineSettings(parallel=1, longest_tokens=2048)).settings
    assert 512 < settings.max_running <= settings.max_batch_tokens


def test_the_step_of_prefill_is_the_smallest_that_is_nearly_as_fast_as_the_best(times: OperatorTimes) -> None:
    base = EngineSettings(parallel=1, longest_tokens=2048)
    chosen = engines(times, 0.05).prefill(base)
    steps = StepTimes(engines(times, 0.05).graph, times, base)

    def rate(prompts: int, tokens: int) -> float:
        return prompts * tokens / steps.seconds(Pass(prompts=prompts, new_tokens=tokens))

    tokens = chosen.settings.max_batch_tokens
    assert rate(max(1, tokens // 1000), min(tokens, 1000)) >= 0.97 * rate(16, 1000)
    assert rate(1, 512) < 0.97 * rate(16, 1000)


EXPERTS = Experts(count=128, per_token=8, intermediate=768, shared_intermediate=0, sparse_layers=48)


def test_the_busiest_rank_by_chance_and_by_a_busy_expert() -> None:
    # 64 tokens x 8 choices on 4 ranks: the deviation of a rank's share is sqrt(3 / 512), the largest of four is 1.029.
    assert chance_load(EXPERTS, 64, 4) == pytest.approx(1.0 + 1.029 * (3 / 512) ** 0.5)
    assert chance_load(EXPERTS, 1e9, 4) == pytest.approx(1.0, abs=1e-4)
    # An expert with 5 times the mean adds four mean experts to a rank of 32.
    assert expert_load(EXPERTS, 1e9, 4, 5.0) == pytest.approx(1.125, abs=1e-4)


@pytest.mark.parametrize(("ranks", "skew", "copies"), [(4, 1.0, 0), (4, 1.5, 4), (4, 5.0, 4), (4, 5.5, 8), (8, 3.0, 8)])
def test_copies_of_experts_are_equally_many_on_each_rank(ranks: int, skew: float, copies: int) -> None:
    assert redundant_experts(ranks, skew) == copies


def test_redundant_experts_take_memory_of_kv_and_a_busy_rank_takes_time(times: OperatorTimes) -> None:
    found = engines(times, 0.05, "qwen3-30b-a3b")
    plain = EngineSettings(parallel=2, longest_tokens=2048, max_running=8)
    uneven = EngineSettings(parallel=2, longest_tokens=2048, max_running=8, expert_load=1.5)
    copies = EngineSettings(parallel=2, longest_tokens=2048, max_running=8, redundant_experts=8)
    one = found.profile(plain)
    assert found.profile(uneven).decode.seconds_for(8, 1000) > 1.1 * one.decode.seconds_for(8, 1000)
    lost = one.kv_tokens - found.profile(copies).kv_tokens
    # 8 of 128 experts: a sixteenth of 48 x 128 x 3 x 2,048 x 768 x 2 bytes, and 98,304 bytes of KV for each token.
    assert lost == pytest.approx(48 * 8 * 3 * 2048 * 768 * 2 / 98_304, abs=32)


def test_half_batches_hide_exchanges_of_large_steps_only(times: OperatorTimes) -> None:
    graph = engines(times, 0.05).graph
    alone, pair = (StepTimes(graph, times, EngineSettings(parallel=size)) for size in (1, 2))

    def prompt(tokens: int) -> Pass:
        return Pass(prompts=tokens // 32, new_tokens=32)

    found = overlap(graph, pair, prompt, (64, 8192))
    assert found.threshold_tokens == 8192  # the half of a small batch takes nearly as long as the whole
    assert 0.0 < found.saved_frac <= found.exchange_frac
    none = overlap(graph, alone, prompt, (64,))
    assert (none.threshold_tokens, none.exchange_frac) == (None, 0.0)
