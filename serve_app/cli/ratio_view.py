"""What ``tandem ratio`` prints, each figure with its equation in DOPD section IV, and its JSON file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from autoscale.engines.candidates import Candidate, Need, gpu_type, gpus_each
from autoscale.engines.capacity import Limit
from autoscale.engines.optimal_ratio import OptimalRatio
from autoscale.engines.profile import EngineProfile
from autoscale.engines.replica_counts import Fleet
from serve_app.cli.terminal import console, figures_table

# Other pairs of engines that are shown.
_MOST_OTHERS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the command found.

    Attributes:
        prefills: the prefill engines, with the reason of those that are not fit.
        decodes: as ``prefills``, of decode.
        fleets: whole replicas of each fit pair of engines, the best first.
        of_means: what the mean lengths alone ask for, with the engines of the best.
    """

    need: Need
    prefills: list[Candidate]
    decodes: list[Candidate]
    fleets: list[Fleet]
    of_means: Fleet


def show(answer: Answer, *, has_prices: bool) -> None:
    """Print the answer."""
    request = answer.fleets[0].ratio.request
    lines = [
        f"{request.input_tokens:,.0f} + {request.output_tokens:,.0f} tokens in the mean; longest prompt "
        f"{answer.need.longest_input_tokens:,.0f}",
        f"a request in a batch has {request.context_tokens:,.0f} tokens of KV: E[I O]/E[O] + E[O^2]/(2 E[O]) (Eq. 13)",
        *_refusals("prefill", answer.prefills),
        *_refusals("decode", answer.decodes),
        _engine_text("prefill", answer.fleets[0].prefill),
        _engine_text("decode", answer.fleets[0].decode),
    ]
    _print(lines)
    console.print(_fleet_table(answer.fleets[0]), highlight=False)
    _print(_result(answer, has_prices) + _others(answer) + _uncertain(answer.fleets[0]))


def counts_text(gpus: Mapping[str, int]) -> str:
    """GPUs by type, as an option has them."""
    return ",".join(f"{kind}={count}" for kind, count in gpus.items())


def _print(lines: Sequence[str]) -> None:
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _refusals(role: str, candidates: Sequence[Candidate]) -> list[str]:
    return [f"not {each.profile.name} for {role}: {each.refusal}" for each in candidates if each.refusal]


def _fleet_table(fleet: Fleet) -> Table:
    ratio = fleet.ratio
    table = figures_table("", ("prefill", "decode"))
    for name, prefill, decode in (
        ("limited by (Eq. 11-13)", Limit.PREFILL_COMPUTE, ratio.decode_limit),
        ("T_p = E[T_p(I)] (Eq. 6-8), t_d", f"{ratio.request.prefill_s:.4g} s", f"{ratio.decode_step_s:.4g} s"),
        ("at once, cc_d (Eq. 13)", "1", ratio.decode_concurrency),
        (
            f"one serves 1/T_p, {_decode_formula(ratio)}",
            f"{ratio.prefill_requests_per_s:.3g}/s",
            f"{ratio.decode_requests_per_s:.3g}/s",
        ),
        ("needed, not rounded", f"{fleet.prefill_needed:.2f}", f"{fleet.decode_needed:.2f}"),
        ("whole replicas", fleet.prefill_replicas, fleet.decode_replicas),
        (
            "GPUs",
            fleet.prefill_replicas * gpus_each(fleet.prefill),
            fleet.decode_replicas * gpus_each(fleet.decode),
        ),
    ):
        table.add_row(name.replace("[", "\\["), str(prefill), str(decode))
    return table


def _decode_formula(ratio: OptimalRatio) -> str:
    """What limits the requests per second of a decode replica."""
    return "link/(ISL x KV per token)" if ratio.decode_limit is Limit.LINK else "cc_d/(t_d OSL)"


def _ratio_formula(ratio: OptimalRatio) -> str:
    """The formula of the ratio for what limits decode."""
    if ratio.decode_limit is Limit.LINK:
        return "T_p times the requests per second that the hand-over link carries"
    return "cc_d T_p / (t_d OSL) (Eq. 14)"


def _engine_text(role: str, profile: EngineProfile) -> str:
    return f"{role}: {profile.name}, {gpus_each(profile)} {gpu_type(profile)} for each replica"


