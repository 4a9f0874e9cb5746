"""``tandem ratio``: the P/D ratio, engines and whole replicas for a load, or for the GPUs that there are."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from typer import Option, Typer

from autoscale.engines.candidates import (
    BUSY_FRAC,
    Need,
    check_alike,
    decode_candidates,
    gpu_type,
    prefill_candidates,
)
from autoscale.engines.lengths import Lengths
from autoscale.engines.profile import EngineProfile
from autoscale.engines.replica_counts import Fleet, fleet_of_means, fleets_for_load, fleets_in_gpus
from autoscale.traces.trace import load_trace
from serve_app.checks.numbers import above_0
from serve_app.checks.yaml_checks import config_errors
from serve_app.cli.ratio_view import Answer, as_document, counts_text, show
from serve_app.cli.sim_inputs import json_text
from serve_app.output import write_file

commands = Typer()


@commands.command()
@config_errors()
def ratio(
    prefill: Annotated[list[Path], Option(help="Profile of a prefill engine; repeat it for other sizes and types.")],
    decode: Annotated[list[Path], Option(help="Profile of a decode engine; repeat it for other sizes and types.")],
    input_tokens: Annotated[float | None, Option(help="Tokens of each prompt.")] = None,
    output_tokens: Annotated[float | None, Option(help="Tokens of each answer.")] = None,
    trace: Annotated[
        Path | None, Option(help="Instead of two lengths: a trace with the distribution (CSV or .gz).")
    ] = None,
    longest_input_tokens: Annotated[
        float | None, Option(help="Longest prompt that must be served; left out: the longest of the given ones.")
    ] = None,
    requests_per_s: Annotated[float | None, Option(help="The load: the fewest GPUs that carry it are found.")] = None,
    gpus: Annotated[
        str | None,
        Option(help="The GPUs: the highest load that they carry is found. 16, or H100=8,A100=8; CPU=3 without GPUs."),
    ] = None,
    cost: Annotated[
        str | None, Option(help="Cost of a GPU hour, such as H100=3.5,A100=1.8; left out: GPUs are counted.")
    ] = None,
    ttft_s: Annotated[float, Option(min=1e-3, help="Objective of the time to first token.")] = 1.0,
    tpot_s: Annotated[float, Option(min=1e-4, help="Objective of the time per output token.")] = 0.05,
    busy_frac: Annotated[
        float, Option(min=0.01, max=1.0, help="Share of its capacity for which a replica is planned.")
    ] = BUSY_FRAC,
    json_out: Annotated[Path | None, Option("--json", help="Write all figures to this JSON file.")] = None,
) -> None:
    """Compute the P/D ratio, the tensor parallel size of each role, and whole replicas, from engine profiles."""
    lengths = _lengths(input_tokens, output_tokens, trace)
    need = Need(
        lengths=lengths,
        longest_input_tokens=_longest(longest_input_tokens, lengths),
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        busy_frac=busy_frac,
    )
    engines = [EngineProfile.load(path) for path in prefill], [EngineProfile.load(path) for path in decode]
    check_alike([*engines[0], *engines[1]])
    prices = _by_type("--cost", cost, engines) if cost else {}
    room = _by_type("--gpus", gpus, engines) if gpus else {}
    answer = _answer(engines, need, above_0("--requests-per-s", requests_per_s), room, prices)
    show(answer, has_prices=bool(prices))
    write_file(json_out, json_text(as_document(answer)), "--json")


def _answer(
    engines: tuple[Sequence[EngineProfile], Sequence[EngineProfile]],
    need: Need,
    requests_per_s: float | None,
    gpus: Mapping[str, float],
    prices: Mapping[str, float],
) -> Answer:
    prefills, decodes = prefill_candidates(engines[0], need), decode_candidates(engines[1], need)
    if requests_per_s is None and not gpus:
        raise ValueError("neither a load nor GPUs are given: add --requests-per-s or --gpus")
    if part := next((kind for kind, count in gpus.items() if not count.is_integer()), None):
        raise ValueError(f"--gpus {part}={gpus[part]:g}: give a whole number of GPUs")
    whole_gpus = {kind: int(count) for kind, count in gpus.items()}
    in_gpus = fleets_in_gpus(prefills, decodes, need, whole_gpus, prices) if gpus else []
    fleets = in_gpus
    if requests_per_s is not None:
        fleets = fleets_for_load(prefills, decodes, need, requests_per_s, prices)
        if gpus:
            fleets = [fleet for fleet in fleets if _fits(fleet, whole_gpus)]
            if not fleets:
                most = in_gpus[0].carried_per_s
                raise ValueError(
                    f"--gpus {counts_text(whole_gpus)} carry {most:.3g} requests/s, and --requests-per-s is "
                    f"{requests_per_s:g}: give more GPUs, or leave --requests-per-s out"
                )
    load = fleets[0].carried_per_s if requests_per_s is None else requests_per_s
    of_means = fleet_of_means(fleets[0], need, load, prices)
    return Answer(need=need, prefills=prefills, decodes=decodes, fleets=fleets, of_means=of_means)


def _fits(fleet: Fleet, gpus: Mapping[str, int]) -> bool:
    return all(count <= gpus.get(kind, 0) for kind, count in fleet.gpus_by_type.items())


def _lengths(input_tokens: float | None, output_tokens: float | None, trace: Path | None) -> Lengths:
    if trace is not None:
        if input_tokens is not None or output_tokens is not None:
            raise ValueError("--trace gives the lengths: leave --input-tokens and --output-tokens out")
        return Lengths.of_requests((request.input_tokens, request.output_tokens) for request in load_trace(trace))
    if input_tokens is None or output_tokens is None:
        raise ValueError("no lengths are given: add --input-tokens and --output-tokens, or --trace")
    for option, tokens in (("--input-tokens", input_tokens), ("--output-tokens", output_tokens)):
        if not 1.0 <= tokens < math.inf:
            raise ValueError(f"{option} {tokens:g}: give a number of tokens, 1 or more")
    return Lengths.fixed(input_tokens, output_tokens)


def _longest(given: float | None, lengths: Lengths) -> float:
    if given is None:
        return lengths.longest_input_tokens
    if not lengths.longest_input_tokens <= given < math.inf:
        raise ValueError(
            f"--longest-input-tokens {given:g}: the longest of the given prompts has "
            f"{lengths.longest_input_tokens:.0f} tokens: give at least that"
        )
    return given


def _by_type(
    option: str, text: str, engines: tuple[Sequence[EngineProfile], Sequence[EngineProfile]]
) -> dict[str, float]:
    """Numbers by GPU type; a number alone is that of the only type."""
    types = list(dict.fromkeys(gpu_type(profile) for role in engines for profile in role))
    if "=" not in text:
        if len(types) > 1:
            raise ValueError(f"{option} {text}: the profiles have {', '.join(types)}: give each, as {types[0]}={text}")
        text = f"{types[0]}={text}"
    numbers: dict[str, float] = {}
    for part in text.split(","):
        kind, _, number = part.strip().partition("=")
        if kind in numbers:
            raise ValueError(f"{option} {text}: {kind} is given twice: give each type once")
        try:
            numbers[kind] = float(number)
        except ValueError:
            numbers[kind] = math.nan
        if not 0.0 < numbers[kind] < math.inf:
            raise ValueError(f"{option} {part.strip()}: give a type and a number above 0, as {types[0]}=8")
        if kind not in types:
            raise ValueError(f"{option} {part.strip()}: no profile has the type {kind}, they have {', '.join(types)}")
    return numbers
