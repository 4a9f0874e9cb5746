"""The computed ratio against the goodput of engine models: the same three counts as on real engines."""

import random

from autoscale.engines.profile import EngineProfile
from tests.lab.bench import ratio


def test_the_computed_counts_have_the_best_goodput_of_engine_models() -> None:
    profile = EngineProfile.load(ratio._PROFILE)
    loads = [ratio.load(rate, 10.0, random.Random(1)) for rate in (16.0, 32.0)]
    fleet = ratio.computed(profile, [request for each in loads for request in each])
    measured = []
    for counts in ratio.COUNTS:
        goodputs = [report.goodput_requests_per_s or 0.0 for report in ratio.simulated(profile, counts, loads)]
        measured.append({"counts": counts, "best": max(goodputs)})
    document = ratio.as_document(fleet, measured)
    assert document["computed"] == document["best"] == (2, 1)
    assert document["replicas_off"] == 0
    # One prefill replica is the bottleneck, so a second decode replica adds nothing.
    by_counts = {each["counts"]: each["best"] for each in measured}
    assert by_counts[2, 1] > 1.5 * max(by_counts[1, 1], by_counts[1, 2])
