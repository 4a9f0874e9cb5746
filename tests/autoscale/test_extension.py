"""A policy of one's own: found by its kind, checked at every door, and read without its class between processes."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from pydantic import TypeAdapter, ValidationError

from autoscale.decide.config import AutoscaleConfig
from autoscale.decide.decision_log import config_line, replay
from autoscale.decide.tuning import Pools, tuned
from autoscale.engines.profile import EngineProfile
from autoscale.extension import DEFERRED, Extension
from autoscale.policies.heteroscale import HeteroScaleConfig
from autoscale.sim.config import SimAutoscaleConfig
from autoscale.types import PoolKey, PoolLimits
from kvtransfer.topology import Role
from tests.autoscale.own import Fixed

OWN = "tests.autoscale.own:Fixed"
MakeConfig = Callable[..., AutoscaleConfig]


def complaint(make_autoscale: MakeConfig, **fields: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        make_autoscale(**fields)
    (error,) = caught.value.errors()
    return f"{'.'.join(map(str, error['loc']))}: {error['msg'].removeprefix('Value error, ')}"


@pytest.fixture
def entry_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package with the entry point ``mine``, and one that leads nowhere."""
    folder = tmp_path / "own-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(f"[tandem.policies]\nmine = {OWN}\nlost = tests.no_such:Policy\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield


def test_an_import_path_is_validated_by_the_config_class_of_its_policy(make_autoscale: MakeConfig) -> None:
    config = make_autoscale(policy={"kind": OWN, "decode": 3})
    assert config.policy_settings()[0] is Fixed
    assert config.model_dump(mode="json")["policy"] == {"kind": OWN, "decode": 3.0, "fault": ""}  # with defaults
    assert AutoscaleConfig.model_validate(config.model_dump(mode="json")) == config


def test_an_entry_point_is_as_good_as_its_import_path(make_autoscale: MakeConfig, entry_point: None) -> None:
    assert make_autoscale(policy={"kind": "mine", "decode": 3}).policy_settings()[0] is Fixed
    assert "policy lost cannot be imported: ModuleNotFoundError" in complaint(make_autoscale, policy={"kind": "lost"})


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"kind": OWN, "decode": -1}, "policy.decode: Input should be greater than 0"),
        ({"kind": OWN, "target": 1}, "policy.target: Extra inputs are not permitted"),
        ({"kind": "no_such_package.policies:Mine"}, "policy: policy no_such_package.policies:Mine cannot be imported"),
        ({"kind": "tests.autoscale.own:Nothing"}, "module tests.autoscale.own has no class Nothing"),
        ({"kind": "json:dumps"}, "policy json:dumps is no Policy: derive it from autoscale.policies.policy.Policy"),
        ({"kind": "pathlib:Path"}, "policy pathlib:Path is no Policy"),
        ({"kind": "tests.autoscale.own:NoConfigClass"}, "has no config class: set its attribute config_class"),
        ({"kind": "tests.autoscale.own:Undecided"}, "policy tests.autoscale.own:Undecided lacks the method decide"),
        ({"kind": "tests.autoscale.own:NoJson"}, "policy tests.autoscale.own:NoJson: its settings cannot be stored as"),
        ({"kind": "tests.autoscale.own:ConstantKind"}, "its config class Config needs the field `kind: str`"),
        ({"kind": "tests.autoscale.own:RaisingConfig"}, "its config class raised KeyError: 'no such thing'"),
        ({"kind": "a b:c"}, "policy a b:c is no import path: write package.module:Class"),
        ({"kind": "..x:Y"}, "policy ..x:Y is no import path"),
        ({"kind": "x:Y.z"}, "policy x:Y.z is no import path"),
        ({"kind": "hpa"}, "policy: 'hpa' is another system's policy"),
        ({"kind": 5}, "policy: Input tag '5' found using 'kind' does not match any of the expected tags"),
        ({"kind": "heteroscale", "target": -1}, "policy.heteroscale.target: Input should be greater than 0"),
    ],
)
def test_a_wrong_policy_is_refused_with_the_cause(
    make_autoscale: MakeConfig, policy: dict[str, Any], message: str
) -> None:
    if policy["kind"] == "tests.autoscale.own:RaisingConfig":
        policy = {**policy, "field": 2}
    assert message in complaint(make_autoscale, policy=policy)


