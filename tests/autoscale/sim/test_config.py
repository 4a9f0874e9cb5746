"""Laws of the simulator's configuration."""

from pathlib import Path

import pytest
import yaml

from autoscale.policies.default import DefaultConfig
from autoscale.sim.config import SimConfig
from autoscale.sim.scenario import run_policy, scenario_of
from autoscale.traces.trace import TraceRequest
from autoscale.types import PoolKey
from kvtransfer.topology import Role

CONFIGS = Path(__file__).parents[3] / "configs" / "sim"
PROFILE = str(Path(__file__).parents[3] / "configs" / "profiles" / "h100_llama70b_fp8_tp2.json")


GROUP = {"prefill": {"profile": PROFILE}, "decode": {"profile": PROFILE}}


def write(folder: Path, document: object) -> Path:
    path = folder / "sim.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def smallest(**changes: object) -> dict[str, object]:
    return {"groups": [{"prefill": {"profile": PROFILE}, "decode": {"profile": PROFILE, "start_s": 9}}], **changes}


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_committed_configurations_load_with_all_their_policies(path: Path) -> None:
    config = SimConfig.load(path)
    for name in config.policies:
        config.autoscale_config(name)


def test_the_first_configuration_by_name_is_an_h100_70b_one() -> None:
    first = min(CONFIGS.glob("*.yaml"))
    profile = SimConfig.load(first).groups[0].decode.profile
    assert profile.gpu == "H100"
    assert "70B" in profile.model


def test_policies_that_size_by_profiles_get_those_of_the_group_and_its_starts(tmp_path: Path) -> None:
    policy = SimConfig.load(write(tmp_path, smallest())).autoscale_config("default").policy
    assert isinstance(policy, DefaultConfig)
    assert policy.decode.name == "h100_llama70b_fp8_tp2"
    assert policy.start_s(Role.DECODE) == 9.0
    assert policy.start_s(Role.PREFILL) == 45.0


def test_the_fields_of_a_policy_replace_those_for_all_policies(tmp_path: Path) -> None:
    document = smallest(
        autoscale={"interval_s": 4, "guard": {"step_out_replicas": 3, "cooldown_in_s": 7}},
        policies={"mine": {"policy": {"kind": "heteroscale", "target": 9}, "guard": {"cooldown_in_s": 1}}},
    )
    config = SimConfig.load(write(tmp_path, document)).autoscale_config("mine")
    assert (config.interval_s, config.guard.step_out_replicas, config.guard.cooldown_in_s) == (4.0, 3, 1.0)
    assert config.policy.kind == "heteroscale"


def test_a_replica_has_the_gpus_of_its_profile_and_costs_1_for_each(tmp_path: Path) -> None:
    pool = SimConfig.load(write(tmp_path, smallest())).pools()[PoolKey("g0", Role.PREFILL)]
    assert (pool.gpus_per_replica, pool.cost) == (2, 2.0)


def test_each_group_keeps_its_own_engines_starts_and_costs(tmp_path: Path) -> None:
    h200 = PROFILE.replace("h100_llama70b_fp8_tp2", "h200_llama8b_fp8_tp1")
    pool = {"profile": h200, "start_s": 7, "cost_per_gpu_hour": 4}
    config = SimConfig.load(
        write(tmp_path, {"groups": [*smallest()["groups"], {"name": "b", "prefill": pool, "decode": pool}]})  # type: ignore[misc]
    )
    assert {key: each.gpu for key, each in config.profiles().items() if key.group == "b"} == {
        PoolKey("b", role): "H200" for role in Role
    }
    assert [(each.start_s, each.cost) for each in config.pools().values()] == [(45, 2), (9, 2), (7, 4), (7, 4)]
    # Policies that size by profiles take the first group's.
    assert config.autoscale_config("default").policy.decode.name == "h100_llama70b_fp8_tp2"  # type: ignore[union-attr]


def test_a_failure_strikes_the_group_that_it_names_or_the_first(tmp_path: Path) -> None:
    document = {
        "groups": [{**GROUP, "name": "a"}, {**GROUP, "name": "b"}],
        "failures": [{"at_s": 1, "role": "decode", "group": "b"}, {"at_s": 2, "role": "prefill", "replicas": 3}],
    }
    trace = [TraceRequest(at_s=100.0, input_tokens=9, output_tokens=9)]
    config = SimConfig.load(write(tmp_path, document))
    scenario = scenario_of(config, trace)
    run = run_policy(scenario, config.autoscale_config("hpa"), dict.fromkeys(scenario.pools, 4))
    ends = [(life.key, life.stopped_s) for life in run.fleet.lives if life.stopped_s in (1.0, 2.0)]
    assert ends == [(PoolKey("a", Role.PREFILL), 2.0)] * 3 + [(PoolKey("b", Role.DECODE), 1.0)]


