"""What admission keeps of an endpoint's goodput when far too much is asked of it: ``make bench-overload``.

Emulated engines under real Ray Serve, and then real ones, with admission and without. The rate rises until the goodput
no longer does, or a tenth of what is asked is missed; the most goodput of either is that at saturation. Five times the
rate at which it was had is then sent to both. Real engines share the cores of this machine with the endpoint and the
load generator, so what refusing costs is taken from them.
"""

import asyncio
import json
import platform
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import psutil
import typer
from rich.console import Console
from rich.table import Table

from autoscale.report import RequestRecord, Slo
from autoscale.trace import TraceRequest, load_trace, scale_trace
from serve_app.bench import LoadGenerator
from serve_app.cluster import driver_environment
from serve_app.fixed_counts import ROOT, fixed_counts
from serve_app.output import write_file
from serve_app.precedence import ahead_of_others
from serve_app.processes import cpu_s, kind

_TRACE = ROOT / "configs" / "traces" / "azure_conv_600s.csv.gz"
_INGRESS = 2
_WARM_UP_S, _MEASURED_S, _REST_S = 20.0, 40.0, 10.0
_RATE_STEP, _OVERLOAD = 1.3, 5.0
_AT_ONCE_S = 0.05
# Of emulated engines, which take nothing of the endpoint's cores.
_KEPT_FRAC = 0.9
_FRONTS = {"haproxy": "proxy", "serve proxy": "proxy", "ingress": "ingress"}
# A rate that adds less than this to the goodput is beyond saturation, and so is one of which this share is missed: from
# there on goodput rises by the choice of requests that are easy to serve.
_RISES, _MISSED_FRAC = 1.03, 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """What is overloaded.

    Attributes:
        config: a Serve YAML among ``configs``.
        replicas: of each role.
        slo: what makes a request count, and what admission is told.
        length_factor: of the trace's prompts and answers.
        most_tokens: of a prompt and its answer; longer prompts are cut.
        first_rate: requests/s to begin with.
    """

    config: str
    replicas: int
    slo: Slo
    length_factor: float
    most_tokens: int
    first_rate: float


ENGINES = {
    "emulated": Engines(
        config="emulated",
        replicas=2,
        slo=Slo(ttft_s=1.5, tpot_s=0.05),
        length_factor=1.0,
        most_tokens=8000,
        first_rate=3.0,
    ),
    "real": Engines(
        config="cpu_tiny",
        replicas=1,
        slo=Slo(ttft_s=1.5, tpot_s=0.1),
        length_factor=0.125,
        most_tokens=1000,
        first_rate=16.0,
    ),
}


def document(engines: Engines, *, is_on: bool) -> dict[str, Any]:
    """The application with fixed counts, with admission or without."""
    served = fixed_counts(engines.config, engines.replicas)
    args = served["applications"][0]["args"]
    objectives = {"ttft_s": engines.slo.ttft_s, "tpot_s": engines.slo.tpot_s}
    args["ingress"] |= {"replicas": _INGRESS, "request_timeout_s": 60.0, "admission": objectives if is_on else {}}
    return served


def arrivals(engines: Engines, rate: float, seed: int) -> tuple[TraceRequest, ...]:
    """Requests at random times, so many per second on average, with lengths drawn from the Azure conversation trace."""
    rng = random.Random(seed)
    shapes = scale_trace(load_trace(_TRACE), length_factor=engines.length_factor, max_total_tokens=engines.most_tokens)
    at_s, sent = 0.0, []
    while (at_s := at_s + rng.expovariate(rate)) < _WARM_UP_S + _MEASURED_S:
        sent.append(replace(rng.choice(shapes), at_s=at_s))
    return tuple(sent)


def figures(slo: Slo, rate: float, records: Sequence[RequestRecord], busy: dict[str, float]) -> dict[str, Any]:
    """What became of the requests of the measured time."""
    # A generator that lacks cores sends late, and what it sends after its time is another load.
    measured = [one for one in records if _WARM_UP_S <= one.sent_s < _WARM_UP_S + _MEASURED_S]
    refused = [one for one in measured if one.error == "HTTP 429"]
    errors = {one.error for one in measured if one.error is not None} - {"HTTP 429"}
    row: dict[str, Any] = {
        "rate": rate,
        "requests": len(measured),
        "sent_per_s": len(measured) / _MEASURED_S,
        "goodput_requests_per_s": sum(map(slo.is_met, measured)) / _MEASURED_S,
        "refused": len(refused),
        "refused_within_50_ms": sum(_refused_s(one) < _AT_ONCE_S for one in refused),
        "failed": {error: sum(one.error == error for one in measured) for error in sorted(errors)},
        **{f"{name}_cores": cores for name, cores in busy.items()},
    }
    answered = [one for one in measured if one.error is None]
    taken = {
        "refused_s": list(map(_refused_s, refused)),
        "ttft_s": [one.ttft_s for one in answered if one.ttft_s is not None],
        "tpot_s": [one.tpot_s for one in answered if one.tpot_s is not None],
    }
    for name, values in taken.items():
        for share in (50, 90, 99):
            row[f"{name}_p{share}"] = float(np.percentile(values, share)) if values else None
    return row


def _refused_s(record: RequestRecord) -> float:
    return float("inf") if record.answered_s is None else record.answered_s - record.sent_s


