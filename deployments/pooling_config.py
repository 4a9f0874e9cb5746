"""Services of pooling models, whose engines answer with vectors or scores and not with tokens (pure)."""

from collections.abc import Mapping, Sequence
from typing import Any

from autoscale.decide.config import AutoscaleConfig
from autoscale.types import PoolKey
from deployments.pool_config import GroupConfig

_NO_CONVERSION = ("auto", "none")  # values of ``convert`` that do not make a pooling model of another one


def is_pooling(kwargs: Mapping[str, Any]) -> bool:
    """Whether engine arguments say that the model pools. With neither of the two, vLLM decides by the model's files."""
    runner, convert = kwargs.get("runner", "auto"), kwargs.get("convert", "auto")
    return runner == "pooling" or (runner == "auto" and convert not in _NO_CONVERSION)


def check_same_kind(kinds: Mapping[PoolKey, bool]) -> None:
    """Raises ValueError: only some pools of one model pool; ``kinds``: whether each of them does."""
    by_kind = {kind: key for key, kind in kinds.items()}
    if len(by_kind) > 1:
        raise ValueError(
            f"by its engine_kwargs {by_kind[True]} has a pooling model, and {by_kind[False]} has none: set runner in "
            "engine_kwargs of the service, or make two services"
        )


def check_groups(groups: Sequence[GroupConfig]) -> None:
    """Raises ValueError: a group cannot serve a pooling model."""
    for group in groups:
        if group.prefill is not None:
            raise ValueError(
                f"group {group.name!r} has a prefill pool, and engine_kwargs make its model a pooling model, which "
                "computes no answer after its prompt: set prefill of the group to null"
            )
        if group.decode.emulator is not None:
            raise ValueError(
                f"group {group.name!r} is emulated, and emulated engines only generate: leave emulator out, or runner "
                "and convert"
            )


def check_policy(autoscale: AutoscaleConfig) -> None:
    """Raises ValueError: the policy sizes decode by output tokens, and a pooling model has none."""
    if not autoscale.policy_settings()[0].is_fit_for_pooling:
        fit = ", ".join(kind for kind, policy in autoscale.policies.items() if policy.is_fit_for_pooling)
        raise ValueError(
            f"policy {autoscale.policy.kind!r} sizes decode by the tokens of answers, and a pooling model has none: "
            f"take one of {fit}, or set is_fit_for_pooling in a policy of your own"
        )
