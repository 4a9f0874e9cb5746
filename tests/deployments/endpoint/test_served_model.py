"""Which groups of a model get requests."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.deployments.endpoint.pools import Clock, Pools, know

pytestmark = pytest.mark.ray


def test_a_group_that_the_plan_does_not_let_serve_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its replicas are warm, or under observation: its own router, which knows no other group, would send there."""
    from router.membership import Membership

    know(monkeypatch, a=["a0"], b=["b0"])
    model: Any = Pools(Clock(monkeypatch), "ab").model

    def serving() -> list[str]:
        return [group.name for group in model.serving()]

    def plan(*groups: str) -> None:
        pools = frozenset(f"decode:test_endpoint:{group}" for group in groups)
        membership = Membership(admitted=frozenset(), heard_s=0.0, pools=pools)
        model._membership = SimpleNamespace(now=lambda: membership)

    assert serving() == ["a", "b"]
    plan("b")
    assert serving() == ["b"]
    plan()  # a plan without a group that serves has lost touch
    assert serving() == ["a", "b"]
    model._membership = SimpleNamespace(now=lambda: None)
    assert serving() == ["a", "b"]


def test_a_pool_without_replicas_is_stranded_while_another_of_its_model_has_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Pools(Clock(monkeypatch), "ab").model
    for routed, is_stranded in (({"a": [], "b": ["b0"]}, True), ({"a": [], "b": []}, False), ({"a": ["a0"]}, False)):
        know(monkeypatch, **routed)
        assert model.is_stranded("decode:test_endpoint:a") is is_stranded
    assert not model.is_stranded("decode:other")
