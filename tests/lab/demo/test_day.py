"""The demonstration's days: their load fits a small machine, and their tunings fit the deployed configuration."""

import numpy as np
import pytest

from autoscale.decide.config import AutoscaleConfig
from autoscale.decide.tuning import Pools, tuned
from autoscale.engines.profile import EngineProfile
from kvtransfer.topology import Role
from tests.lab.demo.day import CHAT, CODE, DAY_S, HIGHEST_LEADERS, MORNING_SLOWER, Service, objectives


@pytest.mark.parametrize("service", [CHAT, CODE])
def test_a_day_stays_within_the_capacity_of_the_machine(service: Service) -> None:
    trace = service.day(DAY_S)
    arrivals = np.histogram([r.at_s for r in trace], bins=np.arange(0.0, DAY_S + 1, 15.0))[0] / 15.0
    assert arrivals.max() <= 15.0
    assert arrivals.min() < arrivals.max() / 4
    assert max(r.input_tokens + r.output_tokens for r in trace) <= 8000


@pytest.mark.parametrize("service", [CHAT, CODE])
def test_a_morning_is_a_part_of_the_day_that_rises(service: Service) -> None:
    trace = service.morning(DAY_S)
    assert 0.0 <= trace[0].at_s < trace[-1].at_s < MORNING_SLOWER * DAY_S / 4
    first, second = np.histogram([r.at_s for r in trace], bins=2)[0]
    assert second > 1.3 * first


@pytest.mark.parametrize("service", [CHAT, CODE])
def test_the_tuning_fits_the_deployed_configuration(service: Service) -> None:
    base = AutoscaleConfig.model_validate({"policy": {"kind": "heteroscale", "target": 1.0}})
    pools = Pools.model_validate(
        {f"{role}:g0": {"lowest_replicas": 1, "highest_replicas": HIGHEST_LEADERS} for role in Role}
    )
    config = tuned(base, service.tuning(), pools)
    assert config.pd_ratio == service.ratio
    assert sum(service.counts(HIGHEST_LEADERS).values()) == 12


def test_an_objective_is_a_second_or_three_times_the_unloaded_time(root: object) -> None:
    profile = EngineProfile.load(root / "configs" / "profiles" / "h100_llama70b_fp8_tp1.json")  # type: ignore[operator]
    trace = CODE.day(DAY_S)
    slos = objectives(trace, dict.fromkeys(Role, profile))
    assert min(slo.ttft_s for slo in slos) == 1.0
    longest = max(range(len(trace)), key=lambda index: trace[index].input_tokens)
    assert slos[longest].ttft_s > 3 * profile.prefill.seconds_for(trace[longest].input_tokens)


def test_a_shorter_day_has_fewer_requests_at_the_same_rate() -> None:
    whole, half = CHAT.day(DAY_S), CHAT.day(DAY_S / 2)
    assert len(half) == len(whole) // 2
    assert half[-1].at_s == pytest.approx(whole[-1].at_s / 2, rel=0.01)
