"""How near the simulator comes to the real stack on this machine: ``make sim-vs-real``.

One prefill and one decode replica serve on real engines. Their times are measured at the endpoint and fitted to two
slices of a real trace. Then another slice is replayed several times, and simulated. All measurements are stored beside
the figures, so that another model of load can be fitted to them without engines.
"""

import asyncio
import gzip
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
import typer
import yaml
from rich.console import Console
from rich.table import Table

from autoscale.engines.profile import EngineProfile
from autoscale.report import RequestRecord
from autoscale.traces.trace import TraceRequest, cut, load_trace, scale_trace
from router.config import RouterConfig
from tests.lab.bench.peers import CONFIG, Stack, settled
from tests.lab.truth.load_fit import Fit, at_the_edge, fitted
from tests.lab.truth.served_profile import Records, calibrate, served_profile

_ROOT = Path(__file__).parents[3]
_TRACE = _ROOT / "configs" / "traces" / "azure_conv_600s.csv.gz"
_PROFILE = _ROOT / "configs" / "profiles" / "cpu_tiny.json"
# Azure's chat trace, lengths / 8: slices of it, seconds.
FITTED_SLICES = ((0.0, 60.0), (120.0, 60.0))
REPLAYED_SLICE = (300.0, 60.0)
_LENGTH_FACTOR, _MOST_TOKENS = 0.125, 2048
# Goal: error of a figure, as a share; or half of the difference between real replays, if that is more.
GOAL_FRAC = 0.15

Figures = dict[str, float]


def trace_slice(start_s: float, duration_s: float) -> Sequence[TraceRequest]:
    """A slice with lengths that fit the tiny model."""
    whole = cut(load_trace(_TRACE), start_s, duration_s)
    return scale_trace(whole, time_factor=1.0, length_factor=_LENGTH_FACTOR, max_total_tokens=_MOST_TOKENS)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurements of real engines: their profile, the replays to fit to, and the replays to compare with."""

    profile: EngineProfile
    fitted: Sequence[Sequence[Records]]
    foretold: Sequence[Records]

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a file of ``write``."""
        stored = json.loads(gzip.decompress(path.read_bytes()))

        def replays(each: list[list[dict[str, Any]]]) -> list[Records]:
            return [[RequestRecord(**record) for record in records] for records in each]

        return cls(
            profile=EngineProfile.model_validate(stored["profile"]),
            fitted=[replays(each) for each in stored["fitted"]],
            foretold=replays(stored["foretold"]),
        )

    def write(self, path: Path) -> None:
        """Store everything, with the times of every request."""
        plain = {
            "profile": self.profile.model_dump(mode="json"),
            "fitted": [[[asdict(record) for record in records] for records in each] for each in self.fitted],
            "foretold": [[asdict(record) for record in records] for records in self.foretold],
        }
        path.write_bytes(gzip.compress(json.dumps(plain).encode(), mtime=0))


def figures(records: Records) -> Figures:
    """p50 and p90 of TTFT, TPOT and E2E, seconds."""
    ok = [record for record in records if record.error is None]
    values: dict[str, list[float]] = {
        "ttft": [r.ttft_s for r in ok if r.ttft_s is not None],
        "tpot": [r.tpot_s for r in ok if r.tpot_s is not None],
        "e2e": [r.last_token_s - r.sent_s for r in ok if r.last_token_s is not None],
    }
    return {f"{name}_p{q}_s": float(np.quantile(each, q / 100)) for name, each in values.items() for q in (50, 90)}


def foretold(
    fit: Fit, profile: EngineProfile, trace: Sequence[TraceRequest], router: RouterConfig, *, seeds: Sequence[int]
) -> Figures:
    """Medians over simulated replays, one for each seed, since the simulated machine varies as the real one does."""
    each = [figures(fit.simulated(profile, trace, router, seed)) for seed in seeds]
    return {name: statistics.median(one[name] for one in each) for name in each[0]}


def comparison(real: Sequence[Figures], simulated: Figures) -> dict[str, dict[str, Any]]:
    """For each figure: the real median and spread, the simulated value, its error and the allowed error."""
    result = {}
    for name, value in simulated.items():
        each = [replay[name] for replay in real]
        median = statistics.median(each)
        spread_frac = (max(each) - min(each)) / median
        allowed_frac = max(GOAL_FRAC, spread_frac / 2)
        error_frac = value / median - 1.0
        result[name] = {
            "real_median": median,
            "real": each,
            "real_spread_frac": spread_frac,
            "simulated": value,
            "error_frac": error_frac,
            "allowed_frac": allowed_frac,
            "is_within": abs(error_frac) <= allowed_frac,
            "is_within_goal": abs(error_frac) <= GOAL_FRAC,
        }
    return result


