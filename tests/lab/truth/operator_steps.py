"""Measured decode steps against sums of operators: what the host adds, and a model on which nothing was chosen.

Both are of NVIDIA Dynamo's sweep with vLLM 0.10.1.1, which scheduled synchronously: Llama-3.3-70B FP8 on H100
(``h100_steps.csv``, context 350), and Llama-3.1-8B FP8 on H200 (``operator_runs``).
"""

import csv
import json
import statistics
from pathlib import Path

from autoscale.operators.gpu import gpu_named
from autoscale.operators.graph import OperatorPrecision, operator_graph
from autoscale.operators.kinds import Pass
from autoscale.operators.step_times import SYNC_HOST, EngineSettings, HostTimes, StepTimes
from autoscale.operators.tables import load_operator_tables
from autoscale.operators.times import OperatorTimes

_FOLDER = Path(__file__).parent
_OPERATORS = Path(__file__).parents[3] / "configs" / "operators"
_H100_CONTEXT_TOKENS = 350
# Beyond this batch the steps of that engine rise at once by a third, which its operators do not.
_MOST_REQUESTS = 93


def step_times(model: str, gpu: str, parallel: int, host: HostTimes) -> StepTimes:
    """Steps of an engine with FP8 weights and bf16 KV."""
    graph = operator_graph(
        json.loads((_OPERATORS / "models" / f"{model}.json").read_text()), OperatorPrecision(weights="fp8")
    )
    times = OperatorTimes(gpu_named(gpu), load_operator_tables(_OPERATORS / "tables" / gpu))
    return StepTimes(graph, times, EngineSettings(parallel=parallel, host=host))


def host_excess_s() -> dict[int, list[float]]:
    """Seconds that measured steps of the H100 take beyond their operators, one for each TP, by requests."""
    found: dict[int, list[float]] = {}
    with (_FOLDER / "h100_steps.csv").open(newline="") as file:
        rows = [(int(row["tp"]), int(row["concurrency"]), float(row["step_s"])) for row in csv.DictReader(file)]
    for parallel in sorted({tp for tp, _, _ in rows}):
        steps = step_times("llama-3.1-70b", "H100", parallel, HostTimes(step_s=0.0))
        for tp, requests, step_s in rows:
            if tp == parallel and requests <= _MOST_REQUESTS:
                work = Pass(decoding=requests, context_tokens=_H100_CONTEXT_TOKENS)
                found.setdefault(requests, []).append(step_s - steps.seconds(work))
    return found


def fitted_host() -> HostTimes:
    """What ``SYNC_HOST`` is: the mean excess at one request, and the mean slope from there."""
    by_requests = {requests: statistics.fmean(excess) for requests, excess in host_excess_s().items()}
    base_s = by_requests.pop(1)
    slopes = [(excess_s - base_s) / (requests - 1) for requests, excess_s in by_requests.items()]
    return HostTimes(step_s=base_s, request_s=statistics.fmean(slopes))


def held_out_errors() -> list[tuple[int, int, float]]:
    """(context, batch, relative error) of each measured step of Llama-3.1-8B on H200."""
    steps = step_times("llama-3.1-8b", "H200", 1, SYNC_HOST)
    with (_FOLDER / "operator_runs" / "h200_llama-3.1-8b_steps.csv").open(newline="") as file:
        rows = [
            (int(row["context_tokens"]), max(1, int(row["batch"])), float(row["step_s"]))
            for row in csv.DictReader(file)
        ]
    return [
        (context, batch, steps.seconds(Pass(decoding=batch, context_tokens=context)) / step_s - 1.0)
        for context, batch, step_s in rows
    ]
