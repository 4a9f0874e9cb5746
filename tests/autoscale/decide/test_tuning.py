"""Which settings may change while an application runs, and which changes are refused."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from autoscale.decide.config import AutoscaleConfig
from autoscale.decide.tuning import Pools, check_fits, differing, merged, tuned
from autoscale.ratio import PdRatio
from kvtransfer.topology import Role

MakeConfig = Callable[..., AutoscaleConfig]
POOLS = Pools.model_validate(
    {
        "prefill:g0": {"lowest_replicas": 1, "highest_replicas": 4, "gpus_per_replica": 2},
        "decode:g0": {"lowest_replicas": 1, "highest_replicas": 12, "gpus_per_replica": 1},
    }
)


def test_changes_are_put_over_the_deployed_configuration(make_autoscale: MakeConfig) -> None:
    base = make_autoscale(pd_ratio="1:3")
    config = tuned(base, {"pd_ratio": "1:2", "policy": {"target": 70}, "guard": {"cooldown_in_s": 5}}, POOLS)
    assert config.pd_ratio == PdRatio(1, 2)
    assert config.policy.target == 70  # type: ignore[union-attr]
    assert config.guard.cooldown_in_s == 5
    assert config.guard.step_in_replicas == base.guard.step_in_replicas
    assert tuned(base, {}, POOLS) == base


def test_another_policy_replaces_the_whole_policy(make_autoscale: MakeConfig) -> None:
    config = tuned(make_autoscale(), {"policy": {"kind": "queue_depth", "decode_requests_per_s": 2}}, POOLS)
    assert config.policy.kind == "queue_depth"


def test_the_same_policy_named_again_keeps_its_other_fields() -> None:
    base = {"policy": {"kind": "static", "prefill": 2, "decode": 6}}
    changed = merged(base, {"policy": {"kind": "static", "decode": 9}})
    assert changed == {"policy": {"kind": "static", "prefill": 2, "decode": 9}}


def test_a_setting_that_was_tuned_back_no_longer_differs() -> None:
    base = {"a": {"b": 1, "c": 2}, "d": 3}
    assert differing({"a": {"b": 1, "c": 5}, "d": 3, "e": None}, base) == {"a": {"c": 5}}
    assert differing({"a": {"b": 1}}, base) == {}
    assert differing({"a": None}, base) == {"a": None}


def test_none_is_a_value() -> None:
    assert merged({"a": {"b": 1, "c": 2}}, {"a": {"b": None}}) == {"a": {"b": None, "c": 2}}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pd_ratio": "1:9"}, "between 1:5 and 9:1"),
        ({"pd_ratoi": "1:3"}, "Extra inputs are not permitted"),
        ({"policy": {"kind": "magic"}}, "'heteroscale', 'periodic'"),
        ({"policy": {"signal": "cpu"}}, "'decode_tps', 'prefill_tps'"),
        ({"guard": {"budget_gpus": 2}}, r"no counts between 1P1D and 4P12D are at the ratio 1:3 within 2 GPUs: change"),
        (
            {"policy": {"kind": "periodic", "periods": [{"begins": "0 8 * * *", "decode": 14}]}},
            r"begins at '0 8 \* \* \*' wants 5P14D, which lies outside 1P1D to 4P12D: change its counts",
        ),
        (
            {
                "policy": {"kind": "periodic", "periods": [{"begins": "0 8 * * *", "decode": 9}]},
                "guard": {"budget_gpus": 12},
            },
            "wants 3P9D, .* takes more than 12 GPUs",
        ),
        (
            {"policy": {"kind": "periodic", "periods": [{"begins": "0 8 * * *", "prefill": 2, "decode": 10}]}},
            r"wants 2P10D, 1.3 replicas of the smaller role off the ratio 1:3: give one of the two counts",
        ),
        (
            {"floors": {"periods": [{"begins": "0 8 * * *", "lasts_s": 3600, "decode": 13}]}},
            "floors.periods.0.decode is 13, but at most 12 decode replicas are allowed: lower it, or raise the groups'",
        ),
        (
            {
                "floors": {"periods": [{"begins": "0 8 * * *", "lasts_s": 3600, "decode": 12}]},
                "guard": {"budget_gpus": 13},
            },
            r"floors.periods.0 requires 1P12D, which take 14 GPUs, and guard.budget_gpus is 13: lower the floor",
        ),
        (
            {"floors": {"periods": [{"begins": "0 8 * * *", "lasts_s": 3600, "decode": 0}]}},
            "floors.periods.0.decode|greater than or equal to 1",
        ),
        ({"gate": {"band_replicas": 0.5}}, r"gate.band_replicas \(0.5\) is narrower than guard.band_replicas \(1\)"),
        ({"bounds": {"decode": {"highest_replicas": 99}}}, r"bounds.decode \(1 to 99\) reach beyond what decode:g0"),
        ({"bounds": {"decode": {"lowest_replicas": 5, "highest_replicas": 4}}}, "is more than highest_replicas"),
        (
            {"pd_ratio": "5:1", "bounds": {"decode": {"lowest_replicas": 6, "highest_replicas": 8}}},
            "no counts between 1P6D and 4P8D are at the ratio 5:1: change",
        ),
        ({"override": {"prefill": 9, "decode": 1}}, "9P1D lies outside 1P1D to 4P12D: set counts inside"),
        ({"pd_ratio": 63}, "a P/D ratio of 63 is impossible: .* in quotes: YAML reads 1:3 as 63"),
        ({"slo": {"ttft_s": 600.0}}, "slo.ttft_s|less than or equal to 250"),
        ({"override": {"prefill": 4, "decode": 8}, "guard": {"budget_gpus": 12}}, "takes more than 12 GPUs"),
        ({"stale_s": 1}, r"stale_s \(1\) must be at least twice the time between decisions \(5 s\)"),
        ({"is_observing": True, "override": {"prefill": 1, "decode": 3}}, "not acted on while is_observing"),
        ({"window_s": 0.5}, r"window_s \(0.5\) must be at least twice"),
        ({"interval_s": 20.0, "stale_s": 40.0}, r"window_s \(20\) must be at least twice"),
        # Replicas go on reporting every 2.5 s, as deployed.
        ({"interval_s": 1.0, "stale_s": 2.0}, r"stale_s \(2\) must be at least twice .* \(2.5 s\)"),
        ({"guard": {"cooldown_in_s": float("nan")}}, "finite number"),
    ],
)
def test_a_change_that_contradicts_itself_or_the_pools_is_refused_with_the_fix(
    make_autoscale: MakeConfig, changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        tuned(make_autoscale(pd_ratio="1:3"), changes, POOLS)


def test_one_bound_alone_leaves_the_other_as_deployed(make_autoscale: MakeConfig) -> None:
    pools = Pools({key: replace(limits, lowest_replicas=2) for key, limits in POOLS.root.items()})
    config = tuned(make_autoscale(pd_ratio="1:3"), {"bounds": {"decode": {"highest_replicas": 6}}}, pools)
    assert config.bounds_of(Role.DECODE, 2, 12) == (2, 6)
    again = tuned(config, {"bounds": {"decode": {"lowest_replicas": 3}}}, pools)
    assert again.bounds_of(Role.DECODE, 2, 12) == (3, 6)
    assert again.bounds_of(Role.PREFILL, 2, 4) == (2, 4)


def test_a_budget_is_refused_if_no_replica_has_a_gpu(make_autoscale: MakeConfig) -> None:
    pools = Pools({key: replace(limits, gpus_per_replica=0) for key, limits in POOLS.root.items()})
    with pytest.raises(ValueError, match=r"guard.budget_gpus \(12\) limits nothing"):
        check_fits(make_autoscale(pd_ratio="1:3", guard={"budget_gpus": 12}), pools)


def test_bounds_inside_the_deployed_ones_fit(make_autoscale: MakeConfig) -> None:
    check_fits(make_autoscale(pd_ratio="1:3", bounds={"decode": {"lowest_replicas": 3, "highest_replicas": 6}}), POOLS)


def test_a_floor_inside_bounds_and_budget_fits(make_autoscale: MakeConfig) -> None:
    floors = {"periods": [{"begins": "0 8 * * *", "ends": "0 9 * * *", "prefill": 2, "decode": 8}]}
    config = tuned(make_autoscale(pd_ratio="1:3", guard={"budget_gpus": 12}), {"floors": floors}, POOLS)
    assert config.floors.periods[0].counts == {Role.PREFILL: 2, Role.DECODE: 8}
    assert tuned(config, {"floors": {"prewarm_s": 30}}, POOLS).floors.periods == config.floors.periods


def test_a_floor_of_prefill_is_refused_where_groups_have_none(make_autoscale: MakeConfig) -> None:
    floors = {"periods": [{"begins": "0 8 * * *", "ends": "0 9 * * *", "prefill": 2, "decode": 8}]}
    with pytest.raises(ValueError, match=r"floors.periods.0.prefill is 2, and pd_ratio is 0:1, .* leave it out"):
        make_autoscale(pd_ratio="0:1", policy={"kind": "wva"}, floors=floors)


def test_a_period_is_checked_with_the_rounding_of_the_guard(make_autoscale: MakeConfig) -> None:
    pools = Pools({key: replace(limits, highest_replicas=13) for key, limits in POOLS.root.items()})
    bounds = {"prefill": {"highest_replicas": 4}}
    policy = {"kind": "periodic", "periods": [{"begins": "0 8 * * *", "decode": 13}]}

    def config(shortfall_replicas: float) -> AutoscaleConfig:
        guard = {"shortfall_replicas": shortfall_replicas}
        return make_autoscale(pd_ratio="1:3", policy=policy, bounds=bounds, guard=guard)

    check_fits(config(0.5), pools)  # 13 / 3 = 4.33 prefill replicas, which round to 4
    with pytest.raises(ValueError, match="wants 5P13D, which lies outside 1P1D to 4P13D"):
        check_fits(config(0.0), pools)


def test_a_ratio_that_does_not_fit_the_roles_is_refused(make_autoscale: Callable[..., AutoscaleConfig]) -> None:
    base = make_autoscale(pd_ratio="1:3")
    with pytest.raises(ValueError, match="pd_ratio is 0:1, and groups have prefill"):
        tuned(base, {"pd_ratio": "0:1"}, POOLS)
    alone = Pools({key: limits for key, limits in POOLS.root.items() if key.role is Role.DECODE})
    with pytest.raises(ValueError, match="pd_ratio is 1:3, and no group has prefill"):
        tuned(base, {}, alone)
