"""A virtual endpoint refuses and lets wait as the live one does, and policies see all demand."""

import random
from functools import cache
from typing import Any

import pytest

from autoscale.report import Slo
from autoscale.sim.config import SimAutoscaleConfig, SimConfig
from autoscale.sim.scenario import Run, run_policy
from kvtransfer.topology import Role
from router.admission_config import AdmissionConfig
from tests.autoscale.sim.conftest import KEYS, LLAMA, PROFILE, make_scenario

P, D = KEYS[Role.PREFILL], KEYS[Role.DECODE]
_START_S, _INTERVAL_S, _WINDOW_S = 20.0, 5.0, 20.0
_STEP_S, _END_S = 120.0, 400.0
_BASE_PER_S, _FACTOR = 6.0, 5.0
POLICIES: dict[str, dict[str, Any]] = {
    "queue_depth": {"prefill_requests_per_s": 6.0, "decode_requests_per_s": 9.0},
    "heteroscale": {"signal": "decode_tps", "target": 900.0},
    "default": {},
    "dopd": {"interval_s": 20.0},
    "token_velocity": {},
    "wva": {},
}


def arrivals(factor: float) -> list[tuple[float, int, int]]:
    """Poisson arrivals of 2,000 + 100 tokens, whose rate is multiplied by ``factor`` at ``_STEP_S``."""
    rng, at_s, arrived = random.Random(3), 0.0, []
    while at_s < _END_S:
        arrived.append((at_s, 2000, 100))
        at_s += rng.expovariate(_BASE_PER_S * (factor if at_s >= _STEP_S else 1.0))
    return arrived


@cache
def stepped(kind: str, has_admission: bool) -> Run:
    """Two replicas of each role, which are enough until the load is five times as high."""
    policy: dict[str, Any] = {"kind": kind, **POLICIES[kind]}
    if kind in ("default", "dopd", "token_velocity"):
        starts = {f"{role}_start_s": _START_S for role in Role}
        policy |= {"prefill": PROFILE, "decode": PROFILE, **starts}
    config = SimAutoscaleConfig.model_validate(
        {
            "pd_ratio": "3:2",
            "policy": policy,
            "slo": {"ttft_s": 2.0},
            "interval_s": _INTERVAL_S,
            "window_s": _WINDOW_S,
            "gate": {"is_enabled": kind != "default"},
        }
    )
    admission = AdmissionConfig(ttft_s=2.0) if has_admission else None
    scenario = make_scenario(arrivals(_FACTOR), start_s=_START_S, highest=64, admission=admission)
    return run_policy(scenario, config, {P: 2, D: 2})


def enough_s(run: Run) -> float:
    """When as many prefill replicas were wanted first as serve the load after the step: two serve a fifth of it."""
    fewest = 2 * _FACTOR / 2  # 12 requests/s fill two replicas, and 30 arrive
    return next(at_s for at_s, plan in run.plans if at_s > _STEP_S and plan.state.desired[P] >= fewest)


@pytest.mark.parametrize("kind", POLICIES)
def test_admission_hides_no_demand_from_the_policy(kind: str) -> None:
    """Within two intervals of the time without admission, as many replicas are wanted as serve the load."""
    assert enough_s(stepped(kind, True)) <= enough_s(stepped(kind, False)) + 2 * _INTERVAL_S


@pytest.mark.parametrize("kind", POLICIES)
def test_refusals_end_once_the_replicas_serve_and_nothing_oscillates(kind: str) -> None:
    run = stepped(kind, True)
    refused = [record for record in run.records if (record.error or "").startswith("refused")]
    assert len(refused) > 100
    settled_s = 250.0
    late = [
        (slo, record) for slo, record in zip(run.scenario.slos, run.records, strict=True) if record.sent_s > settled_s
    ]
    in_time = sum(Slo(ttft_s=2.0, tpot_s=slo.tpot_s).is_met(record) for slo, record in late)
    assert in_time / len(late) >= 0.95


def test_every_request_is_answered_or_refused() -> None:
    run = stepped("queue_depth", True)
    assert len(run.records) == len(run.scenario.trace)
    reasons = {record.error for record in run.records if record.error}
    assert reasons <= {"refused: predicted_ttft", "refused: late"}
    traffic = run.plans[-1][1]
    assert traffic is not None


def test_an_answer_limit_keeps_the_pace() -> None:
    scenario = make_scenario(
        [(0.01 * n, 50, 200) for n in range(6000)], admission=AdmissionConfig(ttft_s=2.0, tpot_s=0.03)
    )
    config = SimAutoscaleConfig.model_validate({"policy": {"kind": "static", "prefill": 1, "decode": 1}})
    run = run_policy(scenario, config, {P: 1, D: 1})
    answered = sorted(record.tpot_s for record in run.records if record.tpot_s is not None and record.sent_s > 20.0)
    assert any(record.error for record in run.records)
    assert answered[len(answered) // 2] < 0.033


def test_a_simulation_takes_the_objectives_of_its_slo() -> None:
    document = LLAMA.model_dump(mode="json", exclude_defaults=True) | {"admission": {"from_slo": True}}
    config = SimConfig.model_validate(document)
    assert config.admission_config is not None
    assert (config.admission_config.ttft_s, config.admission_config.tpot_s) == (1.0, 0.05)
    assert LLAMA.admission_config is None
