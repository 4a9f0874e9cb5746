"""Settings of experts, of two half batches and of single operators: what engines can have, and what they cannot."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autoscale.operators.expert_parallel import chance_load, expert_load, redundant_experts
from autoscale.operators.experts import GroupedExperts
from autoscale.operators.graph import OperatorGraph
from autoscale.operators.kinds import Pass
from autoscale.operators.overlap import overlap
from autoscale.operators.role_settings import RoleEngines
from autoscale.operators.step_times import EngineSettings, StepTimes
from kvtransfer.topology import Role
from serve_app.operators.settings_config import RoleState, Setting

# Tokens of a step at which the ranks are compared: a chunk of prompts, and a batch that decodes.
_STEP_TOKENS = {Role.PREFILL: 2048.0, Role.DECODE: 64.0}
# Prompts of these steps are short, so that halves of a step have half of the prompts and half of the attention.
_PROMPT_TOKENS = 128
# Steps that are looked at for two half batches, tokens.
_OVERLAP_TOKENS = {Role.PREFILL: (256, 512, 1024, 2048, 4096, 8192), Role.DECODE: (16, 32, 64, 128, 256)}


def with_experts(
    state: RoleState, role: Role, kwargs: Mapping[str, Any], graph: OperatorGraph, skew: float | None
) -> RoleState:
    """The role with the uneven work of its ranks, if its config gives whole experts to ranks."""
    experts, ranks = graph.shape.experts, state.engine.parallel
    if experts is None or ranks == 1 or kwargs.get("enable_expert_parallel") is not True:
        return state
    is_even = kwargs.get("enable_eplb") is True
    load = expert_load(experts, _STEP_TOKENS[role], ranks, 1.0 if is_even else skew or 1.0)
    return replace(state, engine=replace(state.engine, expert_load=load))


def expert_settings(
    role: Role, before: EngineSettings, after: EngineSettings, graph: OperatorGraph, skew: float | None
) -> list[Setting]:
    """Copies of the busiest experts, where ranks hold whole experts and the load of experts is known to be uneven."""
    experts, ranks = graph.shape.experts, after.parallel
    if experts is None or skew is None or before.expert_load == 1.0 or ranks != before.parallel:
        return []
    even = chance_load(experts, _STEP_TOKENS[role], ranks)
    if before.expert_load <= even + 1e-9:
        return []
    copies = redundant_experts(ranks, skew)
    return [
        Setting(
            role=role,
            name="eplb_config",
            before=None,
            after={"num_redundant_experts": copies},
            expert_load=even,
            why=f"the busiest expert gets {skew:g} times the mean, so its rank works {before.expert_load:.2f} times "
            f"the mean; {copies} copies leave {even:.2f}",
        )
    ]


def unavailable(engines: RoleEngines, states: Mapping[Role, RoleState], skew: float | None) -> list[str]:
    """What an operator-level plan would have, and these engines cannot."""
    return [
        "single operators cannot be replicated: vLLM replicates whole engines",
        *_expert_notes(engines, states, skew),
        *(_overlap_note(engines, role, state.engine) for role, state in states.items()),
    ]


def _expert_notes(engines: RoleEngines, states: Mapping[Role, RoleState], skew: float | None) -> list[str]:
    graph = engines.graph
    if (experts := graph.shape.experts) is None:
        return []
    decode = states[Role.DECODE].engine
    parts = StepTimes(graph, engines.times, decode).parts(Pass(decoding=64, context_tokens=1024))
    name = next(each.name for each in graph.operators if isinstance(each, GroupedExperts))
    attention = sum(parts.get(each, 0.0) for each in ("qkv_proj", "attention", "o_proj"))
    notes = [
        f"experts take {parts[name] / sum(parts.values()):.0%} of a decode step of 64 requests, attention "
        f"{attention / sum(parts.values()):.0%}: experts would be spread over {parts[name] / attention:.1f} times the "
        "GPUs of attention. That needs data_parallel_size in one engine, and here each data-parallel rank is a replica "
        "of its own: not available"
    ]
    if decode.parallel > 1 and decode.expert_load == 1.0:
        load = chance_load(experts, _STEP_TOKENS[Role.DECODE], decode.parallel)
        notes.append(
            f"enable_expert_parallel is not written: with it the busiest of {decode.parallel} ranks does {load:.2f} "
            "times the mean by chance alone, and times of narrow experts, which it avoids, are not measured"
        )
    elif decode.expert_load > 1.0 and skew is None:
        notes.append("redundant experts are not chosen: give --expert-skew, the busiest expert's load over the mean")
    return notes


def _overlap_note(engines: RoleEngines, role: Role, settings: EngineSettings) -> str:
    """DBO hides exchanges between data-parallel ranks, of which a replica has one."""
    start = f"{role}: enable_dbo is not available: vLLM overlaps half batches only with data_parallel_size above 1"
    if settings.parallel == 1:
        return f"{start}; with one GPU there is no exchange to hide"

    def pass_of(tokens: int) -> Pass:
        if role is Role.DECODE:
            return Pass(decoding=tokens, context_tokens=1024)
        return Pass(prompts=tokens // _PROMPT_TOKENS, new_tokens=_PROMPT_TOKENS)

    steps = StepTimes(engines.graph, engines.times, settings)
    sizes = _OVERLAP_TOKENS[role]
    found = overlap(engines.graph, steps, pass_of, sizes)
    share = f"{found.exchange_frac:.0%} of a step of {sizes[-1]} tokens are exchanges"
    if found.threshold_tokens is None:
        return f"{start}; it would not help: {share}, and half batches take longer"
    name = f"dbo_{role}_token_threshold"
    return f"{start}; {share}. It would save {found.saved_frac:.0%} with {name} {found.threshold_tokens}"
