"""Whether a profile is of the engine that a pool deploys (pure)."""

from collections.abc import Iterator, Mapping
from typing import Any

from autoscale.decide.config import AutoscaleConfig
from autoscale.engines.profile import EngineProfile
from autoscale.policies.policy import ProfiledConfig
from autoscale.types import PoolKey
from deployments.pool_config import GroupConfig, RoleConfig

# Value of an engine argument with which vLLM takes what the model's files say.
_BY_MODEL = ("auto", None)


def policy_profiles(
    autoscale: AutoscaleConfig | None, first: GroupConfig
) -> Iterator[tuple[PoolKey, RoleConfig, EngineProfile]]:
    """Pools of the first group, each with the profile by which it is sized; emulated engines are left out.

    The profiles are those of the policy, or of a ratio that follows the requests.
    """
    if autoscale is None:
        return
    settings = autoscale.policy if isinstance(autoscale.policy, ProfiledConfig) else autoscale.followed_by
    if settings is not None:
        profiles = {"prefill": settings.prefill, "decode": settings.decode}
        for key, pool in first.pools().items():
            if pool.emulator is None:
                yield key, pool, profiles[key.role]


def check_parallelism(key: PoolKey, pool: RoleConfig, profile: EngineProfile) -> None:
    """Raise ValueError if the profiled engine has another number of GPUs than a replica of the pool has workers.

    Engines on CPUs are not compared: their profiles do not say on how many workers they were measured.
    """
    if pool.placement.accelerator_type and profile.gpus and profile.gpus != pool.workers:
        raise ValueError(
            f"profile {profile.name} was measured on {profile.gpus} GPUs, and a replica of {key} has {pool.workers} "
            f"(tensor_parallel_size {pool.tensor_parallel_size} x pipeline_parallel_size "
            f"{pool.pipeline_parallel_size}): give it the profile of such an engine (`tandem profile`)"
        )


def differences(
    key: PoolKey, pool: RoleConfig, model: str, engine_kwargs: Mapping[str, Any], profile: EngineProfile
) -> list[str]:
    """Sentences that say in what the profiled engine differs from the pool's.

    They are not errors: a model may be served by another name, and a profile of a similar engine may be near enough.

    Args:
        key: the pool.
        pool: its configuration.
        model: id of the served model.
        engine_kwargs: vLLM engine arguments of both roles.
        profile: the profile that is used for the pool.
    """
    pairs = [
        ("model", profile.model, model),
        ("GPU", profile.gpu or "none", pool.placement.accelerator_type or "none"),
    ]
    arguments = {**engine_kwargs, **pool.engine_kwargs}
    if profile.precision is not None:
        for name, measured in profile.precision.model_dump().items():
            deployed = arguments.get(name)
            if deployed not in _BY_MODEL:
                pairs.append((name, measured or "none", str(deployed)))
    return [
        f"profile {profile.name} has {name} {measured}, and {key} has {deployed}: if they differ in speed, measure the "
        "engine with `tandem profile`"
        for name, measured, deployed in pairs
        if measured != deployed
    ]