def _result(answer: Answer, has_prices: bool) -> list[str]:
    """The ratio, and what the mean lengths alone would have given."""
    best, means = answer.fleets[0], answer.of_means
    size = f"GPUs {counts_text(best.gpus_by_type)}"
    size += f", {best.cost_per_hour:g} per hour" if has_prices else ""
    change = means.ratio.prefill_per_decode / best.ratio.prefill_per_decode - 1.0
    return [
        f"P/D ratio {best.ratio.prefill_per_decode:.2f} = {_ratio_formula(best.ratio)}",
        f"in whole replicas {best.prefill_replicas}P{best.decode_replicas}D: {best.carried_per_s:.3g} requests/s at "
        f"{answer.need.busy_frac:g} of the capacity; {size}",
        f"the mean lengths alone: P/D ratio {means.ratio.prefill_per_decode:.2f} ({change:+.1%}), "
        f"{means.prefill_replicas}P{means.decode_replicas}D, which carry {means.carried_per_s:.3g} requests/s of these "
        f"lengths ({means.carried_per_s / best.carried_per_s - 1.0:+.1%})",
    ]


def _others(answer: Answer) -> list[str]:
    return [
        f"or {fleet.prefill.name} and {fleet.decode.name}: {fleet.prefill_replicas}P{fleet.decode_replicas}D, "
        f"{fleet.carried_per_s:.3g} requests/s, GPUs {counts_text(fleet.gpus_by_type)}"
        for fleet in answer.fleets[1 : 1 + _MOST_OTHERS]
    ]


def _uncertain(fleet: Fleet) -> list[str]:
    """What lies beyond the points of a profile, where its last lines go on."""
    ratio, lines = fleet.ratio, list[str]()
    remedy = "its last lines go on; measure there with `tandem profile` before you rely on it"
    if ratio.request.beyond_frac:
        tokens = fleet.prefill.prefill.tokens
        lines.append(
            f"{ratio.request.beyond_frac:.1%} of the prompts lie beyond the points of {fleet.prefill.name}, "
            f"{tokens[0]} to {tokens[-1]} tokens: {remedy}"
        )
    if not fleet.decode.decode.covers(ratio.decode_concurrency, ratio.request.context_tokens):
        lines.append(
            f"a batch of {ratio.decode_concurrency} with {ratio.request.context_tokens:.0f} tokens of context lies "
            f"beyond the points of {fleet.decode.name}: {remedy}"
        )
    return lines


def as_document(answer: Answer) -> dict[str, Any]:
    """All figures, for --json."""
    return {
        "mean_request": {
            "input_tokens": answer.need.lengths.input_tokens,
            "output_tokens": answer.need.lengths.output_tokens,
            "context_tokens": answer.need.lengths.context_tokens,
        },
        "longest_input_tokens": answer.need.longest_input_tokens,
        "candidates": {
            role: [
                {"engine": each.profile.name, "longest_s": each.longest_s, "refusal": each.refusal}
                for each in candidates
            ]
            for role, candidates in (("prefill", answer.prefills), ("decode", answer.decodes))
        },
        "best": _fleet_document(answer.fleets[0]),
        "mean_alone": _fleet_document(answer.of_means),
        "others": [_fleet_document(fleet) for fleet in answer.fleets[1:]],
    }


def _fleet_document(fleet: Fleet) -> dict[str, Any]:
    ratio = fleet.ratio
    return {
        "pd_ratio": ratio.prefill_per_decode,
        "is_extrapolated": ratio.is_extrapolated,
        "prefill": {
            "engine": fleet.prefill.name,
            "replicas": fleet.prefill_replicas,
            "needed_replicas": fleet.prefill_needed,
            "limit": Limit.PREFILL_COMPUTE,
            "requests_per_s_of_one": ratio.prefill_requests_per_s,
        },
        "decode": {
            "engine": fleet.decode.name,
            "replicas": fleet.decode_replicas,
            "needed_replicas": fleet.decode_needed,
            "limit": ratio.decode_limit,
            "requests_per_s_of_one": ratio.decode_requests_per_s,
            "concurrency": ratio.decode_concurrency,
            "step_s": ratio.decode_step_s,
        },
        "carried_requests_per_s": fleet.carried_per_s,
        "gpus": fleet.gpus_by_type,
        "cost_per_hour": fleet.cost_per_hour,
    }