@pytest.mark.parametrize("policy", ["default", "heteroscale", "hpa"])
def test_floors_hold_in_the_simulator_for_every_policy_by_the_time_of_the_trace(tmp_path: Path, policy: str) -> None:
    # The trace's second 0 is midnight in UTC: the floor holds from 240 to 360 s.
    period = {"begins": "4 0 * * *", "ends": "6 0 * * *", "decode": 6}
    document = smallest(
        autoscale={"pd_ratio": "1:2", "floors": {"prewarm_s": 60.0, "periods": [period]}},
        policies={"heteroscale": {"policy": {"target": 2000}}},
    )
    trace = [TraceRequest(at_s=10.0 * number, input_tokens=100, output_tokens=10) for number in range(45)]
    config = SimConfig.load(write(tmp_path, document))
    scenario = scenario_of(config, trace)
    run = run_policy(scenario, config.autoscale_config(policy), dict.fromkeys(scenario.pools, 1))
    decode = {at_s: plan.state.desired[PoolKey("g0", Role.DECODE)] for at_s, plan in run.plans}
    assert {count for at_s, count in decode.items() if 180.0 <= at_s < 360.0} == {6}
    assert max(count for at_s, count in decode.items() if 100.0 <= at_s < 180.0) < 6


@pytest.mark.parametrize(
    ("document", "says"),
    [
        (smallest(autoscale={"floors": {"time_zone": "Mars"}}, policies={"hpa": {}}), "floors.time_zone: 'Mars' is no"),
        ([], "expected groups"),
        ({"groups": []}, "groups"),
        (smallest(nonsense=1), "nonsense"),
        (smallest(autoscale={"policy": {"kind": "static"}}), "give it under policies"),
        (smallest(policies={"mine": {}}), "policies.mine: give policy.kind, one of"),
        (smallest(policies={"mine": {"policy": {"kind": "default", "prefill_busy_frac": 3}}}), "prefill_busy_frac"),
        (smallest(slo={"attainment_frac": 1.0}), "slo.attainment_frac"),
        (smallest(policies={"a,b": {"policy": {"kind": "default"}}}), "'a,b' is no name for a policy"),
        (smallest(policies={"oracle": {"policy": {"kind": "default"}}}), "'oracle' is no name for a policy"),
        (
            smallest(policies={"st": {"policy": {"kind": "static", "prefill": 1, "decode": 999}}}),
            "policies.st.policy.decode: 999 is not from 1 to 256, as groups allow",
        ),
        ({"groups": [{"prefill": {"profile": "none.json"}, "decode": {"profile": PROFILE}}]}, "none.json"),
        ({"groups": [GROUP, GROUP]}, "two are named 'g0'"),
        ({"groups": [GROUP, {**GROUP, "name": "b", "link_tier": 2}]}, "link_tier 2 to all or to none"),
        (smallest(failures=[{"at_s": 1, "role": "decode", "group": "b"}]), "there is no group 'b': choose among g0"),
        (
            {"groups": [{"prefill": {"profile": PROFILE, "lowest_replicas": 300}, "decode": {"profile": PROFILE}}]},
            "lowest_replicas (300) is more than highest_replicas (256)",
        ),
    ],
)
def test_a_wrong_configuration_names_its_file_and_field(tmp_path: Path, document: object, says: str) -> None:
    path = write(tmp_path, document)
    with pytest.raises(ValueError) as raised:
        SimConfig.load(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert says in str(raised.value)


def test_a_missing_or_broken_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        SimConfig.load(tmp_path / "none.yaml")
    (tmp_path / "twice.yaml").write_text("slo: {tpot_s: 0.05, tpot_s: 0.5}")
    with pytest.raises(ValueError, match="tpot_s stands there twice"):
        SimConfig.load(tmp_path / "twice.yaml")
    (tmp_path / "broken.yaml").write_text("a: [")
    with pytest.raises(ValueError, match="not YAML"):
        SimConfig.load(tmp_path / "broken.yaml")


def test_an_unknown_policy_is_named_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no policy 'nope': choose among .*default.*wva"):
        SimConfig.load(write(tmp_path, smallest())).autoscale_config("nope")


def test_a_group_without_prefill_serves_beside_one_with_it(tmp_path: Path) -> None:
    both = {**GROUP, "name": "both", "prefill": None}
    document = smallest(policies={"default": {"gate": {"is_enabled": False}}}, warm_up_s=10)
    config = SimConfig.load(write(tmp_path, {**document, "groups": [GROUP, both]}))
    pools = config.pools()
    assert list(pools) == [PoolKey("g0", Role.PREFILL), PoolKey("g0", Role.DECODE), PoolKey("both", Role.DECODE)]
    assert 0.0 < pools[PoolKey("both", Role.DECODE)].capacity < 1.0
    assert 0.0 < pools[PoolKey("both", Role.DECODE)].prompt_capacity < 1.0
    trace = [TraceRequest(at_s=0.2 * number, input_tokens=500, output_tokens=20) for number in range(300)]
    run = run_policy(scenario_of(config, trace), config.autoscale_config("default"), dict.fromkeys(pools, 1))
    assert all(record.error is None for record in run.measured)
    served = {life.key for life in run.fleet.lives if life.work.output_tokens}
    assert served == set(pools)


def test_a_service_of_groups_without_prefill_needs_the_ratio_0_to_1(tmp_path: Path) -> None:
    both = {**GROUP, "prefill": None}
    config = SimConfig.load(write(tmp_path, {"groups": [both], "autoscale": {"pd_ratio": "0:1"}}))
    policy = config.autoscale_config("default").policy
    assert isinstance(policy, DefaultConfig) and policy.prefill == policy.decode
    with pytest.raises(ValueError, match=r"the oracle: needs a group with a prefill pool: give groups\.0\.prefill"):
        config.check_one_pair("the oracle")


def test_a_group_with_prefill_comes_first(tmp_path: Path) -> None:
    document = {"groups": [{**GROUP, "name": "both", "prefill": None}, GROUP]}
    with pytest.raises(ValueError, match="'both' comes first and has no prefill pool"):
        SimConfig.load(write(tmp_path, document))


def test_a_ratio_that_follows_the_requests_takes_the_first_groups_profiles(tmp_path: Path) -> None:
    settings = {"pd_ratio": "auto", "auto_ratio": {"interval_s": 20, "least_requests": 40}}
    policies = {"heteroscale": {**settings, "policy": {"target": 300}}}
    config = SimConfig.load(write(tmp_path, smallest(policies=policies, warm_up_s=10)))
    autoscale = config.autoscale_config("heteroscale")
    assert autoscale.auto_ratio is not None
    assert autoscale.auto_ratio.decode == config.groups[0].decode.profile
    # Answers become ten times as long after 60 s, so a prompt keeps prefill busy for a smaller share of a request.
    trace = [
        TraceRequest(at_s=0.2 * number, input_tokens=1000, output_tokens=20 if number < 300 else 200)
        for number in range(900)
    ]
    run = run_policy(scenario_of(config, trace), autoscale, dict.fromkeys(config.pools(), 2))
    ratios = [plan.ratio(autoscale.ratio).per_decode() for _, plan in run.plans]
    top = ratios.index(max(ratios))
    assert max(ratios[0], ratios[-1]) < 0.7 * ratios[top]  # up from the start lengths, then down
    assert any(plan.decision.reason.startswith("pd_ratio ") for _, plan in run.plans)


def test_gpus_of_all_instances_of_a_split_prefill_replica_count(tmp_path: Path) -> None:
    split = {"prefill": {"profile": PROFILE, "attention_ffn": "1:3"}, "decode": {"profile": PROFILE}}
    config = SimConfig.load(write(tmp_path, {"groups": [split], "warm_up_s": 0}))
    assert config.pools()[PoolKey("g0", Role.PREFILL)].gpus_per_replica == 8  # four instances of two GPUs
    trace = [TraceRequest(at_s=float(second), input_tokens=500, output_tokens=10) for second in range(60)]
    counts = {PoolKey("g0", role): 1 for role in Role}
    hours = run_policy(scenario_of(config, trace), config.autoscale_config("default"), counts).fleet.gpu_hours(
        0.0, 59.0
    )
    # The policy may add a replica; the first ones alone are 8 and 2 GPUs for 59 s.
    assert hours[PoolKey("g0", Role.PREFILL)] >= 8 * 59 / 3600 - 1e-9
    with pytest.raises(ValueError, match="only prefill replicas have attention and FFN instances"):
        SimConfig.load(write(tmp_path, {"groups": [{**GROUP, "decode": {"profile": PROFILE, "attention_ffn": "1:3"}}]}))
