"""The command that replays a trace on a virtual cluster under several policies, beside bounds.

A bound is a plan that no policy can have, such as that of the oracle, which knows the whole trace.
"""

from pathlib import Path
from typing import Annotated

from typer import Option, Typer

from autoscale.sim.checks import check_trace
from autoscale.sim.config import BOUNDS, SimConfig
from autoscale.sim.simulations import run_study
from autoscale.sim.study import is_smallest_static
from serve_app.checks.yaml_checks import config_errors
from serve_app.cli.sim_inputs import (
    ConfigFile,
    Duration,
    Jobs,
    JsonOut,
    RateScale,
    Start,
    Strict,
    TracePath,
    check_oracle,
    json_text,
    load_part,
    names_in,
    progress_bar,
    rate_scale_of,
    settings_of,
    worker_pool,
)
from serve_app.cli.sim_report import document, html_page, print_notes, print_whole, summary_table
from serve_app.output import write_file

commands = Typer()


@commands.command()
@config_errors()
def simulate(
    trace: TracePath,
    policy: Annotated[str, Option(help="Policies, separated by commas: names in the config, or kinds.")] = "default",
    config: ConfigFile = None,
    rate_scale: RateScale = "1",
    time_scale: Annotated[float, Option(min=1e-6, help="Multiplies the trace's times: 2 halves the rate.")] = 1.0,
    start: Start = 0.0,
    duration: Duration = None,
    seeds: Annotated[
        int, Option(min=1, max=100, help="Number of runs, each with another seed; above 1, intervals are shown.")
    ] = 1,
    seed: Annotated[int, Option(min=0, help="The first seed.")] = 0,
    jobs: Jobs = None,
    is_strict: Strict = False,
    json_out: JsonOut = None,
    html_out: Annotated[Path | None, Option("--html", help="Write a page with pictures to this file.")] = None,
) -> None:
    """Replay a trace on a virtual cluster under each policy, and under the oracle and other bounds."""
    config, settings = settings_of(config, {"--json": json_out, "--html": html_out}, {"--trace": trace})
    names = _policy_names(policy, settings)
    scale = rate_scale_of(rate_scale)
    requests = load_part(trace, start, duration, time_scale)
    check_trace(settings, requests, trace, is_strict=is_strict)
    with worker_pool(jobs) as pool, progress_bar() as progress:
        task = progress.add_task("oracle", total=None)

        def on_step(line: str, done: int, total: int | None) -> None:
            progress.update(task, description=line, completed=done, total=total)

        study = run_study(
            settings, requests, names, rate_scale=scale, seeds=range(seed, seed + seeds), pool=pool, on_step=on_step
        )
    print_whole(summary_table(study))
    print_notes(study.flags)
    report = document(study, trace=trace, config=config, start_s=start, duration_s=duration, time_scale=time_scale)
    write_file(json_out, json_text(report), "--json")
    if html_out is not None:
        write_file(html_out, html_page(study, report), "--html")
    check_oracle(study.beat_the_oracle)  # last, so that the files are written even if this fails


def _policy_names(policy: str, settings: SimConfig) -> list[str]:
    """The policies of --policy. Raises ValueError: a name belongs to a bound, or to no policy."""
    names = names_in(policy)
    if bounds := set(BOUNDS) & set(names):
        raise ValueError(f"--policy {sorted(bounds)[0]}: is shown beside every policy anyway; leave it out")
    for name in names:
        if not is_smallest_static(settings, name):  # the counts of that policy come from the study, not from settings
            settings.autoscale_config(name)  # raises ValueError for an unknown name
    return names
