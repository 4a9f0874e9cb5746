"""The policies of other systems are for the simulator only."""

import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from autoscale.decide.config import AutoscaleConfig
from autoscale.policies import POLICIES, SIMULATED_ONLY
from autoscale.policies.peers import SIM_POLICIES
from autoscale.sim.config import SimAutoscaleConfig

ROOT = Path(__file__).parents[4]
INSIDE = (ROOT / "autoscale" / "sim", ROOT / "autoscale" / "policies" / "peers")


def test_a_simulation_can_name_every_policy_and_a_live_application_those_of_the_product() -> None:
    assert set(SIM_POLICIES) == {*POLICIES, *SIMULATED_ONLY}
    assert not set(POLICIES) & set(SIMULATED_ONLY)


@pytest.mark.parametrize("kind", SIMULATED_ONLY)
def test_a_live_application_that_names_a_simulated_policy_is_refused(kind: str) -> None:
    message = f"'{kind}' is another system's policy, for the simulator only .* choose one of {', '.join(POLICIES)}"
    with pytest.raises(ValidationError, match=message):
        AutoscaleConfig.model_validate({"policy": {"kind": kind}})


def test_a_simulation_may_name_the_policy_of_another_system() -> None:
    assert SimAutoscaleConfig.model_validate({"policy": {"kind": "hpa"}}).policy.kind == "hpa"


def test_only_the_simulator_imports_the_peers() -> None:
    packages = ("kvtransfer", "router", "autoscale", "deployments", "serve_app")
    product = [path for name in packages for path in ROOT.glob(f"{name}/**/*.py")]
    imports = re.compile(r"^from autoscale\.policies\.peers", re.MULTILINE)
    readers = [path for path in product if imports.search(path.read_text())]
    assert readers and all(path.is_relative_to(INSIDE[0]) or path.is_relative_to(INSIDE[1]) for path in readers)
