"""Which groups of a model get requests."""

from types import SimpleNamespace
from typing import Any

import pytest

from tests.deployments.endpoint.pools import Clock, Pools, know, whole

pytestmark = pytest.mark.ray


def test_a_group_that_the_plan_does_not_let_serve_gets_no_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its replicas are warm or withdrawn. Its own router knows no other group, and would send requests there."""
    from router.membership import Membership

    know(monkeypatch, a=["a0"], b=["b0"])
    model: Any = Pools(Clock(monkeypatch), "ab").model

    def serving() -> list[str]:
        return [group.name for group in model.serving()]

    def plan(*groups: str) -> None:
        pools = frozenset(f"decode:test_endpoint:{group}" for group in groups)
        membership = Membership(admitted=frozenset(), heard_s=0.0, pools=dict.fromkeys(pools, 1))
        model._membership = SimpleNamespace(now=lambda: membership)

    assert serving() == ["a", "b"]
    plan("b")
    assert serving() == ["b"]
    plan()  # a plan in which no group serves is not obeyed
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


async def test_a_model_is_healthy_while_one_of_its_pools_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    know(monkeypatch, a=["a0"], b=["b0"])
    model: Any = Pools(Clock(monkeypatch), "ab").model
    healthy: set[str] = set()

    async def check(group: Any) -> None:
        if group.name not in healthy:
            raise TimeoutError

    monkeypatch.setattr(type(model.groups[0]), "check_health", check)
    assert await model.check_health() == "no healthy decode replica of m: TimeoutError"
    healthy.add("b")
    assert await model.check_health() is None


@pytest.mark.parametrize(("prefill_replicas", "configured", "planned"), [(2, 2 + 2, 3 + 4), (None, 5 + 5, 6 + 7)])
def test_replicas_that_compute_prompts_are_those_of_the_plan_or_else_the_configured_ones(
    prefill_replicas: int | None, configured: int, planned: int
) -> None:
    """Of a group without prefill its decode replicas compute prompts."""
    from deployments.config import ServiceConfig
    from deployments.endpoint.served_model import count_prefill
    from router.membership import Membership

    prefill = None if prefill_replicas is None else {"replicas": prefill_replicas}

    def service(**autoscaling: Any) -> ServiceConfig:
        most = {"max_replicas": 9} if autoscaling else {}
        pools = {"prefill": prefill and {**prefill, **most}, "decode": {"replicas": 5, **most}}
        groups = [{"name": name, **pools} for name in "ab"]
        return ServiceConfig.model_validate({"model": {"id": "m", "source": "org/m"}, "groups": groups, **autoscaling})

    policy = {"kind": "queue_depth", "decode_requests_per_s": 1.0}
    autoscale = {"policy": policy, "pd_ratio": "0:1" if prefill is None else "1:1"}
    autoscaled = service(autoscale=autoscale)
    pools: dict[str, int] = {}
    plan = Membership(admitted=frozenset(), heard_s=0.0, pools=pools)
    feed: Any = SimpleNamespace(now=lambda: plan)

    count = count_prefill(autoscaled, autoscaled.worths(), feed)
    assert count() == 1  # the plan lets no replica serve
    pools |= {"prefill:a": 3, "prefill:b": 4, "decode:a": 6, "decode:b": 7}
    assert count() == planned
    assert count_prefill(service(), service().worths(), feed)() == configured  # the plan is of other models
    assert count_prefill(autoscaled, autoscaled.worths(), None)() == configured
    feed.now = lambda: None  # the plan is too old
    assert count() == configured


@pytest.mark.parametrize(("prefill", "replicas"), [({"replicas": 2}, 4), (None, 6)])
def test_decode_replicas_of_a_group_without_prefill_count_as_replicas_that_prefill(
    prefill: dict[str, Any] | None, replicas: int
) -> None:
    from deployments.config import ServiceConfig
    from deployments.endpoint.served_model import count_prefill

    groups = [{"name": name, "prefill": prefill, "decode": {"replicas": 3}} for name in "ab"]
    config = ServiceConfig.model_validate({"model": {"id": "m", "source": "org/m"}, "groups": groups})
    assert count_prefill(config, config.worths(), None)() == replicas


def test_slow_replicas_count_for_the_prompts_that_they_compute() -> None:
    from deployments.config import ServiceConfig
    from deployments.endpoint.served_model import count_prefill

    fast = {"prefill": {"replicas": 2}, "decode": {"replicas": 1, "capacity": None}}
    slow = {"prefill": {"replicas": 4, "capacity": 0.25}, "decode": {"replicas": 4, "capacity": 0.25}}
    both = {"prefill": None, "decode": {"replicas": 3, "capacity": 0.5}}  # at 1:1 it computes as many prompts
    groups = [{"name": name, **pools} for name, pools in (("fast", fast), ("slow", slow), ("both", both))]
    config = ServiceConfig.model_validate({"model": {"id": "m", "source": "org/m"}, "groups": groups})
    assert count_prefill(config, config.worths(), None)() == 2 + 4 * 0.25 + 3 * 0.5


@pytest.mark.parametrize(("max_prompt_tokens", "most_tokens"), [(None, 8192), (6000, 6000), (10_000, 8192)])
def test_a_prompt_counts_up_to_the_longest_context_and_the_models_card_shows_the_lowest(
    max_prompt_tokens: int | None, most_tokens: int
) -> None:
    from deployments.config import ServiceConfig
    from deployments.endpoint.served_model import ServedModel

    groups = [{"name": "a"}, {"name": "b", "decode": {"engine_kwargs": {"max_model_len": 8192}}}]
    fields = {"model": {"id": "m", "source": "org/m"}, "engine_kwargs": {"max_model_len": 4096}, "groups": groups}
    gate: Any = None
    model = ServedModel(ServiceConfig.model_validate(fields), [], gate, None, max_prompt_tokens=max_prompt_tokens)
    assert (model.max_model_len, model.most_prompt_tokens) == (4096, most_tokens)


def _with_long_prompts(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """A model with group a, and its part for very long prompts with group b."""
    usual: Any = Pools(Clock(monkeypatch), "a").model
    long: Any = Pools(Clock(monkeypatch), "b").model
    usual.long, usual.least_long_tokens, long._usual = long, 1000, usual
    return usual, long


def test_only_very_long_prompts_go_to_their_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    usual, long = _with_long_prompts(monkeypatch)
    know(monkeypatch, a=["a0"], b=["b0"])
    assert usual.serving_prompt(999) is usual
    assert usual.serving_prompt(1000) is long
    assert [group.name for group in usual.serving()] == ["a"]
    assert [group.name for group in long.serving()] == ["b"]


def test_very_long_prompts_go_to_the_usual_groups_while_their_own_have_no_replica(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    usual, long = _with_long_prompts(monkeypatch)
    know(monkeypatch, a=["a0"], b=[])
    assert usual.serving_prompt(5000) is usual
    assert [group.name for group in long.serving()] == ["a"]  # for a request whose replica was lost
    assert long.is_stranded("decode:test_endpoint:b")  # so a call that waits there ends
    know(monkeypatch, a=[], b=["b0"])
    assert not usual.serving()  # other prompts do not go to the groups of long ones
    assert usual.can_answer_any() and not usual.can_answer()  # whether a prompt is long is known once it has been read
    assert not usual.is_stranded("decode:test_endpoint:a")


def test_mean_characters_of_a_token_follow_the_prompts_of_text(monkeypatch: pytest.MonkeyPatch) -> None:
    from router.prompt_keys import PromptKeys, text_keys

    model = Pools(Clock(monkeypatch)).model
    model.piece_tokens = 128
    model.note_tokens(PromptKeys(keys=(1, 2), piece_tokens=128, tokens=300), 300)  # token ids
    model.note_tokens(text_keys("x" * 40, 512, model.chars_per_token, 0), 40)  # most tokens are of the template
    assert model.chars_per_token == 4.0
    model.note_tokens(PromptKeys(keys=(1,), piece_tokens=128, tokens=200), 400)  # text with 2 characters in a token
    assert model.chars_per_token == pytest.approx(4.0 - 0.05 * 2.0)
    for _ in range(300):  # a text of 1,200 characters, of 2 in a token
        model.note_tokens(text_keys("x" * 1200, 512, model.chars_per_token, 0), 600)
    assert model.chars_per_token == pytest.approx(2.0, abs=0.02)
    model.note_tokens(PromptKeys(keys=(1,), piece_tokens=128, tokens=10**9), 1)
    assert model.chars_per_token == 32.0


def test_the_mean_is_the_same_with_many_prompts_on_their_way(monkeypatch: pytest.MonkeyPatch) -> None:
    from router.prompt_keys import text_keys

    model = Pools(Clock(monkeypatch)).model
    model.piece_tokens = 128
    on_their_way = [text_keys("x" * 1200, 512, model.chars_per_token, 0) for _ in range(200)]
    for _ in range(300):
        on_their_way.append(text_keys("x" * 1200, 512, model.chars_per_token, 0))
        model.note_tokens(on_their_way.pop(0), 600)
        assert 1.9 < model.chars_per_token <= 4.0


async def test_a_stored_response_is_found_in_any_model_and_read_in_the_group_that_holds_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from deployments.endpoint import served_model
    from deployments.endpoint.served_model import find_holder

    know(monkeypatch, a=["a0"], b=["b0", "b1"], c=[])
    clock = Clock(monkeypatch)
    other, made = Pools(clock, "a"), Pools(clock, "abc")
    made.model.long = Pools(clock, "d").model
    asked = list[str]()

    async def answers(handle: Any, method: str, timeout_s: float, response_id: str) -> list[str | None]:
        assert (method, response_id) == ("holder_of", "resp_1")
        asked.extend(name for name, one in made.handles.items() if one is handle)
        return [None, "b1"] if handle is made.handles["b"] else [None]

    monkeypatch.setattr(served_model, "answers_in_time", answers)
    holder: Any = await find_holder([other.model, made.model], "resp_1")
    assert (holder.model, holder.group.name, holder.replica_id) == (made.model, "b", "b1")
    assert asked == ["a", "b"]  # no replica of c would answer
    assert await find_holder([other.model], "resp_1") is None
    request = made.request()
    request.holder = holder
    made.handles["b"].next = [("b1", [whole()])]  # by load alone it would go to a, the first of equal groups
    assert [frame async for frame in made.relay.frames(request)] == [whole()]
    assert made.handles["b"].requests[0].routing.preferred == "b1"
    request.failed_groups.add("b")
    made.handles["a"].next = [("a0", [whole()])]
    assert [frame async for frame in made.relay.frames(request)] == [whole()]
