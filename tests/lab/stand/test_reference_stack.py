"""The reference stack gets the engines, the nodes and the counts of the application that it is compared with."""

from pathlib import Path
from typing import Any

import pytest

from serve_app.checks.yaml_checks import load_serve_yaml
from tests.lab.drill.drill import on_two_parts
from tests.lab.stand.reference_stack import peer_document

CONFIG = Path(__file__).parents[1] / "drill" / "tiny.yaml"


@pytest.fixture(name="ours")
def _ours() -> dict[str, Any]:
    return on_two_parts(load_serve_yaml(CONFIG))


def test_the_peer_has_our_engines_counts_and_nodes(ours: dict[str, Any]) -> None:
    peer = peer_document(ours)
    assert peer["http_options"] == ours["http_options"]
    (application,) = peer["applications"]
    assert "autoscaling_policy" not in application
    mine, theirs = ours["applications"][0]["args"], application["args"]
    for role, vllm_role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
        config = theirs[f"{role}_config"]
        engine = dict(config["engine_kwargs"])
        transfer = engine.pop("kv_transfer_config")
        assert engine == mine["engine_kwargs"]
        assert transfer["kv_role"] == vllm_role
        assert transfer["kv_connector_extra_config"]["kv_lease_duration"] == 12
        deployment = config["deployment_config"]
        assert deployment["num_replicas"] == 2
        assert deployment["placement_group_bundle_label_selector"] == [{"tandem.io/part": "engines"}]
        assert Path(config["model_loading_config"]["model_source"]).is_absolute()
    assert theirs["ingress_deployment_config"]["num_replicas"] == 2
    assert theirs["ingress_deployment_config"]["ray_actor_options"]["label_selector"] == {"tandem.io/part": "front"}
