"""Tuned on one slice, reported on another: what is compared, and which policy counts as better."""

import gzip
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import typer

from autoscale.sim.config import SimConfig
from autoscale.sim.curate import SPACES
from autoscale.traces.trace import TraceRequest
from kvtransfer.topology import Role
from tests.lab.truth.quality import Report, Workload, main, report

CONFIG = SimConfig.load(Path(__file__).parents[3] / "configs" / "sim" / "h100_llama70b.yaml")
# The pressure test of a small cluster takes a second, that of the usual 64 GPUs half a minute.
HIGHEST_REPLICAS = 2
OTHERS = sorted(set(SPACES) - {"default"})
WORKLOAD = Workload(
    name="small", file="none", tuning=(0, 60), reporting=(60, 60), rate_scale=1.0, is_bursty=False, warm_up_s=20.0
)


@pytest.fixture(scope="module", name="found")
def _found() -> Report:
    rng, trace, at_s = random.Random(0), list[TraceRequest](), 0.0
    while (at_s := at_s + rng.expovariate(4.0)) < 120.0:
        trace.append(TraceRequest(at_s=at_s, input_tokens=rng.randint(200, 2500), output_tokens=rng.randint(10, 60)))
    (group,) = CONFIG.groups
    small = {role: getattr(group, role).model_copy(update={"highest_replicas": HIGHEST_REPLICAS}) for role in Role}
    changes = {"groups": (group.model_copy(update=small),), "warm_up_s": 10.0, "oracle_simulated_requests": 1}
    config = CONFIG.model_copy(update=changes)
    with ThreadPoolExecutor(2) as pool:
        return report(config, WORKLOAD, trace, kinds=OTHERS, tries=1, seeds=1, pool=pool, say=lambda line: None)


def test_every_policy_is_tuned_but_ours_and_all_are_reported(found: Report) -> None:
    assert set(found.candidates) == set(OTHERS)
    assert all(len(each) == 1 for each in found.candidates.values())
    assert set(found.study.names) == {"default", *OTHERS}
    for kind, (candidate,) in found.candidates.items():
        assert found.study.config.policies[kind] == candidate.changes
    assert found.study.config.policies["default"] == CONFIG.policies["default"]
    assert found.study.config.warm_up_s == found.study.seeds[0].scenario.warm_up_s == 20.0
    assert found.tuned_on.scenario.warm_up_s == 10.0
    first_s = min(request.at_s for request in found.study.seeds[0].scenario.trace)
    assert first_s < 60.0  # times begin with the slice
    assert found.study.requests + found.tuned_on.scenario.trace.__len__() == pytest.approx(480, abs=80)


def test_better_means_at_least_as_good_in_both_and_better_in_one(found: Report) -> None:
    (seed,) = found.study.seeds
    ours = seed.policies["default"]

    def with_other(attained: float, hours: float) -> Report:
        outcome = replace(ours.outcome, slo_attainment_frac=attained, gpu_hours=hours)
        policies = {"default": ours, "other": replace(ours, outcome=outcome)}
        study = replace(found.study, names=["default", "other"], seeds=[replace(seed, policies=policies)])
        return replace(found, study=study)

    attained, hours = ours.outcome.slo_attainment_frac, ours.outcome.gpu_hours
    assert with_other(attained, hours).better() == []
    assert with_other(attained, hours * 0.99).better() == ["other"]
    assert with_other(attained - 0.01, hours * 0.5).better() == []
    assert with_other(attained + 1e-6, hours).better() == ["other"]
    assert with_other(attained + 1e-6, hours * 1.01).better() == []


def test_steady_traffic_is_compared_with_the_bounds_and_bursts_with_fixed_counts(found: Report) -> None:
    steady = found.verdicts()
    bursty = replace(found, workload=replace(WORKLOAD, is_bursty=True)).verdicts()
    assert {"SLO met >= 99.40%", "<= 1.35 x the oracle", "<= 1.1 x the causal bound"} <= set(steady)
    assert "GPU-hours <= 0.85 x smallest static" in bursty
    assert steady["oracle's peak >= 40 replicas"] == (str(found.study.bounds[0].oracle.peak_replicas), False)
    outcome = found.study.seeds[0].policies["default"].outcome
    assert steady["SLO met >= 99.40%"][1] == (outcome.slo_attainment_frac >= 0.994)


@pytest.mark.parametrize(
    ("only", "rows", "says"),
    [
        (["nothing"], None, "--only: begin one of Azure code 2023"),
        (None, None, "azure_code_2023.csv.gz: not there; see configs/traces/README.md"),
        (["Azure code"], "5,3,4\n", "no request arrives after the warm-up"),
        (["Azure code"], "5,3,4\n80,3,4\n", "no request from 253 to 1706 s: give the whole trace"),
        (["Azure code"], "80,3,4\n5,3,4\n", "azure_code_2023.csv.gz: line 3"),
    ],
)
def test_wrong_traces_are_refused_before_anything_runs(
    tmp_path: Path, only: list[str] | None, rows: str | None, says: str
) -> None:
    if rows is not None:
        text = f"timestamp_s,input_tokens,output_tokens\n{rows}"
        (tmp_path / "azure_code_2023.csv.gz").write_bytes(gzip.compress(text.encode()))
    with pytest.raises(typer.BadParameter) as raised:
        main(tmp_path, only=only)
    assert says in str(raised.value)


def test_an_unknown_policy_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(typer.BadParameter, match=r"--policy none: not one of .*dopd"):
        main(tmp_path, policy=["none"])
