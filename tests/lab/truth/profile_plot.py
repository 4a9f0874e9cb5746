"""A picture of a measured profile: its curves, the points that made them, and those that were left out."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Annotated

import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from autoscale.engines.profile import EngineProfile
from autoscale.engines.sampling import place_times
from deployments.profiler.pace import undisturbed_s
from deployments.profiler.points import Timing

_WIDTH_IN, _HEIGHT_IN, _DOTS_PER_IN = 11.0, 4.6, 130
_CURVE_POINTS = 200  # lengths at which a curve is drawn


def measured_times(path: Path, kind: str) -> dict[tuple[int, int], float]:
    """The seconds of each measured place of one kind, such as ``prefill``; a place is axis value and context."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[1:]]
    paces_s = defaultdict[str, list[float]](list)
    for row in rows:
        if row.get("pace_s") is not None:
            paces_s[row["at"][0]].append(row["pace_s"])
    times = defaultdict[tuple[int, int], list[float]](list)
    for row in rows:
        engine, of_kind, at, context_tokens, _ = row["at"]  # the last one is the round
        if of_kind == kind:
            timing = Timing(row["seconds"], row.get("pace_s"))
            times[at, context_tokens].append(undisturbed_s(timing, paces_s[engine]))
    return place_times(times)


def draw(profile: EngineProfile, points: Path) -> Figure:
    """Prompts to the left, decode steps to the right."""
    figure = Figure(figsize=(_WIDTH_IN, _HEIGHT_IN), layout="constrained")
    prompts, steps = figure.subplots(1, 2)
    first, last = profile.prefill.tokens[0], profile.prefill.tokens[-1]
    lengths = [first * (last / first) ** (number / _CURVE_POINTS) for number in range(_CURVE_POINTS + 1)]
    prompts.plot(lengths, [1e3 * profile.prefill.seconds_for(tokens) for tokens in lengths], color="C0")
    _scatter(prompts, [(at, 1e3 * s) for (at, _), s in measured_times(points, "prefill").items()], "o")
    _scatter(prompts, [(at, 1e3 * s) for (at, _), s in measured_times(points, "prefill_left_out").items()], "x")
    prompts.set(
        title="One prompt alone", xlabel="prompt, tokens", ylabel="time to first token, ms", xscale="log", yscale="log"
    )
    axis = profile.decode.context_tokens
    for number, batch in enumerate(profile.decode.batch):
        row = [1e3 * profile.decode.seconds_for(batch, context) for context in axis]
        steps.plot(axis, row, color=f"C{number % 10}", label=f"{batch}")
    _scatter(steps, [(context, 1e3 * s) for (_, context), s in measured_times(points, "decode").items()], "o")
    _scatter(steps, [(context, 1e3 * s) for (_, context), s in measured_times(points, "decode_left_out").items()], "x")
    steps.set(
        title="One decode step", xlabel="context of each request, tokens", ylabel="ms", xscale="log", yscale="log"
    )
    steps.legend(title="batch", fontsize="small", loc="upper left")
    figure.suptitle(f"{profile.name}: lines by the profile; dots measured for it, crosses left out to test it")
    return figure


def _scatter(axes: Axes, points: list[tuple[int, float]], marker: str) -> None:
    if points:
        axes.plot(*zip(*points, strict=True), color="black", marker=marker, linestyle="none", zorder=3, markersize=5)


def main(
    profile: Annotated[Path, typer.Argument(help="A profile that `tandem profile` wrote.")],
    out: Annotated[Path, typer.Option(help="The picture.")] = Path("reports/profile.png"),
) -> None:
    """Draw the profile with the points beside it (NAME.points.jsonl)."""
    out.parent.mkdir(parents=True, exist_ok=True)
    draw(EngineProfile.load(profile), profile.with_suffix(".points.jsonl")).savefig(out, dpi=_DOTS_PER_IN)
    typer.echo(f"{out}: written")


if __name__ == "__main__":
    typer.run(main)
