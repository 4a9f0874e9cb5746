"""Derives the planner's small tables of contention, SM shares and power from what was measured on the H100.

``python -m tests.lab.operators.derive_contention``: reads h100_80gb/ of this folder, and writes
configs/operators/contention/.
The tables are means over Llama-3-8B and Qwen2-7B, and over the operators of a kind.
"""

import csv
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from autoscale.operators.activity import Kind

_HERE = Path(__file__).parent
MEASURED = _HERE / "h100_80gb"
DERIVED = _HERE.parents[2] / "configs" / "operators" / "contention"

_KINDS: Mapping[str, Kind] = {"rmsnorm": Kind.NORM, "rope": Kind.POINTWISE, "silu_mul": Kind.POINTWISE}
_Place = tuple[str, int]
_Kernel = tuple[str, str, str, str]  # model, operator, role, tokens


def kind_of(operator: str, role: str) -> Kind:
    """The planner's kind of a measured operator."""
    if operator == "attention":
        return Kind.PREFILL_ATTENTION if role == "prefill" else Kind.DECODE_ATTENTION
    return Kind.PRODUCT if operator.endswith("_proj") else _KINDS.get(operator, Kind.POINTWISE)


def pairs(rows: Iterable[Mapping[str, str]]) -> list[tuple[str, int, str, int, float, float, float, int]]:
    """Kind and tokens of both, joint speed (geometric mean, least, most), and the number of measured pairs.

    The joint speed of a pair is 1 / I(v beside w) + 1 / I(w beside v). 1: they take turns. Above 1: they overlap.
    """
    ratios: dict[tuple[_Kernel, _Kernel], float] = {}
    for row in rows:
        own = row["model"], row["operator"], row["role"], row["tokens"]
        model, operator, role, tokens = (row[f"neighbour_{name}"] for name in ("model", "operator", "role", "tokens"))
        other = model, operator, role, tokens
        ratios[own, other] = float(row["interference_ratio"])
    speeds: dict[tuple[_Place, _Place], list[float]] = {}
    for (own, other), ratio in ratios.items():
        if (other, own) in ratios and own <= other:
            places = sorted((kind_of(one[1], one[2]).value, int(one[3])) for one in (own, other))
            speeds.setdefault((places[0], places[1]), []).append(1.0 / ratio + 1.0 / ratios[other, own])
    return [
        (*own, *other, _mean(values), min(values), max(values), len(values))
        for (own, other), values in sorted(speeds.items())
    ]


def shares(rows: Iterable[Mapping[str, str]]) -> list[tuple[str, int, int, float]]:
    """Kind, tokens, share of the SMs in percent, and the time as a multiple of that with all SMs."""
    times: dict[tuple[str, str, str, str], dict[int, float]] = {}
    for row in rows:
        key = row["model"], row["operator"], row["role"], row["tokens"]
        times.setdefault(key, {})[int(row["share_percent"])] = float(row["median_us"])
    found: dict[tuple[str, int, int], list[float]] = {}
    for (_, operator, role, tokens), curve in times.items():
        for share, median_us in curve.items():
            place = kind_of(operator, role).value, int(tokens), share
            found.setdefault(place, []).append(median_us / curve[100])
    return [(*place, _mean(values)) for place, values in sorted(found.items())]


def powers(rows: Iterable[Mapping[str, str]], limit_w: float) -> list[tuple[str, float]]:
    """Power of a GPU with a context and no work, of each kind on top while it runs, and the limit, watt."""
    idle_w: list[float] = []
    active_w: dict[Kind, list[float]] = {}
    for row in rows:
        if row["state"] != "busy":
            idle_w.append(float(row["mean_power_w"]))
        elif float(row["wanted_busy_frac"]) == 1.0:
            kind = kind_of(row["operator"], row["role"])
            above_w = (float(row["mean_power_w"]) - float(row["idle_power_w"])) / float(row["busy_frac"])
            active_w.setdefault(kind, []).append(above_w)
    kinds = [(kind.value, sum(values) / len(values)) for kind, values in sorted(active_w.items())]
    return [("idle", sum(idle_w) / len(idle_w)), *kinds, ("peak", limit_w)]


def _mean(values: list[float]) -> float:
    """The geometric mean, since these are ratios."""
    return math.exp(sum(map(math.log, values)) / len(values))


def _rows(name: str) -> list[dict[str, str]]:
    with (MEASURED / name).open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def _write(name: str, header: str, rows: Iterable[tuple[object, ...]]) -> None:
    text = [",".join(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row) for row in rows]
    (DERIVED / name).write_text("\n".join([header, *text]) + "\n", encoding="utf-8")


def main() -> None:
    """Write the three tables."""
    DERIVED.mkdir(parents=True, exist_ok=True)
    header = "kind,tokens,other_kind,other_tokens,joint_speed,joint_speed_least,joint_speed_most,pairs"
    _write("h100_80gb_pairs.csv", header, pairs(_rows("pairs.csv")))
    _write("h100_80gb_sm_shares.csv", "kind,tokens,share_percent,slowdown", shares(_rows("shares.csv")))
    _write("h100_80gb_power.csv", "kind,power_w", powers(_rows("power.csv"), 700.0))


if __name__ == "__main__":
    main()
