"""Which requests with an adapter are refused, and to which replicas the others go."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from router.adapters import AdapterNews, AdapterSpec
from tests.deployments.endpoint.pools import Clock, Pools, know

pytestmark = pytest.mark.ray


class Feed:
    """News that a test sets."""

    def __init__(self, **held: dict[str, dict[str, str]]) -> None:
        self.news = AdapterNews(held=held)


def model(*groups: tuple[str, str | None]) -> Any:
    made = [
        SimpleNamespace(name=f"g{number}", pool=pool, prefill_pool=prefill)
        for number, (pool, prefill) in enumerate(groups)
    ]
    return SimpleNamespace(model_id="tiny", groups=made, serving=lambda: made)


async def refusal(feed: Feed, *groups: tuple[str, str | None]) -> str:
    from deployments.endpoint.adapters import NamedAdapter
    from deployments.wire.openai_errors import OpenAIError

    with pytest.raises(OpenAIError) as caught:
        await NamedAdapter("red", feed).check(model(*groups))
    assert (caught.value.status, caught.value.code) == (503, "adapter_not_loaded")
    return caught.value.message


RED: dict[str, dict[str, str]] = {"r0": {"red": "red@1"}}
NONE: dict[str, dict[str, str]] = {"r0": {}}


async def test_an_adapter_must_be_in_both_roles_of_one_group_with_the_same_files() -> None:
    from deployments.endpoint.adapters import NamedAdapter

    assert "its prefill replicas do not have it" in await refusal(Feed(d=RED, p=NONE), ("d", "p"))
    assert "its decode replicas do not have it" in await refusal(Feed(d=NONE, p=RED), ("d", "p"))
    assert "g0: its replicas do not have it" in await refusal(Feed(d=NONE, p=NONE), ("d", "p"))
    assert "its replicas do not have it" in await refusal(Feed(d=NONE), ("d", None))
    other = {"r0": {"red": "red@2"}}
    assert "have other files of it" in await refusal(Feed(d=RED, p=other), ("d", "p"))
    crossed = Feed(d0=RED, p0=NONE, d1=NONE, p1=RED)
    assert "group g0: its prefill" in await refusal(crossed, ("d0", "p0"), ("d1", "p1"))
    for feed, groups in (
        (Feed(d=RED, p=RED), [("d", "p")]),
        (Feed(d=RED), [("d", None)]),
        (Feed(d=NONE, p=NONE, e=RED), [("d", "p"), ("e", None)]),
    ):
        await NamedAdapter("red", feed).check(model(*groups))


def test_groups_and_replicas_without_the_adapter_are_named() -> None:
    from deployments.endpoint.adapters import NamedAdapter

    feed = Feed(d={"r0": {"red": "red@1"}, "r1": {}}, e=NONE)
    adapter = NamedAdapter("red", feed)
    assert adapter.lacking("d") == {"r1"}
    assert adapter.lacking_groups(model(("d", None), ("e", None))) == {"g1"}
    assert adapter.identity(model(("d", None))) == "red@1"


async def test_the_relay_keeps_off_replicas_and_groups_without_the_adapter(monkeypatch: pytest.MonkeyPatch) -> None:
    from deployments.endpoint.adapters import NamedAdapter
    from tests.deployments.endpoint.pools import done

    know(monkeypatch, a=["a0"], b=["b0", "b1"])
    pools = Pools(Clock(monkeypatch), "ab")
    held = {"decode:test_endpoint:a": NONE, "decode:test_endpoint:b": {"b0": {}, "b1": {"red": "red@1"}}}
    pools.handles["b"].next = [("b1", [done()])]
    request = pools.request()
    request.adapter = NamedAdapter("red", Feed(**held))
    assert [frame.text async for frame in pools.relay.frames(request)] == [done().text]
    (sent,) = pools.handles["b"].requests
    assert (sent.adapter, sent.routing.exclude) == ("red@1", {"b0"})
    assert request.cache_name == "red@1"


def names(feed: Any) -> Any:
    from deployments.config import ModelConfig
    from deployments.endpoint.adapters import AdapterNames

    config = ModelConfig.model_validate(
        {"id": "tiny", "source": "./x", "adapters": [{"id": "red", "path": "/red"}], "adapters_folder": "/adapters"}
    )
    return AdapterNames(feed, [config])


def test_names_are_those_of_the_board_and_before_its_news_those_of_the_configuration() -> None:
    feed = Feed()
    found = names(feed)
    assert (found.names(), found.base_of("red"), found.base_of("blue")) == (["red"], "tiny", "blue")
    feed.news = AdapterNews(wanted={"tiny": (AdapterSpec(name="blue", path="/adapters/blue"),)})
    assert (found.names(), found.base_of("red"), found.base_of("blue")) == (["blue"], "red", "tiny")
    assert found.named("blue").name == "blue" and found.named("tiny") is None


def test_a_card_has_the_base_as_parent_and_the_path_as_root() -> None:
    (card,) = names(Feed()).cards(5)
    assert {"id": "red", "parent": "tiny", "root": "/red", "created": 5, "object": "model"}.items() <= card.items()
    assert card == names(Feed()).card("red", 5)
    assert names(Feed()).card("tiny", 5) is None


def test_a_cards_fields_are_vllms() -> None:
    from vllm.entrypoints.serve.engine.protocol import ModelCard

    (card,) = names(Feed()).cards(5)
    assert set(card) == set(ModelCard(id="red", permission=[]).model_dump())
    ModelCard.model_validate(card)


def routes(**config: Any) -> Any:
    from deployments.config import ModelConfig
    from deployments.endpoint.adapter_routes import AdapterRoutes
    from deployments.endpoint.config import IngressConfig
    from deployments.endpoint.request_body import Bodies

    ingress = IngressConfig.model_validate(config)
    folders = {"tiny": "/adapters", "other": "/adapters", "third": "/more", "plain": None}
    models = {
        name: ModelConfig.model_validate({"id": name, "source": "./x", "adapters_folder": folder})
        for name, folder in folders.items()
    }
    made = AdapterRoutes("nobody", ingress, Bodies(ingress), models)
    asked: list[Any] = []

    async def ask(*arguments: Any) -> None:
        asked.append(arguments)

    made._ask = ask  # type: ignore[method-assign]
    return made, asked


def http(body: bytes) -> Any:
    from fastapi import Request

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    headers = [(b"content-type", b"application/json")]
    return Request({"type": "http", "method": "POST", "path": "/v1/load_lora_adapter", "headers": headers}, receive)


@pytest.mark.parametrize(
    ("body", "status", "why"),
    [
        (b"{}", 400, "lora_name must be a text"),
        (b'{"lora_name": "red"}', 400, "lora_path must be a text"),
        (b'{"lora_name": 7, "lora_path": "/more/x"}', 400, "lora_name must be a text"),
        (b'{"lora_name": "a\\nb", "lora_path": "/more/x"}', 400, "printable"),
        (b'{"lora_name": "red", "lora_path": "/more/x", "load_inplace": "yes"}', 400, "true or false"),
        (b'{"lora_name": "tiny", "lora_path": "/more/x"}', 400, "is the name of a model"),
        (b'{"lora_name": "red", "lora_path": "/etc"}', 400, "outside of the allowed folder"),
        (b'{"lora_name": "red", "lora_path": "/adapters/x"}', 400, "share the allowed folder: give base_model_name"),
        (b'{"lora_name": "red", "lora_path": "/more/x", "base_model_name": "tiny"}', 400, "outside"),
        (b'{"lora_name": "red", "lora_path": "/more/x", "base_model_name": "none"}', 404, "does not exist"),
        (b'{"lora_name": "red", "lora_path": "/more/x", "base_model_name": "plain"}', 400, "none of this model"),
        (b"[]", 400, "must be a JSON object"),
    ],
)
async def test_a_wrong_request_to_load_is_refused_before_any_replica_hears_of_it(
    body: bytes, status: int, why: str
) -> None:
    from deployments.wire.openai_errors import OpenAIError

    made, asked = routes()
    with pytest.raises(OpenAIError, match=why) as caught:
        await made.load(http(body), None)
    assert (caught.value.status, asked) == (status, [])


async def test_the_folder_says_which_model_an_adapter_is_for() -> None:
    made, asked = routes()
    await made.load(http(b'{"lora_name": "red", "lora_path": "/more/x"}'), None)
    await made.load(http(b'{"lora_name": "blue", "lora_path": "y", "base_model_name": "tiny"}'), None)
    assert asked == [("load", "third", "red", "/more/x", False), ("load", "tiny", "blue", "y", False)]


async def test_only_the_keys_of_administrators_may_change_adapters(tmp_path: Path) -> None:
    from deployments.wire.openai_errors import OpenAIError

    made, asked = routes(api_keys_file=str(tmp_path / "keys"), admin_keys=["ops"])
    body = b'{"lora_name": "red", "lora_path": "/more/x"}'
    with pytest.raises(OpenAIError, match="the key 'team' may not change adapters") as caught:
        await made.load(http(body), "team")
    assert (caught.value.status, asked) == (403, [])
    assert (await made.load(http(body), "ops")).status_code == 200
    with pytest.raises(OpenAIError, match="'tiny' is a model and no adapter"):
        await made.unload(http(b'{"lora_name": "tiny"}'), "ops")
