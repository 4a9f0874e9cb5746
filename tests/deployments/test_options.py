"""The options of a pool that Ray Serve LLM gets."""

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.config import ModelConfig
from deployments.pool_config import RoleConfig
from kvtransfer.connector import ConnectorConfig
from kvtransfer.topology import Role
from router.config import RouterConfig

pytestmark = pytest.mark.vllm

CONNECTOR = ConnectorConfig()


def configured(
    pool: RoleConfig,
    *,
    kv_transfer: ConnectorConfig | None = CONNECTOR,
    host_kind: str | None = None,
    **engine_kwargs: Any,
) -> Any:
    from deployments.config import ServiceConfig
    from deployments.options import llm_config

    service: Any = SimpleNamespace(
        model=ModelConfig(id="m", source="org/m"),
        engine_kwargs=engine_kwargs,
        router=RouterConfig(),
        autoscale=None if pool.max_replicas is None else SimpleNamespace(report_s=2.5),
    )
    service.engine_kwargs_of = partial(ServiceConfig.engine_kwargs_of, service)
    return llm_config(service, Role.DECODE, pool, kv_transfer=kv_transfer, host_kind=host_kind)


def test_each_engine_worker_has_a_bundle_and_each_bundle_its_labels() -> None:
    from deployments.options import serve_options

    labels = {"tandem.io/s1": "a"}
    pool = RoleConfig.model_validate(
        {
            "tensor_parallel_size": 2,
            "placement": {"accelerator_type": "H100", "cpus_per_worker": 3, "strategy": "PACK", "node_labels": labels},
        }
    )
    placement = configured(pool).placement_group_config
    assert placement == {"bundles": [{"CPU": 3.0, "GPU": 1}] * 2, "strategy": "PACK"}
    assert serve_options(pool)["placement_group_bundle_label_selector"] == [labels, labels]


def test_a_role_engine_argument_wins_over_the_application_one() -> None:
    pool = RoleConfig(engine_kwargs={"max_num_seqs": 4})
    kwargs = configured(pool, max_num_seqs=8, max_model_len=512).engine_kwargs
    assert (kwargs["max_num_seqs"], kwargs["max_model_len"]) == (4, 512)


def test_kv_is_one_cache_group_unless_the_user_splits_it() -> None:
    assert configured(RoleConfig()).engine_kwargs["disable_hybrid_kv_cache_manager"] is True
    split = configured(RoleConfig(), disable_hybrid_kv_cache_manager=False).engine_kwargs
    assert split["disable_hybrid_kv_cache_manager"] is False


def test_an_unknown_engine_argument_names_the_nearest_one() -> None:
    with pytest.raises(ValueError, match="'max_model_length'; did you mean 'max_model_len'"):
        configured(RoleConfig(), max_model_length=512)


def test_a_fixed_pool_has_a_count_and_an_autoscaled_one_bounds_without_serves_own_damping() -> None:
    fixed = configured(RoleConfig(replicas=3)).deployment_config
    assert fixed["num_replicas"] == 3
    assert "autoscaling_config" not in fixed
    assert fixed["request_router_config"]["request_router_kwargs"]["is_gated"] is False
    scaled = configured(RoleConfig(replicas=2, max_replicas=5)).deployment_config
    bounds = scaled["autoscaling_config"]
    assert (bounds["min_replicas"], bounds["max_replicas"]) == (2, 5)
    assert bounds["upscale_delay_s"] == bounds["downscale_delay_s"] == 0.0
    assert bounds["metrics_interval_s"] == 2.5
    assert bounds["look_back_period_s"] > bounds["metrics_interval_s"]  # else a report could be empty
    assert "initial_replicas" not in bounds  # any change would reset the count to it
    assert "num_replicas" not in scaled
    assert scaled["request_router_config"]["request_router_kwargs"]["is_gated"] is True


@pytest.mark.parametrize(
    ("policy", "routers", "asked"), [("least_tokens", 2, 5), ("least_tokens", 1, 0), ("round_robin", 2, 0)]
)
def test_replicas_are_asked_for_their_queue_if_several_routers_send_to_them_by_load(
    policy: Any, routers: int, asked: int
) -> None:
    from deployments.options import router_options

    router = RouterConfig(policy=policy, asked_replicas=5)
    for role in Role:
        kwargs = router_options(role, router, is_gated=False, routers=routers)["request_router_kwargs"]
        assert kwargs["asked_replicas"] == asked
        assert kwargs["asks_tokens"] is (role is Role.PREFILL)


def test_an_emulated_pool_gives_its_engine_class_in_rays_own_variable() -> None:
    pool = RoleConfig.model_validate({"emulator": {"profile": "configs/p.json", "start_s": 3}, "env": {"A": "b"}})
    config = configured(pool)
    variables = config.runtime_env["env_vars"]
    assert variables == {"A": "b", "RAYLLM_VLLM_ENGINE_CLS": "deployments.emulated.engine.EmulatedEngine"}
    emulator = config.experimental_configs["tandem_emulator"]
    assert emulator["start_s"] == 3
    assert emulator["profile"].startswith("/")  # replicas run in another folder
    assert "tandem_emulator" not in configured(RoleConfig()).experimental_configs


def test_only_a_pool_with_start_hosts_has_their_hook() -> None:
    variables = configured(RoleConfig(env={"A": "b"}), host_kind="k").runtime_env["env_vars"]
    assert (variables["A"], variables["TANDEM_START_HOST"]) == ("b", "k")
    assert "deployments.replicas.start_host.prepare" in variables.values()
    assert configured(RoleConfig()).runtime_env is None


def test_an_engine_that_sleeps_on_gpus_is_told_so_and_one_without_handoff_has_no_connector() -> None:
    pool = RoleConfig.model_validate({"placement": {"accelerator_type": "H100"}, "engine_sleep": {"level": 2}})
    kwargs = configured(pool, kv_transfer=None).engine_kwargs
    assert kwargs["enable_sleep_mode"] is True
    assert "kv_transfer_config" not in kwargs
    on_cpu = configured(RoleConfig.model_validate({"engine_sleep": {}})).engine_kwargs
    assert "enable_sleep_mode" not in on_cpu  # vLLM refuses it there
    assert on_cpu["kv_transfer_config"]["kv_connector"]