def measure(rounds: int, status: Console) -> Measured:
    """Measure one prefill and one decode engine."""
    fit_traces, trace = [trace_slice(*each) for each in FITTED_SLICES], trace_slice(*REPLAYED_SLICE)
    with status.status("starting one prefill and one decode engine") as line, Stack("tandem") as url:
        generator = settled(url, seed=11)

        def replayed(requests: Sequence[TraceRequest], what: str) -> list[RequestRecord]:
            line.update(what)
            return asyncio.run(generator.replay(requests))

        calibration = calibrate(generator, line.update)
        profile = served_profile(EngineProfile.load(_PROFILE), calibration)
        real = []
        fit_replays: list[list[Records]] = [[] for _ in fit_traces]
        for number in range(rounds):  # in turns, since the speed of the machine varies
            for requests, replays in zip(fit_traces, fit_replays, strict=True):
                replays.append(replayed(requests, f"replay {number + 1} of {rounds}: to fit to"))
            real.append(replayed(trace, f"replay {number + 1} of {rounds}: to foretell"))
    return Measured(profile=profile, fitted=fit_replays, foretold=real)


def main(
    rounds: Annotated[int, typer.Option(min=5, help="Real replays of each slice.")] = 5,
    out: Annotated[Path, typer.Option(help="Write the figures here.")] = Path("reports/sim_vs_real.json"),
    again: Annotated[
        Path | None,
        typer.Option(exists=True, help="Fit to the stored measurements of an earlier run, without engines."),
    ] = None,
) -> None:
    """Measure, fit, replay, simulate, print and write."""
    console, status = Console(), Console(stderr=True)
    router = RouterConfig.model_validate(
        yaml.safe_load(CONFIG.read_text())["applications"][0]["args"].get("router", {})
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    if again is None:
        measured = measure(rounds, status)
        measured.write(out.with_suffix(".requests.json.gz"))
    else:
        measured = Measured.load(again)
    fit_traces, trace = [trace_slice(*each) for each in FITTED_SLICES], trace_slice(*REPLAYED_SLICE)
    profile, real = measured.profile, measured.foretold
    with status.status("fitting"):
        fit = fitted(profile, list(zip(fit_traces, measured.fitted, strict=True)), router)
    found = comparison([figures(each) for each in real], foretold(fit, profile, trace, router, seeds=range(len(real))))
    console.print(_table(found))
    report = {
        "requests": len(trace),
        "failed": [sum(record.error is not None for record in each) for each in real],
        "fitted_slices_s": FITTED_SLICES,
        "replayed_slice_s": REPLAYED_SLICE,
        "fit": asdict(fit),
        "profile": profile.model_dump(mode="json"),
        "figures": found,
    }
    out.write_text(json.dumps(report, indent=1) + "\n")
    within, by_goal = (sum(each[name] for each in found.values()) for name in ("is_within", "is_within_goal"))
    console.print(
        f"{within} of {len(found)} within what is allowed, {by_goal} within {GOAL_FRAC:.0%}; written to {out}"
    )
    for name in at_the_edge(fit):
        console.print(f"[yellow]note:[/] {name} of the fit is the last value that was tried: {getattr(fit, name):g}")
    if failed := sum(record.error is not None for each in real for record in each):
        raise SystemExit(f"{failed} requests of the replays failed: the comparison is of the others")


def _table(found: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table("", "real, ms", "lowest to highest", "simulated, ms", "error", "allowed")
    for name, each in found.items():
        low, high = min(each["real"]) * 1e3, max(each["real"]) * 1e3
        colour = "green" if each["is_within"] else "yellow"
        table.add_row(
            name.removesuffix("_s").replace("_", " ").upper().replace(" P", " p"),
            f"{each['real_median'] * 1e3:.1f}",
            f"{low:.1f} to {high:.1f}",
            f"{each['simulated'] * 1e3:.1f}",
            f"[{colour}]{each['error_frac']:+.1%}[/]",
            f"{each['allowed_frac']:.1%}",
        )
    return table


if __name__ == "__main__":
    typer.run(main)
