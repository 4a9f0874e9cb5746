"""The endpoint's report to the autoscaler: live and simulated endpoints write it, ``signals`` reads it (pure).

One replica of the endpoint serves all models of an application, so its report has the figures of each model. A figure's
name is ``FIGURE:MODEL``.
"""

from collections.abc import Mapping, Sequence

from autoscale.observe.histogram import TTFT_EDGES_S, Histogram
from autoscale.slo import SloConfig

# Begin of the names of refusals, which go on with ``REASON_PRIORITY`` (``router.demand``).
REFUSED = "refused_"


def endpoint_figures(
    demand: Mapping[str, float], waits: Sequence[tuple[int, float]], slo: SloConfig
) -> dict[str, float]:
    """The figures of one model.

    To the counters ``demand`` (``router.demand``) it adds gauges: requests that wait, their prompt tokens, and buckets
    ``late``, which count them by the time for which they have waited. These times are scaled as a replica scales a
    TTFT. ``waits``: prompt tokens, and waiting time in seconds, of each request that waits.
    """
    late = Histogram(TTFT_EDGES_S)
    for tokens, waited_s in waits:
        late.observe(slo.ttft_share(tokens) * max(0.0, waited_s))
    return {
        **demand,
        "waiting_requests": float(len(waits)),
        "waiting_tokens": float(sum(tokens for tokens, _ in waits)),
        **late.as_report("late"),
    }


def joined(figures: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """One report of the figures of all models, by model."""
    return {f"{name}:{model}": value for model, own in figures.items() for name, value in own.items()}


def figures_of(report: Mapping[str, float], model: str) -> dict[str, float]:
    """The figures of one model in a report."""
    suffix = f":{model}"
    return {name.removesuffix(suffix): value for name, value in report.items() if name.partition(":")[2] == model}


def refusal_of(name: str) -> tuple[str, str]:
    """Reason and priority of the refusals that a figure counts; ``name``: it begins with ``REFUSED``."""
    reason, _, priority = name.removeprefix(REFUSED).rpartition("_")
    return reason, priority
