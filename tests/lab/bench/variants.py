"""What it is worth to count each variant as what it is: ``make bench-variants``, simulated.

A service has a few fast replicas, and as many as it wants that are half as fast and cost more for their speed. Every
policy runs twice: with the capacity that the profiles say, and with all replicas counted alike. A policy whose target
people type is tried with several; its row is that of the cheapest run which keeps the objectives, or else of the run
which keeps them for most requests.
"""

import json
import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.table import Table

from autoscale.engines.profile import EngineProfile
from autoscale.sim.config import SimConfig
from autoscale.sim.scenario import Scenario, run_policy, scenario_of
from autoscale.traces.trace import load_trace, scale_rate
from serve_app.output import write_file
from tests.lab.stand.fixed_counts import ROOT

_CONFIG = ROOT / "configs" / "sim" / "h100_llama70b.yaml"
_PROFILE = ROOT / "configs" / "profiles" / "h100_llama70b_fp8_tp2.json"
_TRACE = ROOT / "configs" / "traces" / "azure_conv_600s.csv.gz"
_RATE_SCALE = 4.0
_SLOW_SPEED = 0.5
_WARM_UP_S = 120.0
# Fast replicas of each role, all in use at the begin, and the slow ones of the begin.
_FAST, _SLOW = 4, 4
# Dollars for a GPU hour. A slow GPU costs two thirds of a fast one for half of its speed.
_FAST_PRICE, _SLOW_PRICE = 3.0, 2.0
_OPEN = {"gate": {"is_enabled": False}, "guard": {"step_out_replicas": 30}}
# Settings of each policy. Those without a target of their own have one.
_SETTINGS: dict[str, list[dict[str, Any]]] = {
    "default": [{}],
    "dopd": [_OPEN],
    "wva": [_OPEN],
    "token_velocity": [_OPEN],
    "heteroscale": [
        {"policy": {"signal": "decode_tps", "target": target}} for target in (1500, 2000, 2500, 3000, 4000)
    ],
    "queue_depth": [
        {"policy": {"prefill_requests_per_s": 4.0 * factor, "decode_requests_per_s": 10.0 * factor, "target_queue": 4}}
        for factor in (1.0, 1.33, 1.67, 2.0)
    ],
}

# Share of requests within the objectives, and dollars.
Outcome = tuple[float, float]


def config() -> SimConfig:
    """Two groups, and the shipped settings of each policy."""
    document = yaml.safe_load(_CONFIG.read_text())
    fast = EngineProfile.load(_PROFILE)

    def group(name: str, profile: EngineProfile, price: float, highest: int) -> dict[str, Any]:
        pool = {"profile": profile, "cost_per_gpu_hour": price, "highest_replicas": highest}
        return {"name": name, "prefill": {**pool, "start_s": 30}, "decode": {**pool, "start_s": 45}}

    groups = [group("fast", fast, _FAST_PRICE, _FAST), group("slow", fast.at_speed(_SLOW_SPEED), _SLOW_PRICE, 64)]
    return SimConfig.model_validate({**document, "groups": groups, "warm_up_s": _WARM_UP_S})


def run(scenario: Scenario, base: SimConfig, name: str, changes: Mapping[str, Any], is_alike: bool) -> Outcome:
    """One policy with one of its settings."""
    pools = {key: replace(pool, capacity=1.0) if is_alike else pool for key, pool in scenario.pools.items()}
    counts = {key: _FAST if key.group == "fast" else _SLOW for key in pools}
    settings = base.model_copy(update={"policies": {**base.policies, name: {**base.policies.get(name, {}), **changes}}})
    ran = run_policy(replace(scenario, pools=pools), settings.autoscale_config(name), counts)
    hours = ran.fleet.gpu_hours(scenario.warm_up_s, scenario.trace[-1].at_s)
    return ran.attainment_frac, sum(each * pools[key].cost_per_gpu_hour for key, each in hours.items())


def best(outcomes: Sequence[Outcome], attainment_frac: float) -> int:
    """Index of the cheapest outcome that attains the share, or else of the one that attains most."""
    return min(
        range(len(outcomes)),
        key=lambda at: (0, outcomes[at][1]) if outcomes[at][0] >= attainment_frac else (1, -outcomes[at][0]),
    )


def main(
    trace: Annotated[Path, typer.Option(help="The trace to replay.")] = _TRACE,
    out: Annotated[Path, typer.Option("--json", help="Write the figures here.")] = Path("reports/variants.json"),
) -> None:
    """Simulate, show and write."""
    base = config()
    scenario = scenario_of(base, scale_rate(load_trace(trace), _RATE_SCALE, random.Random(0)), seed=0)
    jobs = [
        (name, changes, is_alike) for name, each in _SETTINGS.items() for changes in each for is_alike in (True, False)
    ]
    with ProcessPoolExecutor() as pool:
        running = [pool.submit(run, scenario, base, *job) for job in jobs]
        outcomes = [each.result() for each in running]
    rows = []
    for name in _SETTINGS:
        row: dict[str, Any] = {"policy": name}
        for is_alike, how in ((True, "alike"), (False, "by_capacity")):
            own = [
                (job[1], outcome)
                for job, outcome in zip(jobs, outcomes, strict=True)
                if (job[0], job[2]) == (name, is_alike)
            ]
            changes, (attained, cost) = own[best([outcome for _, outcome in own], base.slo.attainment_frac)]
            row[how] = {"attainment_frac": attained, "cost": cost, "settings": changes.get("policy", {})}
        rows.append(row)
    capacities = {str(key): pool.capacity for key, pool in scenario.pools.items()}
    console = Console()
    console.print(_table(rows))
    console.print(f"capacities: {', '.join(f'{key} {each:.2f}' for key, each in capacities.items())}")
    write_file(
        out, json.dumps({"trace": trace.name, "capacities": capacities, "rows": rows}, indent=1) + "\n", "--json"
    )


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="Two variants, one half as fast: counted alike, or by capacity", title_justify="left")
    for column in ("policy", "within,\nalike", "cost,\nalike $", "within,\nby capacity", "cost, by\ncapacity $"):
        table.add_column(column, justify="right" if "\n" in column else "left")
    for row in rows:
        cells = [f"{row[how][what]:{form}}" for how in ("alike", "by_capacity") for what, form in _COLUMNS]
        table.add_row(row["policy"], *cells)
    return table


_COLUMNS = (("attainment_frac", ".2%"), ("cost", ".2f"))

if __name__ == "__main__":
    typer.run(main)
