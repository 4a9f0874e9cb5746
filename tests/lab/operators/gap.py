"""How many more GPUs than the oracle the greedy planners and our search take: ``make operators-gap``.

The families: graphs of three operators (a large product, attention, a small product) with random times, gains by
tensor parallelism and weights, tensor parallel sizes 1 and 2, and 1,024 tokens. In prefill, batches are 1, 2 and 4. In
decode, they are 1, 8 and 32, most of the time does not grow with the batch, and KV takes memory. Objectives are 1.3 to
4 times the bare latency, and rates those at which the oracle takes up to six GPUs. What is compared is GPUs after
placement. The seed is an argument.
"""

import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from typer import Option

from autoscale.operators.contention import Contention, UniformContention, load_pairs
from autoscale.operators.costs import Phase
from autoscale.operators.demand import Demand, PlanError
from autoscale.operators.evaluation import Assumptions
from autoscale.operators.gpu import gpu_named
from autoscale.operators.option_table import option_table
from autoscale.operators.options import Limits, OptionTable
from autoscale.operators.oracle import gap_frac, plan_oracle
from autoscale.operators.plan import Plan
from autoscale.operators.planners import PLANNERS
from serve_app.output import write_file
from tests.autoscale.operators.roofline import HandCosts
from tests.lab.operators.model_costs import PAIRS

_LENGTH_TOKENS = 1024
_MOST_GPUS = 6
_PLANNERS = ("model", "paper_greedy", "greedy", "search")
_GPU = gpu_named("A100")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Ranges of random graphs; times are about those of a 7B model on an A100.

    Attributes:
        whole_s: time of a pass at batch 1 on one GPU.
        fixed_fracs: by operator, the share of its time that does not grow with the batch.
        kv_bytes: KV of one request.
    """

    name: str
    phase: Phase
    batches: tuple[int, ...]
    whole_s: tuple[float, float]
    fixed_fracs: Mapping[str, tuple[float, float]]
    kv_bytes: tuple[float, float]


PREFILL = Family(
    name="prefill",
    phase=Phase.PREFILL,
    batches=(1, 2, 4),
    whole_s=(0.05, 0.15),
    fixed_fracs={"gate_up": (0.02, 0.5), "attention": (0.0, 0.3), "qkv": (0.02, 0.8)},
    kv_bytes=(6e7, 6e7),
)
DECODE = Family(
    name="decode",
    phase=Phase.DECODE,
    batches=(1, 8, 32),
    whole_s=(0.01, 0.03),
    fixed_fracs={"gate_up": (0.8, 0.99), "attention": (0.1, 0.9), "qkv": (0.8, 0.99)},
    kv_bytes=(1e8, 2e9),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One graph at one rate, and the GPUs and the gap of each planner that finds a plan."""

    number: int
    table: OptionTable
    oracle_gpus: int
    gpus: Mapping[str, int]
    gaps: Mapping[str, float]
    seconds: Mapping[str, float]


def random_costs(family: Family, rng: random.Random) -> HandCosts:
    """One graph of a family: a large product, attention, and a small product."""
    shares = {"gate_up": rng.uniform(0.4, 0.7), "attention": rng.uniform(0.05, 0.4), "qkv": rng.uniform(0.1, 0.3)}
    whole_s = rng.uniform(*family.whole_s)
    fixed_fracs = {name: rng.uniform(*family.fixed_fracs[name]) for name in shares}
    return HandCosts(
        fixed_s={name: whole_s * share * fixed_fracs[name] for name, share in shares.items()},
        each_s={name: whole_s * share * (1.0 - fixed_fracs[name]) for name, share in shares.items()},
        sizes=(1, 2),
        scalings={name: rng.uniform(0.6, 0.98) for name in shares},
        weights={name: rng.choice((2e9, 10e9, 30e9, 50e9)) for name in shares},
        kv_bytes=rng.uniform(*family.kv_bytes),
        output=7e6 if family.phase is Phase.PREFILL else 7e3,
    )


