"""What admission keeps of an endpoint's goodput when far too much is asked of it: ``make bench-overload``.

Emulated engines under real Ray Serve, with admission and without. The rate rises until the goodput no longer does; the
most goodput of either is that at saturation. Five times the rate at which it was had is then sent to both.
"""

import asyncio
import json
import platform
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import typer
from rich.console import Console
from rich.table import Table

from autoscale.report import RequestRecord, Slo
from autoscale.trace import TraceRequest, load_trace
from serve_app.bench import LoadGenerator
from serve_app.cluster import driver_environment
from serve_app.validate import load_serve_yaml

_ROOT = Path(__file__).parent.parent
_CONFIG = _ROOT / "configs" / "emulated.yaml"
_TRACE = _ROOT / "configs" / "traces" / "azure_conv_600s.csv.gz"
_PREFILL, _DECODE, _INGRESS = 2, 2, 2
_SLO = Slo(ttft_s=1.5, tpot_s=0.05)
_MOST_TOKENS = 8000
_WARM_UP_S, _MEASURED_S, _REST_S = 20.0, 40.0, 10.0
_FIRST_RATE, _RATE_STEP, _OVERLOAD = 2.0, 1.3, 5.0
_AT_ONCE_S = 0.05
# A rate that adds less than this to the goodput is beyond saturation.
_RISES = 1.03


def document(*, is_on: bool) -> dict[str, Any]:
    """The emulated application with fixed counts, with admission or without."""
    served = load_serve_yaml(_CONFIG)
    application = served["applications"][0]
    del application["autoscaling_policy"]
    args = application["args"]
    del args["autoscale"]
    for role, count in (("prefill", _PREFILL), ("decode", _DECODE)):
        del args["groups"][0][role]["max_replicas"]
        args["groups"][0][role]["replicas"] = count
    objectives = {"ttft_s": _SLO.ttft_s, "tpot_s": _SLO.tpot_s}
    args["ingress"] |= {"replicas": _INGRESS, "request_timeout_s": 60.0, "admission": objectives if is_on else {}}
    return served


def arrivals(rate: float, seed: int) -> tuple[TraceRequest, ...]:
    """Requests at random times, so many per second on average, with lengths drawn from the Azure conversation trace."""
    rng = random.Random(seed)
    shapes = [one for one in load_trace(_TRACE) if one.input_tokens + one.output_tokens <= _MOST_TOKENS]
    at_s, sent = 0.0, []
    while (at_s := at_s + rng.expovariate(rate)) < _WARM_UP_S + _MEASURED_S:
        sent.append(replace(rng.choice(shapes), at_s=at_s))
    return tuple(sent)


def figures(rate: float, records: Sequence[RequestRecord], busy: dict[str, float]) -> dict[str, Any]:
    """What became of the requests of the measured time."""
    measured = [one for one in records if one.sent_s >= _WARM_UP_S]
    refused = [one for one in measured if one.error == "HTTP 429"]
    errors = {one.error for one in measured if one.error is not None} - {"HTTP 429"}
    row: dict[str, Any] = {
        "rate": rate,
        "requests": len(measured),
        "goodput_requests_per_s": sum(map(_SLO.is_met, measured)) / _MEASURED_S,
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


async def _load(generator: LoadGenerator, rate: float, seed: int) -> tuple[list[RequestRecord], dict[str, float]]:
    async def busy() -> dict[str, float]:
        await asyncio.sleep(_WARM_UP_S)
        before = _fronts_cpu_s()
        await asyncio.sleep(_MEASURED_S)
        return {name: (cpu_s - before[name]) / _MEASURED_S for name, cpu_s in _fronts_cpu_s().items()}

    records, cores = await asyncio.gather(generator.replay(arrivals(rate, seed)), busy())
    return records, cores


def _fronts_cpu_s() -> dict[str, float]:
    """CPU seconds of the HTTP proxies, of the endpoint's replicas and of this load generator so far."""
    busy = {"proxy": 0.0, "ingress": 0.0, "client": _cpu_s(psutil.Process())}
    for process in psutil.Process().children(recursive=True):
        try:
            title = " ".join(process.cmdline())
            if "ProxyActor" in title or process.name() == "haproxy":
                busy["proxy"] += _cpu_s(process)
            elif "ServeReplica" in title and ":ingress" in title:
                busy["ingress"] += _cpu_s(process)
        except psutil.Error:
            continue
    return busy


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def run(console: Console) -> dict[str, Any]:
    """Saturation, then five times its rate with admission and without."""
    from serve_app.sdk import deploy

    rates: dict[bool, list[dict[str, Any]]] = {}
    overload: dict[bool, dict[str, Any]] = {}
    best: dict[str, Any] | None = None
    for is_on in (False, True):
        with deploy(document(is_on=is_on), on_status=lambda status: None) as app:
            generator = LoadGenerator(app.url, app.config.model.id, seed=1)

            def at(rate: float, is_on: bool = is_on, generator: LoadGenerator = generator) -> dict[str, Any]:
                row = figures(rate, *asyncio.run(_load(generator, rate, seed=round(10 * rate))))
                name = "with admission" if is_on else "without"
                console.print(f"{name}, {rate:.1f} requests/s: {_goodput(row):.2f} within the objectives")
                time.sleep(_REST_S)
                return row

            rows = rates[is_on] = [at(_FIRST_RATE)]
            while len(rows) < 2 or _goodput(rows[-1]) > _RISES * _goodput(rows[-2]):
                rows.append(at(rows[-1]["rate"] * _RATE_STEP))
            best = max(rows if best is None else [best, *rows], key=_goodput)
            overload[is_on] = at(best["rate"] * _OVERLOAD)
    assert best is not None
    return {
        "slo": {"ttft_s": _SLO.ttft_s, "tpot_s": _SLO.tpot_s},
        "saturation": best,
        "overload": overload[True],
        "overload_without_admission": overload[False],
        "goodput_kept_frac": _goodput(overload[True]) / _goodput(best),
        "rates_with_admission": rates[True],
        "rates_without_admission": rates[False],
        "machine": platform.platform(),
    }


def _goodput(row: dict[str, Any]) -> float:
    return float(row["goodput_requests_per_s"])


def show(result: dict[str, Any], console: Console) -> None:
    """The figures as a table."""
    table = Table(title="Overload on emulated engines")
    for name in ("", "requests/s", "goodput/s", "refused", "refused p50 / p99, ms", "TTFT p99, s", "TPOT p99, ms"):
        table.add_column(name, justify="right")
    for name in ("saturation", "overload", "overload_without_admission"):
        row = result[name]

        def cell(key: str, factor: float = 1.0, row: dict[str, Any] = row) -> str:
            return "-" if row[key] is None else f"{factor * row[key]:.3g}"

        table.add_row(
            name.replace("_", " "),
            cell("rate"),
            cell("goodput_requests_per_s"),
            str(row["refused"]),
            f"{cell('refused_s_p50', 1000)} / {cell('refused_s_p99', 1000)}",
            cell("ttft_s_p99"),
            cell("tpot_s_p99", 1000),
        )
    console.print(table)
    console.print(f"goodput kept: {result['goodput_kept_frac']:.0%}")


def main(out: Path = Path("reports/overload.json")) -> None:
    """Measure, show and write."""
    driver_environment()
    console = Console()
    result = run(console)
    show(result, console)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=2) + "\n")
    console.print(f"written to {out}")


if __name__ == "__main__":
    typer.run(main)
