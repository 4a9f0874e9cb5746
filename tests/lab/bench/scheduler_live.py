"""The strategies of the prefill queue on real engines: two prefill and two decode replicas of the tiny model.

Prompts of mixed lengths arrive at random times. The rate is the same for all strategies. The parts share the cores of
this machine, so only ratios between the strategies mean something.
"""

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from autoscale.slo import SloConfig
from autoscale.traces.trace import TraceRequest
from deployments.machine.claims import free_ports
from router.prefill_order import ORDERS
from serve_app.load.generator import LoadGenerator
from serve_app.load.metrics_page import scrape
from serve_app.local.cluster import driver_environment
from tests.lab.bench.scheduler import ALL_REMOTE, Row, figures, mixed, table
from tests.lab.stand.fixed_counts import fixed_counts
from tests.lab.stand.precedence import ahead_of_others

# A prompt of 1,500 tokens alone takes 0.24 s on these engines (configs/profiles/cpu_tiny.json), and more with all parts
# on two cores.
_SLO = SloConfig(ttft_s=1.0, ttft_s_per_input_token=0.002, tpot_s=0.2)
_OUTPUT_TOKENS = 8
_WARM_UP_S, _MEASURED_S = 8.0, 40.0
# Below the saturation of two cores, and near it.
_RATES_PER_S = (4.0, 6.0)


def document(strategy: str, *, is_all_remote: bool) -> dict[str, Any]:
    """The application. Its bounds fix the counts; the autoscaler is there for the objectives of its prompts."""
    served = fixed_counts("cpu_tiny", 2)
    served["http_options"]["port"] = free_ports(1)[0]
    application = served["applications"][0]
    application["autoscaling_policy"] = {"policy_function": "autoscale.ray_policy:JointPolicy"}
    args = application["args"]
    for role in ("prefill", "decode"):
        args["groups"][0][role] |= {"replicas": 2, "max_replicas": 2}
    args["autoscale"] = {
        "pd_ratio": "1:1",
        "policy": {"kind": "heteroscale", "target": 1e6},
        "slo": _SLO.model_dump(mode="json"),
    }
    length = ALL_REMOTE if is_all_remote else {}
    args["router"] = {"length": length, "prefill_queue": {"strategy": strategy}}
    return served


def arrivals(rate_per_s: float, seed: int) -> list[TraceRequest]:
    """Requests at random times, with mixed lengths."""
    rng, at_s, requests = random.Random(seed), 0.0, []
    shapes = mixed(rng, _OUTPUT_TOKENS)
    while (at_s := at_s + rng.expovariate(rate_per_s)) < _WARM_UP_S + _MEASURED_S:
        tokens, output_tokens = rng.choice(shapes)
        requests.append(TraceRequest(at_s=at_s, input_tokens=tokens, output_tokens=output_tokens))
    return requests


@contextmanager
def _served(strategy: str, *, is_all_remote: bool) -> Iterator[Any]:
    from serve_app.sdk import deploy

    with deploy(document(strategy, is_all_remote=is_all_remote), on_status=lambda status: None) as app:
        yield app


def run_live(
    console: Console,
    save: Callable[[list[Row]], None],
    *,
    strategies: tuple[str, ...] = ("direct", *ORDERS),
    all_remote: tuple[bool, ...] = (True, False),
    rates_per_s: tuple[float, ...] = _RATES_PER_S,
) -> None:
    """Measure every strategy at every rate, each with an application of its own."""
    driver_environment()
    rows: list[Row] = []
    for is_all_remote in all_remote:
        for strategy in strategies:
            with _served(strategy, is_all_remote=is_all_remote) as app:
                for rate in rates_per_s:
                    generator = LoadGenerator(app.url, app.config.model.id, seed=1)
                    with ahead_of_others():
                        records = asyncio.run(generator.replay(arrivals(rate, seed=round(10 * rate))))
                    measured = [one for one in records if one.sent_s >= _WARM_UP_S]
                    row: Row = {"case": "real", "load": rate, "strategy": strategy, "all_remote": is_all_remote}
                    rows.append({**row, **figures(measured, _SLO, 500), "places": _places(app)})
                    save(rows)
                    console.print(table("Real engines: TTFT, s; load in requests/s", rows))


def _places(app: Any) -> dict[str, float]:
    """Prompts that asked the queue for a replica, by outcome, since the start."""
    return {sample.labels["outcome"]: sample.value for sample in scrape(app.metrics_url, "tandem_prefill_places_total")}