def test_a_missing_package_is_told_where_it_must_be(make_autoscale: MakeConfig) -> None:
    words = complaint(make_autoscale, policy={"kind": "no_such_package:Mine"})
    assert "install its package on every node, or put its folder into PYTHONPATH before Ray starts" in words


def test_a_module_that_fails_at_its_import_is_refused(
    make_autoscale: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_exits.py").write_text("raise SystemExit(7)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    message = complaint(make_autoscale, policy={"kind": "own_exits:Mine"})
    assert message == "policy: policy own_exits:Mine cannot be imported: SystemExit: 7"


def test_a_name_without_a_colon_is_never_imported(make_autoscale: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "antigravity", raising=False)
    assert "does not match any of the expected tags" in complaint(make_autoscale, policy={"kind": "antigravity"})
    assert "antigravity" not in sys.modules


def test_a_file_that_a_setting_names_is_read_once_at_the_door(
    make_autoscale: MakeConfig, make_profile: Callable[..., EngineProfile], tmp_path: Path
) -> None:
    path = tmp_path / "engine.json"
    path.write_text(make_profile().model_dump_json())
    config = make_autoscale(policy={"kind": "tests.autoscale.own:OneProfile", "engine": str(path)})
    path.unlink()
    stored = json.loads(json.dumps(config.model_dump(mode="json")))
    assert AutoscaleConfig.model_validate(stored).policy_settings()[1].engine == make_profile()  # type: ignore[attr-defined]


def test_a_process_without_the_class_reads_what_a_door_has_checked() -> None:
    document = {"policy": {"kind": "no_such_package:Mine", "target": 3}, "pd_ratio": "0:1"}
    config = AutoscaleConfig.model_validate(document, context=DEFERRED)
    assert isinstance(config.policy, Extension)
    assert config.policy.model_extra == {"target": 3}
    built_in = AutoscaleConfig.model_validate(
        {"policy": {"kind": "heteroscale", "target": 3}, "pd_ratio": "1:1"}, context=DEFERRED
    )
    assert isinstance(built_in.policy, HeteroScaleConfig)


def test_a_policy_says_whether_it_fits_groups_without_prefill(make_autoscale: MakeConfig) -> None:
    make_autoscale(pd_ratio="0:1", policy={"kind": "tests.autoscale.own:AggregatedFixed"})
    words = complaint(make_autoscale, pd_ratio="0:1", policy={"kind": OWN})
    assert "take one of default, dopd, heteroscale, queue_depth, static, wva, or set is_fit_for_aggregated" in words


def test_a_tuned_field_passes_the_same_checks(make_autoscale: MakeConfig) -> None:
    base = make_autoscale(policy={"kind": OWN, "decode": 3})
    pools = Pools({PoolKey("g0", role): PoolLimits(lowest_replicas=1, highest_replicas=8) for role in Role})
    assert tuned(base, {"policy": {"decode": 4}}, pools).policy.model_dump()["decode"] == 4.0
    with pytest.raises(ValueError, match=r"policy\.decode"):
        tuned(base, {"policy": {"decode": 0}}, pools)
    with pytest.raises(ValueError, match="cannot be imported"):
        tuned(base, {"policy": {"kind": "no_such_package:Mine"}}, pools)


def test_a_log_whose_policy_cannot_be_loaded_is_refused_at_its_line(make_autoscale: MakeConfig) -> None:
    line = json.loads(config_line("m", make_autoscale(), 0.0, "start"))
    line["config"]["policy"] = {"kind": "no_such_package:Mine"}
    with pytest.raises(ValueError, match=r"line 1 is no line of a decision log: policy: .*cannot be imported"):
        list(replay([json.dumps(line)]))


def test_the_json_schema_accepts_an_own_policy_and_no_misspelt_field_of_a_built_in_one(entry_point: None) -> None:
    validator = jsonschema.Draft202012Validator(TypeAdapter(AutoscaleConfig).json_schema())
    for policy in ({"kind": OWN, "decode": 3}, {"kind": "mine"}, {"kind": "heteroscale", "target": 1}):
        validator.validate({"policy": policy})
    for policy in ({"kind": "heteroscale", "tarrget": 1}, {"kind": "theirs"}, {"decode": 1}):
        assert not validator.is_valid({"policy": policy})


def test_the_simulators_configuration_takes_the_same_kinds(make_profile: Callable[..., EngineProfile]) -> None:
    document = {"policy": {"kind": OWN}, "pd_ratio": "1:1"}
    assert SimAutoscaleConfig.model_validate(document).policy_settings()[0] is Fixed