def cases(count: int, seed: int, contention: Contention, family: Family = PREFILL) -> Iterator[Case]:
    """Random cases that the oracle solves with up to six GPUs."""
    rng = random.Random(seed)
    assumptions = Assumptions(contention=contention)
    number = 0
    while number < count:
        costs = random_costs(family, rng)
        slo_factor, wanted_gpus = rng.uniform(1.3, 4.0), rng.uniform(0.3, 3.6)
        bare = _table(costs, family, rate=1.0, slo_s=1.0)
        work_s = sum(float(one.gpu_s.min()) for one in bare.operators)
        table = _table(costs, family, rate=wanted_gpus / work_s, slo_s=slo_factor * bare.bare_s)
        case = _solved(number, table, assumptions)
        if case is not None:
            number += 1
            yield case


def _table(costs: HandCosts, family: Family, *, rate: float, slo_s: float) -> OptionTable:
    return option_table(
        costs,
        demand=Demand(passes_per_s=rate, length_tokens=_LENGTH_TOKENS, slo_s=slo_s),
        phase=family.phase,
        gpu=_GPU,
        limits=Limits(batches=family.batches),
    )


def _solved(number: int, table: OptionTable, assumptions: Assumptions) -> Case | None:
    begun = time.process_time()
    try:
        oracle = plan_oracle(table, assumptions, most_gpus=_MOST_GPUS)
    except PlanError:
        return None
    seconds = {"oracle": time.process_time() - begun}
    plans: dict[str, Plan] = {}
    for name in _PLANNERS:
        begun = time.process_time()
        with suppress(PlanError):
            plans[name] = PLANNERS[name](table, assumptions)
        seconds[name] = time.process_time() - begun
    return Case(
        number=number,
        table=table,
        oracle_gpus=oracle.gpus,
        gpus={name: plan.gpus for name, plan in plans.items()},
        gaps={name: gap_frac(plan, oracle) for name, plan in plans.items()},
        seconds=seconds,
    )


def shown(found: Sequence[Case]) -> Table:
    """The table that the command prints."""
    table = Table(title=f"GPUs above the oracle, {len(found)} cases of 1,024 tokens")
    for name in ("planner", "mean gap", "worst gap", "at the oracle's number", "without a plan", "CPU s a plan"):
        table.add_column(name, justify="left" if name == "planner" else "right")
    for planner in _PLANNERS:
        gaps = [case.gaps[planner] for case in found if planner in case.gaps]
        table.add_row(
            planner,
            f"{statistics.mean(gaps):.1%}",
            f"{max(gaps):.0%}",
            f"{sum(gap <= 0.0 for gap in gaps)}",
            f"{len(found) - len(gaps)}",
            f"{statistics.mean(case.seconds[planner] for case in found):.3f}",
        )
    table.add_row(
        "oracle", "", "", f"{len(found)}", "0", f"{statistics.mean(case.seconds['oracle'] for case in found):.3f}"
    )
    return table


def main(
    count: Annotated[int, Option(help="Cases of each family.")] = 40,
    seed: Annotated[int, Option(help="Seed of the family.")] = 1,
    budget_s: Annotated[float, Option(help="CPU seconds after which no further case is begun.")] = 150.0,
    out: Annotated[Path | None, Option(help="CSV of all cases.")] = None,
) -> None:
    """Print the gaps with turns of time alone, and with the contention measured on an H100."""
    begun = time.process_time()
    lines = ["study,case,oracle_gpus," + ",".join(f"{name}_gpus" for name in _PLANNERS)]
    pairs = load_pairs(PAIRS)
    studies: dict[str, tuple[Family, Contention]] = {
        "prefill, turns of time": (PREFILL, UniformContention()),
        "prefill, measured pairs": (PREFILL, pairs),
        "decode, measured pairs": (DECODE, pairs),
    }
    for turn, (name, (family, contention)) in enumerate(studies.items(), start=1):
        found: list[Case] = []
        for case in cases(count, seed, contention, family):
            found.append(case)
            counts = ",".join(str(case.gpus.get(one, "")) for one in _PLANNERS)
            lines.append(f"{name.replace(',', '')},{case.number},{case.oracle_gpus},{counts}")
            if time.process_time() - begun > budget_s * turn / len(studies):
                break
        Console(width=110).print(f"{name}, seed {seed}")
        Console(width=110).print(shown(found))
    if out is not None:
        write_file(out, "\n".join(lines) + "\n", "--out")


if __name__ == "__main__":
    typer.run(main)
