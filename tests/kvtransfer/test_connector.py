"""The connector of each role."""

import json

import pytest
from pydantic import ValidationError

from kvtransfer.connector import ConnectorConfig, prefill_request_params
from kvtransfer.topology import Role


def test_prefill_produces_and_decode_consumes() -> None:
    config = ConnectorConfig()
    assert config.kv_transfer_config(Role.PREFILL)["kv_role"] == "kv_producer"
    assert config.kv_transfer_config(Role.DECODE)["kv_role"] == "kv_consumer"


def test_settings_reach_both_roles_under_vllm_names() -> None:
    config = ConnectorConfig(backends=("UCX", "GDS"), num_threads=3, lease_s=90)
    for role in Role:
        vllm = config.kv_transfer_config(role)
        assert vllm["kv_connector"] == "NixlConnector"
        assert vllm["kv_connector_extra_config"] == {
            "backends": ["UCX", "GDS"],
            "num_threads": 3,
            "kv_lease_duration": 90,
        }
        assert json.loads(json.dumps(vllm)) == vllm


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_only_decode_has_a_failure_policy(policy: str) -> None:
    config = ConnectorConfig.model_validate({"load_failure_policy": policy})
    assert config.kv_transfer_config(Role.DECODE)["kv_load_failure_policy"] == policy
    assert "kv_load_failure_policy" not in config.kv_transfer_config(Role.PREFILL)


def test_failed_transfer_is_recomputed_unless_told_otherwise() -> None:
    assert ConnectorConfig().load_failure_policy == "recompute"


@pytest.mark.parametrize(
    ("field", "value"),
    [("lease_s", 5), ("lease_s", 3601), ("num_threads", 0), ("backends", ()), ("connector", "OtherConnector")],
)
def test_unusable_setting_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValidationError) as caught:
        ConnectorConfig.model_validate({field: value})
    assert caught.value.errors()[0]["loc"] == (field,)


@pytest.mark.parametrize(("lease_s", "most_s"), [(12, 4.8), (60, 15.0)])
def test_a_pull_may_not_outlive_the_lease_of_its_kv(lease_s: int, most_s: float) -> None:
    assert ConnectorConfig(lease_s=lease_s).safe_pull_timeout_s == pytest.approx(most_s)
    # Shortest rest of a lease when heartbeats end: each extends the lease to two thirds, and the next one may be due.
    assert most_s < lease_s * 2 / 3 - lease_s / 6


def test_shortest_lease_leaves_a_heartbeat() -> None:
    # vLLM's heartbeat is lease // 6 seconds; 0 would never renew.
    assert ConnectorConfig(lease_s=6).lease_s // 6 >= 1


def test_prefill_request_asks_to_keep_the_kv_and_loads_none() -> None:
    params = prefill_request_params()
    assert params["do_remote_decode"] is True
    assert params["do_remote_prefill"] is False
    assert {key for key, value in params.items() if value is None} == {
        "remote_engine_id",
        "remote_block_ids",
        "remote_host",
        "remote_port",
    }


def test_prefill_requests_share_no_state() -> None:
    prefill_request_params()["do_remote_decode"] = False
    assert prefill_request_params()["do_remote_decode"] is True
