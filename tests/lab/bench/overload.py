"""Share of an endpoint's goodput that admission saves under five times too much load: ``make bench-overload``.

Emulated engines run under real Ray Serve, and then real ones, with admission and without. The rate rises until the
goodput stops rising, or until a tenth of the requests miss the objectives. The highest goodput of both is that at
saturation. Five times its rate is then sent to both. Real engines share the cores of this machine with the endpoint and
the load generator, so refusing requests takes time from them.
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
from autoscale.traces.trace import TraceRequest, load_trace, scale_trace
from serve_app.load.generator import LoadGenerator
from serve_app.local.cluster import driver_environment
from serve_app.output import write_file
from tests.lab.stand.fixed_counts import ROOT, fixed_counts
from tests.lab.stand.precedence import ahead_of_others
from tests.lab.stand.processes import cpu_s, kind

_TRACE = ROOT / "configs" / "traces" / "azure_conv_600s.csv.gz"
# Replicas of the endpoint.
_INGRESS = 2
# Parts of a load, in seconds: not measured, measured, and the rest after it.
_WARM_UP_S, _MEASURED_S, _REST_S = 20.0, 40.0, 10.0
# The rate rises by this factor.
_RATE_STEP = 1.3
# The overload, as a multiple of the rate at saturation.
_OVERLOAD = 5.0
# A refusal within this time is counted as quick, in seconds.
_AT_ONCE_S = 0.05
# Goal: share of the goodput that is left on emulated engines, which take nothing of the endpoint's cores.
_KEPT_FRAC = 0.9
_FRONTS = {"haproxy": "proxy", "serve proxy": "proxy", "ingress": "ingress"}
# A rate is beyond saturation if the goodput rises by less than this factor.
_RISES = 1.03
# It also is if this share of requests misses the objectives: from there on only easy requests raise the goodput.
_MISSED_FRAC = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Engines:
    """The engines that are overloaded.

    Attributes:
        config: a Serve YAML among ``configs``.
        replicas: replicas of each role.
        slo: objectives of goodput and of admission.
        length_factor: multiplies the lengths of the trace.
        most_tokens: longest prompt and answer together; longer prompts are cut.
        first_rate: first rate, in requests/s.
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
    """Requests at random times at a mean rate (requests/s), with lengths drawn from the Azure conversation trace."""
    rng = random.Random(seed)
    shapes = scale_trace(load_trace(_TRACE), length_factor=engines.length_factor, max_total_tokens=engines.most_tokens)
    at_s, sent = 0.0, []
    while (at_s := at_s + rng.expovariate(rate)) < _WARM_UP_S + _MEASURED_S:
        sent.append(replace(rng.choice(shapes), at_s=at_s))
    return tuple(sent)


def figures(slo: Slo, rate: float, records: Sequence[RequestRecord], busy: dict[str, float]) -> dict[str, Any]:
    """Figures of the requests of the measured time."""
    # A generator that lacks cores sends late; requests after the measured time do not count.
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
            if is_last and best is not None:  # best of both searches, so that both get the same rate
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
    """Whether the last of these rising rates is more than the engines can serve."""
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

    line("requests/s, wanted / sent", "rate", "sent_per_s")
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
