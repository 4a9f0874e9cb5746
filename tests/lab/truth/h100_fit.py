"""Decode steps and KV of the H100 profiles, fitted to operating points at TP 2: ``make fit-profiles``.

A step takes ``a s_TP(batch) + b r_TP batch (context - 350)``. ``s_TP`` was measured at a context of 350 tokens (vLLM
0.10.1.1); ``r_TP`` is the time in which the GPUs read the KV of one token, at their full bandwidth. The two factors are
fitted to TPOT at TP 2 (a newer vLLM) and hold for every TP: ``a`` is what the newer engine takes less, ``b`` how much
longer than at full bandwidth attention takes. TP 4 was measured too, and is left out of the fit: it is the test.
"""

import csv
import json
import random
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import typer
from rich.console import Console
from scipy.optimize import minimize

from autoscale.engines.operating_points import OperatingPoint, load_operating_points, predicted
from autoscale.engines.profile import EngineProfile

PROFILES = Path(__file__).parents[3] / "configs" / "profiles"
_STEPS = Path(__file__).parent / "h100_steps.csv"
_CONTEXT_TOKENS = (350, 131_072)  # of the measured steps, and the model's longest context
_FITTED_TP, _MEASURED_TP, _ALL_TP = 2, (2, 4), (2, 4, 8)
_GPU_BYTES, _WEIGHT_BYTES = 80e9, 70.6e9
_MEMORY_FRAC = 0.9  # vLLM's default: KV gets this share of the memory, less the weights
_KV_BYTES_PER_TOKEN = 327_680  # 80 layers x 2 x 8 heads x 128 x 2 bytes
_BYTES_PER_S = 3.35e12  # memory bandwidth of one H100, data sheet of the SXM board
_BLOCK_TOKENS = 128  # of the engines that were measured


def path_of(tp: int) -> Path:
    """The shipped profile of a tensor parallel size."""
    return PROFILES / f"h100_llama70b_fp8_tp{tp}.json"


def points_of(tp: int) -> tuple[OperatingPoint, ...]:
    """The measured operating points of a tensor parallel size."""
    return load_operating_points(PROFILES / "points" / f"h100_llama70b_fp8_tp{tp}.csv")


def tpot_errors(profile: EngineProfile, points: Sequence[OperatingPoint]) -> list[float]:
    """Relative error of the predicted TPOT at each point, with its sign."""
    return [predicted(profile, point, random.Random(0)).tpot_s / point.tpot_s - 1.0 for point in points if point.tpot_s]


def fitted(tp: int, base: float, reading: float) -> EngineProfile:
    """The profile of a tensor parallel size with these two factors, ``a`` and ``b``."""
    document = json.loads(path_of(tp).read_text())
    with _STEPS.open(newline="") as lines:
        measured = [row for row in csv.DictReader(lines) if row["tp"] == str(tp)]
    batches = [int(row["concurrency"]) for row in measured]
    token_s = reading * _KV_BYTES_PER_TOKEN / (tp * _BYTES_PER_S)
    least, most = _CONTEXT_TOKENS
    # A larger batch never takes less time, though noise says so in one place.
    bases = accumulate((base * float(row["step_s"]) for row in measured), max)
    rows = [[step_s, step_s + n * token_s * (most - least)] for n, step_s in zip(batches, bases, strict=True)]
    document["decode"] = {
        "batch": batches,
        "context_tokens": list(_CONTEXT_TOKENS),
        "step_s": [[round(step_s, 7) for step_s in row] for row in rows],
    }
    replaced, sources = ["decode"], _sources(base, token_s)
    if tp != _FITTED_TP:  # whose KV was measured
        kv_tokens = (_MEMORY_FRAC * _GPU_BYTES * tp - _WEIGHT_BYTES) / _KV_BYTES_PER_TOKEN
        document["kv_tokens"] = int(kv_tokens) // _BLOCK_TOKENS * _BLOCK_TOKENS
        replaced.append("kv_tokens")
        sources.append(_KV_SOURCE)
    others = [source for source in document["sources"] if not source["part"].startswith(tuple(replaced))]
    document["sources"] = [*others, *sources]
    return EngineProfile.model_validate(document)


_KV_SOURCE = {
    "part": "kv_tokens",
    "kind": "derived",
    "text": "0.9 of 80 GB for each GPU, less 70.6 GB of weights, over 327,680 bytes per token, in whole blocks of 128; "
    "the same sum gives what NVIDIA Dynamo's sweep states for TP 2 within 0.1%",
}


def _sources(base: float, token_s: float) -> list[dict[str, Any]]:
    fit = (
        "fitted to TPOT of Llama-3.1-70B FP8 on two H100 at 15 operating points, InferenceX runs in aiconfigurator "
        "(commit 095f58a, Apache-2.0), configs/profiles/points; make fit-profiles"
    )
    return [
        {
            "part": "decode.step_s, context 350",
            "kind": "derived",
            "text": f"{base:.3f} times the inter-token latency by concurrency of NVIDIA Dynamo's sweep "
            f"(planner/utils/pre_swept_results, vLLM 0.10.1.1, Apache-2.0); the factor is {fit}",
        },
        {
            "part": "decode.step_s, context 131072",
            "kind": "derived",
            "text": f"{token_s * 1e6:.5f} us more per request and token of context: the time to read its KV at the "
            f"data sheet's bandwidth, times a factor that is {fit}",
        },
    ]


def fit() -> tuple[float, float]:
    """The two factors with the least squares of the relative error of TPOT at TP 2."""
    points = points_of(_FITTED_TP)

    def loss(factors: np.ndarray) -> float:
        return float(np.mean(np.square(tpot_errors(fitted(_FITTED_TP, *map(float, factors)), points))))

    found = minimize(loss, [1.0, 1.0], method="Nelder-Mead", options={"maxiter": 80, "xatol": 1e-3, "fatol": 1e-7})
    base, reading = found.x
    return round(float(base), 3), round(float(reading), 3)


def main() -> None:
    """Fit, write the profiles, and print the errors."""
    console = Console()
    factors = fit()
    console.print(f"a = {factors[0]:g}, b = {factors[1]:g}", highlight=False)
    for tp in _ALL_TP:
        profile = fitted(tp, *factors)
        path_of(tp).write_text(profile.model_dump_json(indent=1) + "\n")
        text = "not measured"
        if tp in _MEASURED_TP:
            text = f"TPOT off by {np.mean(np.abs(tpot_errors(profile, points_of(tp)))):.1%} in the mean"
        console.print(f"TP {tp}: {profile.kv_tokens} tokens of KV; {text}", highlight=False)


if __name__ == "__main__":
    typer.run(main)
