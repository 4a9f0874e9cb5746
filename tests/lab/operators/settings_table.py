"""The table of docs/operators_settings.md: configs before and after `tandem operators settings`, on a shipped trace.

Before: the smallest tensor parallel size that has room for the longest request, vLLM's own sizes of steps and batches,
and as many prefill as decode replicas: the fewest that keep the objectives in the simulator. So `before` is sized too.

    python -m tests.lab.operators.settings_table [--case llama-3.1-8b:H100:bf16:40 ...]
"""

import argparse
import json
import random
import sys
from dataclasses import asdict, replace
from typing import Any

from autoscale.operators.engine_profile import MemoryShortageError
from autoscale.operators.gpu import gpu_named
from autoscale.operators.graph import OperatorPrecision, operator_graph
from autoscale.operators.pair_load import PairLoad
from autoscale.operators.pool_pair import Effect, Objectives
from autoscale.operators.role_settings import RoleEngines
from autoscale.operators.tables import load_operator_tables
from autoscale.operators.times import OperatorTimes
from autoscale.traces.trace import cut, load_trace, scale_rate
from deployments.config import ServiceConfig
from kvtransfer.topology import Role
from serve_app.local.shipped import shipped
from serve_app.operators.model import model_config
from serve_app.operators.settings_check import SettingsCheck
from serve_app.operators.settings_config import RoleState, role_state
from serve_app.operators.settings_result import found_settings

CASES = (
    "llama-3.1-8b:H100:bf16:40",
    "llama-3.1-8b:A100:bf16:20",
    "llama-3.1-70b:H100:fp8:10",
    "qwen3-32b:H100:bf16:8",
    "qwen3-30b-a3b:H100:bf16:20",
)
TRACE = "traces/azure_conv_600s.csv.gz"
SECONDS = 180.0
OBJECTIVES = Objectives(ttft_s=1.0, tpot_s=0.05, attained_frac=0.95)
MOST_REPLICAS = 32


def row(case: str) -> dict[str, Any]:
    """One line of the table."""
    model, gpu_name, dtype, rate = case.split(":")
    gpu, graph = gpu_named(gpu_name), operator_graph(model_config(model), OperatorPrecision(weights=dtype))
    part = cut(load_trace(shipped(TRACE)), 0.0, SECONDS)
    trace = scale_rate(part, float(rate) / PairLoad.of_requests(part).requests_per_s, random.Random(0))
    pool = {"placement": {"accelerator_type": gpu.name}}
    groups = [{"name": "g0", "prefill": pool, "decode": pool}]
    service = ServiceConfig.model_validate({"model": {"id": model, "source": "hub/model"}, "groups": groups})
    times = OperatorTimes(gpu, load_operator_tables(shipped(f"operators/tables/{gpu.name}")))
    engines = RoleEngines(model, graph, times, PairLoad.of_requests(trace), OBJECTIVES.tpot_s)
    check = SettingsCheck(engines.profile, trace, service.router, OBJECTIVES)
    longest = max(request.input_tokens + request.output_tokens for request in trace)
    base = role_state(service, service.groups[0].decode, gpu, max(2048, longest))
    before = smallest_equal(check, smallest_parallel(engines, base, longest))
    result = found_settings(service, before, engines, check, None)
    assert result.before is not None
    return {
        "case": case,
        "before": asdict(result.before),
        "after": asdict(result.after),
        "parallel_before": before[Role.DECODE].engine.parallel,
        "written": {each.label: each.after for each in result.written},
        "not_written": [each.setting.label for each in result.judged if each.setting not in result.written],
        "error": {
            name: errors(getattr(result, name).predicted, getattr(result, name).simulated)
            for name in ("before", "after")
        },
    }


def smallest_parallel(engines: RoleEngines, base: RoleState, longest_tokens: int) -> RoleState:
    """The role at the smallest tensor parallel size whose KV holds the longest request."""
    for parallel in engines.graph.parallel_sizes():
        state = replace(base, engine=replace(base.engine, parallel=parallel))
        try:
            if engines.profile(state.engine).kv_tokens >= longest_tokens:
                return state
        except MemoryShortageError:
            continue
    raise SystemExit("no tensor parallel size has room for the longest request")


def smallest_equal(check: SettingsCheck, state: RoleState) -> dict[Role, RoleState]:
    """The fewest replicas, as many of each role, that keep the objectives in the simulator."""
    for replicas in range(1, MOST_REPLICAS + 1):
        states = dict.fromkeys(Role, replace(state, replicas=replicas))
        if check.compared(states).simulated.attained_frac >= OBJECTIVES.attained_frac:
            return states
    raise SystemExit(f"{MOST_REPLICAS} replicas of each role do not keep the objectives")


def errors(predicted: Effect, simulated: Effect) -> dict[str, float]:
    """Prediction beside the simulator: relative for latencies, a difference for the share."""
    return {
        "ttft_p90": predicted.ttft_p90_s / simulated.ttft_p90_s - 1.0,
        "tpot_p90": predicted.tpot_p90_s / simulated.tpot_p90_s - 1.0,
        "attained": predicted.attained_frac - simulated.attained_frac,
    }


def line(found: dict[str, Any]) -> str:
    """A line of the page's table."""
    before, after, error = found["before"]["simulated"], found["after"]["simulated"], found["error"]
    cells = [
        found["case"],
        f"{before['gpus']}, {before['attained_frac']:.1%}",
        f"{after['gpus']}, {after['attained_frac']:.1%}",
        f"{before['ttft_p90_s']:.2f} s, {before['tpot_p90_s'] * 1e3:.1f} ms",
        f"{after['ttft_p90_s']:.2f} s, {after['tpot_p90_s'] * 1e3:.1f} ms",
        *(
            f"{error[name]['ttft_p90']:+.0%}, {error[name]['tpot_p90']:+.0%}, {error[name]['attained'] * 100:+.1f}"
            for name in ("before", "after")
        ),
        ", ".join(f"{name} {value}" for name, value in found["written"].items()) or "-",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Print one line for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="*", default=list(CASES), help="model:GPU:dtype:requests per second")
    parser.add_argument("--json", action="store_true", help="print all figures")
    options = parser.parse_args()
    for case in options.case:
        found = row(case)
        sys.stdout.write((json.dumps(found) if options.json else line(found)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
