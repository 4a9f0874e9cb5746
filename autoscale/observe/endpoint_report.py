"""The endpoint's report to the autoscaler: live and simulated endpoints write it, ``signals`` reads it (pure).

One replica of the endpoint serves all models of an application, so its report has the figures of each model. A figure's
name is ``FIGURE:MODEL``. Refusals have the figure ``refused_REASON_PRIORITY``.
"""

from collections.abc import Iterable, Mapping, Sequence

from autoscale.observe.histogram import TTFT_EDGES_S, Histogram
from autoscale.slo import SloConfig
from router.admission_config import Priority
from router.demand import Demand

REFUSED = "refused_"


def endpoint_figures(demand: Demand, waits: Sequence[tuple[int, float]], slo: SloConfig) -> dict[str, float]:
    """The figures of one model; ``waits``: prompt tokens, and waiting time in seconds, of each request that waits.

    Counters since the replica's start, and gauges: requests that wait and their prompt tokens, and buckets ``late``,
    which count them by the time for which they have waited. Waiting times are scaled as a replica scales a TTFT.
    """
    late = Histogram(TTFT_EDGES_S)
    for tokens, waited_s in waits:
        late.observe(slo.ttft_share(tokens) * max(0.0, waited_s))
    refused = {f"{REFUSED}{reason}_{priority.name.lower()}": n for (reason, priority), n in demand.refused.items()}
    return {
        "offered_requests": float(demand.offered_requests),
        "offered_tokens": float(demand.offered_tokens),
        "offered_tokens_squared": float(demand.offered_tokens_squared),
        "passed_requests": float(demand.passed_requests),
        "passed_tokens": float(demand.passed_tokens),
        "waiting_requests": float(len(waits)),
        "waiting_tokens": float(sum(tokens for tokens, _ in waits)),
        **{name: float(number) for name, number in refused.items()},
        **late.as_report("late"),
    }


def joined(figures: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """One report of the figures of all models, by model."""
    return {f"{name}:{model}": value for model, own in figures.items() for name, value in own.items()}


def figures_of(report: Mapping[str, float], model: str) -> dict[str, float]:
    """The figures of one model in a report."""
    suffix = f":{model}"
    return {name.removesuffix(suffix): value for name, value in report.items() if name.partition(":")[2] == model}


def refusals(names: Iterable[str]) -> dict[str, tuple[str, Priority]]:
    """Reason and priority of each refusal among the names of figures."""
    found = {}
    for name in names:
        reason, _, priority = name.removeprefix(REFUSED).rpartition("_")
        if name.startswith(REFUSED) and reason and priority.upper() in Priority.__members__:
            found[name] = (reason, Priority[priority.upper()])
    return found