async def _load(generator: LoadGenerator, sent: Sequence[TraceRequest]) -> tuple[list[RequestRecord], dict[str, float]]:
    async def busy() -> dict[str, float]:
        await asyncio.sleep(_WARM_UP_S)
        before = _fronts_cpu_s()
        await asyncio.sleep(_MEASURED_S)
        return {name: (cpu_s - before[name]) / _MEASURED_S for name, cpu_s in _fronts_cpu_s().items()}

    with ahead_of_others():
        records, cores = await asyncio.gather(generator.replay(sent), busy())
    return records, cores


def _fronts_cpu_s() -> dict[str, float]:
    """CPU seconds of the HTTP proxies, of the endpoint's replicas and of this load generator so far."""
    busy = {"proxy": 0.0, "ingress": 0.0, "client": cpu_s(psutil.Process())}
    for process in psutil.Process().children(recursive=True):
        if (part := _FRONTS.get(kind(process))) is not None:
            busy[part] += cpu_s(process)
    return busy


def run(name: str, engines: Engines, console: Console) -> dict[str, Any]:
    """Saturation, then five times its rate with admission and without."""
    from serve_app.sdk import deploy

    rates: dict[bool, list[dict[str, Any]]] = {}
    overload: dict[bool, dict[str, Any]] = {}
    best: dict[str, Any] | None = None
    for is_on, is_last in ((False, False), (True, True), (False, True)):
        with deploy(document(engines, is_on=is_on), on_status=lambda status: None) as app:
            generator = LoadGenerator(app.url, app.config.model.id, seed=1)

            def at(rate: float, is_on: bool = is_on, generator: LoadGenerator = generator) -> dict[str, Any]:
                sent = arrivals(engines, rate, seed=round(10 * rate))
                row = figures(engines.slo, rate, *asyncio.run(_load(generator, sent)))
                how = "with admission" if is_on else "without"
                console.print(f"{name}, {how}, {rate:.1f} requests/s: {_goodput(row):.2f} within the objectives")
                time.sleep(_REST_S)
                return row

            if is_on not in rates:
                rows = rates[is_on] = [at(engines.first_rate)]
                while not _is_saturated(rows):
                    rows.append(at(rows[-1]["rate"] * _RATE_STEP))
                best = max(rows if best is None else [best, *rows], key=_goodput)
            if is_last and best is not None:  # of both searches, so that both are asked the same
                overload[is_on] = at(best["rate"] * _OVERLOAD)
    assert best is not None
    return {
        "slo": {"ttft_s": engines.slo.ttft_s, "tpot_s": engines.slo.tpot_s},
        "saturation": best,
        "overload": overload[True],
        "overload_without_admission": overload[False],
        "goodput_kept_frac": _goodput(overload[True]) / _goodput(best),
        "rates_with_admission": rates[True],
        "rates_without_admission": rates[False],
    }


def _is_saturated(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether the last of these rates, which rise, is beyond what the engines can do."""
    last = rows[-1]
    if _goodput(last) < (1.0 - _MISSED_FRAC) * last["requests"] / _MEASURED_S:
        return True
    return len(rows) > 1 and _goodput(last) <= _RISES * _goodput(rows[-2])


def _goodput(row: dict[str, Any]) -> float:
    return float(row["goodput_requests_per_s"])


def show(name: str, result: dict[str, Any], console: Console) -> None:
    """The figures as a table."""
    table = Table(title=f"Overload on {name} engines", box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for column in ("saturation", "overload", "no admission"):
        table.add_column(column, justify="right", no_wrap=True)
    rows = [result[load] for load in ("saturation", "overload", "overload_without_admission")]

    def line(label: str, *keys: str, factor: float = 1.0) -> None:
        cells = [" / ".join(_number(row[key], factor) for key in keys) for row in rows]
        table.add_row(label, *cells)

    line("requests/s, asked for / sent", "rate", "sent_per_s")
    line("within the objectives, per s", "goodput_requests_per_s")
    line("refused, of requests", "refused", "requests")
    line("refused within 50 ms", "refused_within_50_ms")
    line("refused after, ms, p50 / p99", "refused_s_p50", "refused_s_p99", factor=1000.0)
    line("TTFT, s, p50 / p99", "ttft_s_p50", "ttft_s_p99")
    line("TPOT, ms, p50 / p99", "tpot_s_p50", "tpot_s_p99", factor=1000.0)
    line("cores of proxy / endpoint", "proxy_cores", "ingress_cores")
    console.print(table)
    console.print(f"goodput kept: {result['goodput_kept_frac']:.0%}")


def _number(value: float | None, factor: float) -> str:
    if value is None:
        return "-"
    shown = factor * value
    return (
        f"{shown:.0f}" if shown >= 100 or isinstance(value, int) else f"{shown:.2g}" if shown < 10 else f"{shown:.3g}"
    )


Kind = StrEnum("Kind", {name.upper(): name for name in ENGINES})  # type: ignore[misc]


def main(
    only: Annotated[Kind | None, typer.Option(help="These engines alone.")] = None,
    out: Path = Path("reports/overload.json"),
) -> None:
    """Measure, show and write."""
    driver_environment()
    console = Console()
    results: dict[str, Any] = {"machine": platform.platform()}
    for name, engines in ENGINES.items():
        if only is None or only == Kind(name):
            results[name] = run(name, engines, console)
            show(name, results[name], console)
            write_file(out, json.dumps(results, indent=2) + "\n", "--out")
    if any(result["goodput_kept_frac"] < _KEPT_FRAC for name, result in results.items() if name == "emulated"):
        console.print(f"failed: less than {_KEPT_FRAC:.0%} of the goodput at saturation is left")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
