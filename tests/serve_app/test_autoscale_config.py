"""An application's autoscale settings fit its groups and Serve's autoscaling_policy, or are refused."""

from collections.abc import Callable
from typing import Any

import pytest

from serve_app.checks.yaml_checks import ConfigError, parse_app_config

SCALED = [{"name": "g0", "prefill": {"max_replicas": 4}, "decode": {"max_replicas": 12}}]
ALONE = [{"name": "g1", "prefill": None, "decode": {"max_replicas": 4}}]
POLICY = {"kind": "heteroscale", "target": 500}
MakeArgs = Callable[..., dict[str, Any]]


def test_bounds_of_the_groups_are_the_deployed_ones(make_app_args: MakeArgs) -> None:
    config = parse_app_config(make_app_args(groups=SCALED, autoscale={"pd_ratio": "1:3", "policy": POLICY}))
    limits = {
        str(key): (pool.lowest_replicas, pool.highest_replicas)
        for key, pool in next(iter(config.pools().values())).root.items()
    }
    assert limits == {"prefill:g0": (1, 4), "decode:g0": (1, 12)}


@pytest.mark.parametrize(
    ("groups", "autoscale", "message"),
    [
        (SCALED, None, "max_replicas of prefill:g0 does nothing without autoscale: add autoscale, or"),
        (
            [{"name": "g0", "prefill": {"replicas": 0}, "decode": {"replicas": 0}}],
            None,
            "prefill:g0 has 0 replicas, and without autoscale it never wakes: add autoscale, or set replicas to 1",
        ),
        (
            SCALED,
            {"policy": POLICY, "gpu_types": {"decode": ["H100"]}},
            "gpu_types allows H100 for decode, and decode:g0 has no GPU: leave decode out of gpu_types",
        ),
        ([{"name": "g0"}], {"policy": POLICY}, "autoscale needs max_replicas of every pool, and prefill:g0 has none"),
        ([{"name": "g0", "decode": {"replicas": 3, "max_replicas": 2}}], None, r"max_replicas \(2\) is less than"),
        (SCALED, {"policy": {"kind": "heteroscale"}}, "autoscale.policy: target is missing"),
        (SCALED, {"policy": {"kind": "best"}}, "autoscale.policy: kind 'best' is unknown: give one of 'default', "),
        (
            SCALED,
            {"policy": {"kind": "tests.autoscale.own:Fixed", "decode": -1}},
            "^autoscale.policy.decode: Input should be greater than 0, got -1$",
        ),
        (
            SCALED,
            {"policy": {"kind": "tests.autoscale.own:Fixed", "target": 1}},
            "^autoscale.policy.target: no such field",
        ),
        (
            SCALED,
            {"policy": {"kind": "no_such_package:Mine"}},
            "^autoscale.policy: policy no_such_package:Mine cannot be imported: .* on every node",
        ),
        (
            SCALED,
            {"policy": POLICY, "collector": {"kind": "tests.autoscale.own:Figures", "timeout_s": 0}},
            "^autoscale.collector.timeout_s: Input should be greater than 0",
        ),
        (SCALED, {"pd_ratio": "1:8", "policy": POLICY}, "autoscale.pd_ratio: a P/D ratio of 1:8 is impossible"),
        (SCALED, {"policy": POLICY, "guard": {"budget_gpus": 0}}, "autoscale.guard.budget_gpus"),
        (
            [{"name": "g0", "prefill": {"max_replicas": 4}, "decode": {"replicas": 11, "max_replicas": 12}}],
            {"pd_ratio": "9:1", "policy": POLICY},
            "no counts between 1P11D and 4P12D are at the ratio 9:1",
        ),
        (
            ALONE,
            {"policy": {"kind": "wva"}},
            "pd_ratio is 1:1, and group 'g1' has no prefill pool: set pd_ratio",
        ),
        (
            SCALED,
            {"pd_ratio": "0:1", "policy": {"kind": "wva"}},
            "pd_ratio is 0:1, and group 'g0' has a prefill pool: ",
        ),
        (
            [*ALONE, *SCALED],
            {"pd_ratio": "0:1", "policy": {"kind": "wva"}},
            "'g1' comes first and has no prefill pool, and group 'g0' has one: put a group with a prefill pool first",
        ),
    ],
)
def test_settings_that_the_groups_cannot_follow_are_refused_before_anything_starts(
    make_app_args: MakeArgs, groups: list[Any], autoscale: dict[str, Any] | None, message: str
) -> None:
    args = make_app_args(groups=groups, **({} if autoscale is None else {"autoscale": autoscale}))
    with pytest.raises(ConfigError, match=message):
        parse_app_config(args)


@pytest.mark.ray
@pytest.mark.parametrize(
    ("policy", "autoscale", "message"),
    [
        (None, {"policy": POLICY}, "args.autoscale needs .*JointPolicy'} here, got None"),
        (
            {"policy_function": "autoscale.ray_policy:JointPolicy", "policy_kwargs": {"target": 1}},
            {"policy": POLICY},
            "args.autoscale needs .*JointPolicy'} here, got",
        ),
        ({"policy_function": "x:y"}, {"policy": POLICY}, "args.autoscale needs .* got {'policy_function': 'x:y'}"),
        ({"policy_function": "autoscale.ray_policy:JointPolicy"}, None, "there is no args.autoscale; add it"),
    ],
)
def test_serve_has_the_joint_policy_exactly_if_tandem_has_autoscale(
    make_app_args: MakeArgs, policy: dict[str, Any] | None, autoscale: dict[str, Any] | None, message: str
) -> None:
    from serve_app.checks.ray_schema import single_app_config

    args = make_app_args() if autoscale is None else make_app_args(groups=SCALED, autoscale=autoscale)
    application = {"import_path": "serve_app.app:build", "args": args}
    if policy is not None:
        application["autoscaling_policy"] = policy
    with pytest.raises(ConfigError, match=message):
        single_app_config({"applications": [application]})
