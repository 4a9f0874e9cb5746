"""What replicas of each group are worth: typed, by profile, or alike."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from autoscale.types import PoolKey
from deployments.config import ServiceConfig
from kvtransfer.topology import Role

P, D = Role.PREFILL, Role.DECODE
PROFILES = Path(__file__).parents[2] / "configs" / "profiles"
H100, A100 = ({"profile": str(PROFILES / f"{kind}_llama2_70b_tp4.json")} for kind in ("h100", "a100"))


def group(name: str, prefill: dict[str, Any] | None, decode: dict[str, Any]) -> dict[str, Any]:
    sizes = {"max_replicas": 4}
    return {"name": name, "prefill": None if prefill is None else {**sizes, **prefill}, "decode": {**sizes, **decode}}


def service(*groups: dict[str, Any], ratio: str = "1:2") -> ServiceConfig:
    return ServiceConfig.model_validate(
        {
            "model": {"id": "m", "source": "org/m"},
            "groups": groups,
            "autoscale": {
                "pd_ratio": ratio,
                "policy": {"kind": "heteroscale", "target": 100},
                "slo": {"tpot_s": 0.05},
            },
        }
    )


def worth(of: ServiceConfig) -> dict[str, tuple[float, float]]:
    """Capacity and prompt capacity of each pool, by its name."""
    limits = of.pool_limits().root
    return {str(key): (pool.capacity, pool.prompt_capacity) for key, pool in limits.items()}


def test_groups_without_profiles_are_alike() -> None:
    assert set(worth(service(group("a", {}, {}), group("b", {}, {}))).values()) == {(1.0, 0.0)}


def test_an_a100_counts_as_what_its_profile_says() -> None:
    known = worth(service(group("h100", H100, H100), group("a100", A100, A100)))
    assert known["prefill:h100"] == known["decode:h100"] == (1.0, 0.0)
    # Its prompts take about twice as long. Its steps take less than that, but within 50 ms its batch is much smaller.
    assert known["prefill:a100"] == (pytest.approx(0.47, abs=0.01), 0.0)
    assert known["decode:a100"] == (pytest.approx(0.32, abs=0.01), 0.0)


def test_a_capacity_that_a_person_gives_precedes_the_profile() -> None:
    known = worth(service(group("h100", H100, H100), group("a100", {**A100, "capacity": 0.6}, A100)))
    assert known["prefill:a100"] == (0.6, 0.0)
    assert known["decode:a100"] == worth(service(group("h100", H100, H100), group("a100", A100, A100)))["decode:a100"]


def test_a_pool_beside_one_with_a_typed_capacity_goes_by_its_profile() -> None:
    typed = worth(service(group("h100", H100, H100), group("a100", {"capacity": 0.6}, A100)))
    by_profile = worth(service(group("h100", H100, H100), group("a100", A100, A100)))
    assert typed["decode:a100"] == by_profile["decode:a100"]


def test_an_emulated_engine_brings_its_profile() -> None:
    fast, slow = ({"emulator": profile} for profile in (H100, A100))
    assert worth(service(group("h100", fast, fast), group("a100", slow, slow))) == worth(
        service(group("h100", H100, H100), group("a100", A100, A100))
    )


def test_an_emulated_engine_that_runs_at_half_speed_is_worth_half_of_the_prompts() -> None:
    slow = {"emulator": {**H100, "time_factor": 0.5}}
    known = worth(service(group("fast", H100, H100), group("slow", slow, slow)))
    assert known["prefill:slow"][0] == pytest.approx(0.5)
    assert known["decode:slow"][0] <= 0.5


@pytest.mark.parametrize(
    ("decode", "own", "prompts"),
    [
        ({}, 2 / 3, 1 / 3),  # at 1:2, the time of half a prefill replica for that of one decode replica
        ({"capacity": 1.5}, 1.5, 0.75),
    ],
)
def test_an_aggregated_group_beside_pairs_does_the_work_of_both(
    decode: dict[str, Any], own: float, prompts: float
) -> None:
    known = worth(service(group("a", {}, {}), group("both", None, decode)))
    assert known["decode:both"] == (pytest.approx(own), pytest.approx(prompts))


def test_an_aggregated_group_by_profile() -> None:
    known = worth(service(group("a", H100, H100), group("both", None, H100)))
    own, prompts = known["decode:both"]
    assert 0.0 < own < 1.0
    assert 0.0 < prompts < 1.0
    of = service(group("a", None, H100), group("b", None, A100), ratio="0:1")
    assert worth(of)["decode:b"][0] < 1.0
    assert worth(of)["decode:b"][1] == 0.0


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([group("a", {"capacity": 2.0}, {})], "capacity of prefill:a is 2, but replicas of the first group"),
        (
            [group("h100", H100, H100), group("a100", A100, {})],
            r"decode:a100 has neither a profile nor a capacity, and prefill:a100 has one: give decode:a100 its profile",
        ),
        (
            [group("a", {}, {}), group("b", {"capacity": 0.5}, {})],
            "decode:b has neither a profile nor a capacity, and prefill:b has one",
        ),
        (
            [group("a", H100, H100), group("b", {}, {})],
            "prefill:b has neither a profile nor a capacity, and prefill:a has one",
        ),
        (
            [group("a", H100, {}), group("b", A100, A100)],
            "prefill:b has a profile, and decode:a of the first group has none to compare it with",
        ),
        ([group("both", None, {}), group("a", {}, {})], "'both' comes first and has no prefill pool"),
    ],
)
def test_a_missing_profile_is_named(groups: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        service(*groups)


def test_a_profile_that_cannot_be_read_is_named() -> None:
    lost = {"profile": "nowhere/engine.json"}
    with pytest.raises(ValueError, match=r"nowhere/engine.json: No such file"):
        service(group("a", H100, H100), group("b", lost, lost)).pool_limits()


def test_one_group_needs_no_profile() -> None:
    lost = {"profile": "nowhere/engine.json"}
    limits = service(group("a", lost, lost)).pool_limits().root
    assert limits[PoolKey("a", D)].capacity == 1.0
