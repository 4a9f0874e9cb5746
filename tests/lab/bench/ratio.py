"""``python -m tests.lab.bench.ratio``: the P/D ratio of ``tandem ratio`` against real goodput of 1P1D, 2P1D and 1P2D.

Mixed prompts, all computed by prefill replicas, come at rising rates. Each pair of counts is deployed once. With
``--emulated`` the engines keep the profile's time without computing, so that two cores do not limit three engines.
"""

import argparse
import asyncio
import json
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autoscale.engines.candidates import Need, decode_candidates, prefill_candidates
from autoscale.engines.lengths import Lengths
from autoscale.engines.profile import EngineProfile
from autoscale.engines.replica_counts import Fleet, fleets_in_gpus
from autoscale.report import Report, Slo
from autoscale.sim.cluster import VirtualCluster
from autoscale.traces.trace import TraceRequest
from autoscale.types import PoolKey
from deployments.machine.claims import free_ports
from kvtransfer.topology import Role
from router.config import LengthConfig, RouterConfig
from serve_app import sdk
from serve_app.load.generator import LoadGenerator
from serve_app.output import write_file
from tests.lab.stand.fixed_counts import ROOT, fixed_counts

COUNTS = ((1, 1), (2, 1), (1, 2))
# Prompts of the mixed load: the short and the long range, tokens; and the share of the long ones.
SHORT_TOKENS, LONG_TOKENS, LONG_FRAC = (24, 64), (1000, 1500), 0.2
OUTPUT_TOKENS = (16, 48)
# Twice the default TPOT: three real engines share two cores, and the generator needs a part of them.
SLO = Slo(ttft_s=1.0, tpot_s=0.1)
_PROFILE = ROOT / "configs" / "profiles" / "cpu_tiny.json"
# All prompts go to prefill.
_REMOTE = LengthConfig(local_max_tokens=0, local_cap_tokens=0)
_WARM_REQUESTS = 12
_SEED = 35


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--emulated", action="store_true", help="engines that keep the profile's time")
    parser.add_argument("--simulated", action="store_true", help="no Ray: engine models on a virtual cluster")
    parser.add_argument("--rates", default="4,8,12,16,24", help="requests per second, with commas between them")
    parser.add_argument("--seconds", type=float, default=15.0, help="length of each load")
    parser.add_argument("--profile", type=Path, default=_PROFILE)
    parser.add_argument("--out", type=Path, default=ROOT / "reports" / "bench_ratio.json")
    arguments = parser.parse_args()
    profile = EngineProfile.load(arguments.profile)
    loads = [load(float(rate), arguments.seconds, random.Random(_SEED)) for rate in arguments.rates.split(",")]
    fleet = computed(profile, [request for each in loads for request in each])
    measured = []
    for counts in COUNTS:
        if arguments.simulated:
            reports = simulated(profile, counts, loads)
        else:
            reports = served(counts, loads, arguments.profile if arguments.emulated else None)
        goodputs = [report.goodput_requests_per_s or 0.0 for report in reports]
        measured.append({"counts": counts, "goodput_requests_per_s": goodputs, "best": max(goodputs)})
        print(f"{counts[0]}P{counts[1]}D: " + ", ".join(f"{each:.2f}" for each in goodputs), flush=True)
        # After each pair of counts, so that an interrupted run leaves its figures.
        report = as_document(fleet, measured) | {"rates": arguments.rates, "cores": os.cpu_count()}
        write_file(arguments.out, json.dumps(report, indent=1) + "\n", "--out")
    print(json.dumps({key: report[key] for key in ("pd_ratio", "computed", "best", "replicas_off")}))


def load(requests_per_s: float, seconds: float, rng: random.Random) -> list[TraceRequest]:
    """Poisson arrivals of short and long prompts."""
    requests, at_s = [], rng.expovariate(requests_per_s)
    while at_s < seconds:
        bounds = LONG_TOKENS if rng.random() < LONG_FRAC else SHORT_TOKENS
        tokens, answer = rng.randint(*bounds), rng.randint(*OUTPUT_TOKENS)
        requests.append(TraceRequest(at_s=at_s, input_tokens=tokens, output_tokens=answer))
        at_s += rng.expovariate(requests_per_s)
    return requests


def computed(profile: EngineProfile, requests: Sequence[TraceRequest]) -> Fleet:
    """The best counts of at most three engines, as ``tandem ratio --gpus CPU=3`` computes them."""
    lengths = Lengths.of_requests((request.input_tokens, request.output_tokens) for request in requests)
    need = Need(
        lengths=lengths, longest_input_tokens=lengths.longest_input_tokens, ttft_s=SLO.ttft_s, tpot_s=SLO.tpot_s
    )
    candidates = prefill_candidates([profile], need), decode_candidates([profile], need)
    return fleets_in_gpus(*candidates, need, {"CPU": 3}, {})[0]


def simulated(profile: EngineProfile, counts: tuple[int, int], loads: Sequence[list[TraceRequest]]) -> list[Report]:
    """The goodput of engine models."""
    pools = dict(zip((PoolKey("g0", role) for role in Role), counts, strict=True))
    reports = []
    for requests in loads:
        cluster = VirtualCluster(dict.fromkeys(pools, profile), RouterConfig(length=_REMOTE), random.Random(_SEED))
        records = cluster.replay(requests, pools)
        reports.append(Report.of(records, [SLO] * len(records)))
    return reports


def served(counts: tuple[int, int], loads: Sequence[list[TraceRequest]], emulated: Path | None) -> list[Report]:
    """The goodput of an application on this machine; ``emulated``: profile whose time its engines keep."""
    document = fixed_counts("cpu_tiny", 1)
    document["http_options"]["port"] = free_ports(1)[0]
    args: dict[str, Any] = document["applications"][0]["args"]
    args["router"] = {"length": _REMOTE.model_dump()}
    for role, replicas in zip(Role, counts, strict=True):
        pool = args["groups"][0][str(role)]
        pool |= {"replicas": replicas, "placement": {"cpus_per_worker": 0.3, "cpus_per_replica": 0.1}}
        if emulated is not None:
            pool["emulator"] = {"profile": str(emulated)}
    with sdk.deploy(document) as app:
        generator = LoadGenerator(app.url, app.config.model.id, seed=_SEED)
        asyncio.run(generator.keep_in_flight(loads[0][:_WARM_REQUESTS], 2))
        records = [asyncio.run(generator.replay(requests)) for requests in loads]
    return [Report.of(each, [SLO] * len(each)) for each in records]


def as_document(fleet: Fleet, measured: list[dict[str, Any]]) -> dict[str, Any]:
    """Computed and best measured counts, and their distance in replicas of the role that differs most."""
    best = max(measured, key=lambda each: each["best"])["counts"]
    counts = (fleet.prefill_replicas, fleet.decode_replicas)
    return {
        "pd_ratio": fleet.ratio.prefill_per_decode,
        "decode_limit": fleet.ratio.decode_limit,
        "computed": counts,
        "best": best,
        "replicas_off": max(abs(ours - theirs) for ours, theirs in zip(counts, best, strict=True)),
        "measured": measured,
    }


if __name__ == "__main__":
    main()
