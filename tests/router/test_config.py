"""Settings of routing."""

from typing import get_args

import pytest
from pydantic import ValidationError

from router.config import LengthConfig, RouterConfig
from router.pool_router import POLICIES


def test_defaults_are_consistent() -> None:
    config = RouterConfig()
    assert config.length.local_max_tokens <= config.length.local_cap_tokens
    assert config.length.decode_busy_frac <= config.length.decode_room_frac


def test_every_policy_can_be_chosen_and_no_other() -> None:
    assert set(get_args(RouterConfig.model_fields["policy"].annotation)) == set(POLICIES)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"local_max_tokens": 200, "local_cap_tokens": 100}, ("local_cap_tokens (100)", "local_max_tokens (200)")),
        ({"decode_room_frac": 0.1, "decode_busy_frac": 0.2}, ("decode_room_frac (0.1)", "decode_busy_frac (0.2)")),
    ],
)
def test_bounds_in_the_wrong_order_are_named_with_their_values(values: dict[str, float], words: list[str]) -> None:
    with pytest.raises(ValidationError) as caught:
        LengthConfig.model_validate(values)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("local_max_tokens", -1),
        ("local_cap_tokens", -1),
        ("backlog_share_frac", -0.1),
        ("backlog_share_frac", 1.1),
        ("decode_room_frac", 0.0),
        ("decode_room_frac", 1.1),
        ("decode_busy_frac", 0.0),
        ("decode_busy_frac", float("nan")),
    ],
)
def test_value_outside_its_bounds_is_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValidationError) as caught:
        LengthConfig.model_validate({field: value})
    assert caught.value.errors()[0]["loc"] == (field,)


def test_equal_bounds_are_allowed() -> None:
    LengthConfig(local_max_tokens=64, local_cap_tokens=64, decode_room_frac=0.3, decode_busy_frac=0.3)


def test_config_is_frozen_and_closed() -> None:
    with pytest.raises(ValidationError):
        RouterConfig.model_validate({"polices": "round_robin"})
    with pytest.raises(ValidationError):
        RouterConfig().policy = "round_robin"  # type: ignore[misc]
