"""Configuration of a model, its groups and its engines."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from autoscale.types import PoolKey
from deployments.config import ModelConfig, ServiceConfig
from deployments.endpoint.config import IngressConfig
from deployments.pool_config import EngineKwargs, GroupConfig, RoleConfig
from kvtransfer.topology import LinkTier, Role


@pytest.mark.parametrize("source", ["/models/m", "./models/m", "../m", "~/m"])
def test_a_path_is_a_folder(source: str) -> None:
    folder = ModelConfig(id="m", source=source).folder
    assert folder == Path(source).expanduser().resolve()
    assert folder.is_absolute()


@pytest.mark.parametrize("source", ["org/model", "model", "models/tiny"])
def test_a_hub_id_is_no_folder(source: str) -> None:
    assert ModelConfig(id="m", source=source).folder is None


def test_gpus_are_tensor_times_pipeline_parallel() -> None:
    sizes = {"tensor_parallel_size": 4, "pipeline_parallel_size": 2}
    assert RoleConfig.model_validate({**sizes, "placement": {"accelerator_type": "H100"}}).gpus_per_replica == 8
    on_cpu = RoleConfig.model_validate(sizes)
    assert on_cpu.gpus_per_replica == 0
    assert on_cpu.workers == 8


@pytest.mark.parametrize(
    ("key", "instead"),
    [
        ("model", "set model.source instead"),
        ("served_model_name", "set model.id instead"),
        ("tensor_parallel_size", "set the role's tensor_parallel_size instead"),
        ("pipeline_parallel_size", "set the role's pipeline_parallel_size instead"),
        ("kv_transfer_config", "set kv_transfer instead"),
        ("kv_events_config", "set router.policy instead"),
        ("worker_extension_cls", "leave it out"),
        ("distributed_executor_backend", "leave it out"),
        ("disable_log_stats", "leave it out"),
        ("enable_request_id_headers", "leave it out"),
    ],
)
def test_an_engine_argument_that_a_field_sets_is_refused_with_the_field(key: str, instead: str) -> None:
    with pytest.raises(ValueError, match=instead) as caught:
        TypeAdapter(EngineKwargs).validate_python({"dtype": "float32", key: 1})
    assert repr(key) in str(caught.value)
    with pytest.raises(ValidationError, match=instead):
        RoleConfig(engine_kwargs={key: 1})


def test_other_engine_arguments_pass_unchanged() -> None:
    kwargs = {"dtype": "float32", "max_num_seqs": 8}
    assert TypeAdapter(EngineKwargs).validate_python(kwargs) == kwargs


def test_pipeline_parallel_prefill_is_refused_and_decode_is_not(make_group: Callable[..., GroupConfig]) -> None:
    with pytest.raises(ValidationError, match=r"group 'g0': prefill.pipeline_parallel_size is 2"):
        make_group(prefill={"pipeline_parallel_size": 2})
    assert make_group(decode={"pipeline_parallel_size": 2}).decode.workers == 2


@pytest.mark.parametrize("name", ["a", "g0", "rack-7", "0", "x" * 32])
def test_a_group_name_has_lower_case_letters_digits_and_dashes(
    name: str, make_group: Callable[..., GroupConfig]
) -> None:
    assert make_group(name=name).name == name


@pytest.mark.parametrize("name", ["", "-a", "a-", "G0", "a:b", "a b", "a\n", "a/b", "x" * 33])
def test_a_group_name_that_no_deployment_can_have_is_refused(name: str, make_group: Callable[..., GroupConfig]) -> None:
    with pytest.raises(ValidationError, match="name"):
        make_group(name=name)


def test_roles_have_the_labels_of_their_group_and_their_own_win(make_group: Callable[..., GroupConfig]) -> None:
    group = make_group(node_labels={"zone": "a", "disk": "fast"}, decode={"placement": {"node_labels": {"zone": "b"}}})
    assert group.decode.placement.node_labels == {"zone": "b", "disk": "fast"}
    assert group.prompt_pool.placement.node_labels == {"zone": "a", "disk": "fast"}


@pytest.mark.parametrize(
    ("roles", "field"),
    [
        ({"prefill": 5}, "prefill"),
        ({"prefill": False}, "prefill"),
        ({"decode": [1]}, "decode"),
        ({"decode": {"placement": "H100"}}, "decode.placement"),
        ({"decode": {"placement": {"node_labels": ["a"]}}}, "decode.placement.node_labels"),
    ],
)
def test_a_role_of_a_wrong_type_is_refused_also_with_labels_of_the_group(
    roles: dict[str, Any], field: str, make_group: Callable[..., GroupConfig]
) -> None:
    with pytest.raises(ValidationError) as refusal:
        make_group(node_labels={"zone": "a"}, **roles)
    assert [".".join(map(str, error["loc"])) for error in refusal.value.errors()] == [field]


def test_a_group_has_one_pool_for_each_role(make_group: Callable[..., GroupConfig]) -> None:
    group = make_group(prefill={"replicas": 2}, decode={"replicas": 3})
    pools = group.pools()
    assert {key: pool.replicas for key, pool in pools.items()} == {
        PoolKey("g0", Role.PREFILL): 2,
        PoolKey("g0", Role.DECODE): 3,
    }
    assert list(pools.values()) == [group.prefill, group.decode]


def test_a_group_may_have_one_pool(make_group: Callable[..., GroupConfig]) -> None:
    labels = {"tandem.io/s1": "a"}
    group = make_group(prefill=None, decode={"replicas": 3}, node_labels=labels)
    assert list(group.pools()) == [PoolKey("g0", Role.DECODE)]
    assert group.prompt_pool is group.decode
    assert group.decode.placement.node_labels == labels
    with pytest.raises(ValidationError, match="must keep 3 decode replicas: set replicas to 0"):
        make_group(prefill=None, decode={"replicas": 3}, is_preemptible=True)


def test_config_is_frozen_and_closed() -> None:
    with pytest.raises(ValidationError):
        RoleConfig.model_validate({"replica": 1})
    with pytest.raises(ValidationError):
        RoleConfig().replicas = 2  # type: ignore[misc]


@pytest.mark.parametrize("path", ["keys", "~nosuchuser/keys"])
def test_the_path_of_a_key_file_must_be_whole(path: str) -> None:
    with pytest.raises(ValidationError, match="give the whole path"):
        IngressConfig.model_validate({"api_keys_file": path})


def service(*lengths: dict[str, Any], **engine_kwargs: Any) -> ServiceConfig:
    """A service with these engine arguments; each mapping makes a group, with the engine arguments of its decode."""
    groups = [{"name": f"g{i}", "decode": {"engine_kwargs": kwargs}} for i, kwargs in enumerate(lengths)]
    model = {"id": "m", "source": "org/m"}
    return ServiceConfig.model_validate({"model": model, "engine_kwargs": engine_kwargs, "groups": groups})


LENGTH = "max_model_len"


@pytest.mark.parametrize(
    ("config", "lowest", "longest"),
    [
        (service({LENGTH: 4096}, {LENGTH: 8192}), 4096, 8192),
        (service({}, {LENGTH: 8192}, max_model_len=4096), 4096, 8192),
        (service({}, {LENGTH: 8192}), 8192, None),
        (service({LENGTH: None}, {LENGTH: 8192}, max_model_len=4096), 8192, None),
        (service({LENGTH: -1}, {LENGTH: 8192}), 8192, None),  # vLLM then fits the context to the memory
        (service({LENGTH: -1}, {}), None, None),
        (service({}, {}), None, None),
    ],
)
def test_the_lowest_context_is_that_of_all_groups_and_the_longest_needs_one_of_every_group(
    config: ServiceConfig, lowest: int | None, longest: int | None
) -> None:
    assert (config.max_model_len, config.longest_context_tokens) == (lowest, longest)


def test_routing_by_prefixes_needs_engines_that_cache_them() -> None:
    fields: dict[str, Any] = {"model": {"id": "m", "source": "/m"}, "groups": [{"name": "g0"}]}
    without = {"engine_kwargs": {"enable_prefix_caching": False}}
    ServiceConfig.model_validate({**fields, **without})
    ServiceConfig.model_validate({**fields, "router": {"policy": "prefix"}})
    with pytest.raises(ValidationError, match="enable_prefix_caching to false: leave enable_prefix_caching out"):
        ServiceConfig.model_validate({**fields, **without, "router": {"policy": "prefix"}})


@pytest.mark.parametrize("value", [True, False])
def test_a_context_of_true_or_false_is_refused(value: bool) -> None:
    with pytest.raises(ValidationError, match=f"max_model_len is {value}: set a number of tokens"):
        service({}, max_model_len=value)
    with pytest.raises(ValidationError, match=f"max_model_len is {value}: set a number of tokens"):
        service({}, {LENGTH: value})


def _service(**fields: Any) -> ServiceConfig:
    own = {"model": {"id": "m", "source": "org/m"}, "groups": [{"name": "a"}]}
    return ServiceConfig.model_validate({**own, **fields})


def test_very_long_prompts_have_groups_that_no_policy_sizes() -> None:
    pool = {"max_replicas": 2}
    service = _service(
        groups=[{"name": "a", "prefill": pool, "decode": pool}],
        autoscale={"policy": {"kind": "queue_depth", "decode_requests_per_s": 1.0}},
        admission={"ttft_s": 1.0},
        long_prompts={"least_tokens": 30_000, "groups": [{"name": "far"}]},
    )
    assert [group.name for group in service.all_groups] == ["a", "far"]
    assert {key.group for key in service.pool_limits().root} == {"a"}  # what the policy sizes
    long = service.long_service
    assert long is not None
    assert (long.model, long.router, long.autoscale, long.long_prompts) == (service.model, service.router, None, None)
    assert [group.name for group in long.groups] == ["far"]
    assert long.admission_in(IngressConfig().admission).ttft_s is None  # the objective of other prompts is not theirs


@pytest.mark.parametrize(
    ("group", "words"),
    [
        ({"name": "far", "decode": {"max_replicas": 2}}, "decode:far .* leave max_replicas out"),
        ({"name": "far", "prefill": {"replicas": 0}, "decode": {"replicas": 0}}, "prefill:far .* replicas to 1"),
        (
            {"name": "far", "decode": {"engine_kwargs": {"max_model_len": True}}},
            "long_prompts: .*max_model_len is True",
        ),
    ],
)
def test_groups_for_long_prompts_need_fixed_counts_and_valid_engines(group: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        _service(long_prompts={"least_tokens": 30_000, "groups": [group]})


EMULATED = {"emulator": {"profile": "configs/profiles/h100_llama70b_fp8_tp1.json"}, "attention_ffn": "1:3"}


def test_a_split_prefill_replica_has_the_gpus_of_all_instances_and_parts_below_one_switch() -> None:
    placement = {"accelerator_type": "H100", "strategy": "PACK"}
    pool = RoleConfig.model_validate({**EMULATED, "tensor_parallel_size": 2, "placement": placement})
    assert (pool.workers, pool.gpus_per_replica, pool.demand.gpus) == (8, 8.0, 8.0)
    assert [part.workers for part in pool.demand.parts] == [2, 2, 2, 2]
    assert pool.demand.within is LinkTier.S1
    # On one node all instances are below one switch anyway, and Ray packs all bundles there.
    packed = RoleConfig.model_validate({**EMULATED, "placement": {"accelerator_type": "H100"}})
    assert (packed.demand.parts, packed.demand.workers) == ((), 4)


def test_only_emulated_prefill_may_be_split(make_group: Callable[..., GroupConfig]) -> None:
    with pytest.raises(ValidationError, match="vLLM does not split attention and FFN: leave it out"):
        RoleConfig.model_validate({"attention_ffn": "1:3"})
    with pytest.raises(ValidationError, match="only prefill replicas have attention and FFN instances"):
        GroupConfig.model_validate({"name": "g0", "decode": EMULATED})
    with pytest.raises(ValidationError, match="in quotes: YAML reads 1:3 as 63"):
        RoleConfig.model_validate({**EMULATED, "attention_ffn": 63})
