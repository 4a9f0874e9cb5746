"""The serving path on real Ray Serve, vLLM and NIXL."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp
import openai
import pytest

from serve_app.local.quickstart import prefill_metrics
from tests.engines.endpoint import eventually, prompt_ids, total

pytestmark = [pytest.mark.ray, pytest.mark.vllm]

# Below and above the default bound of 128 tokens; the last two span several KV blocks and several prefill steps.
LENGTHS = (5, 127, 200, 700, 2500)


def paths(app: Any) -> dict[str, int]:
    counts = {"local": 0, "remote": 0}
    for key, count in prefill_metrics(app.metrics_url).items():
        if key[0] == "path":
            counts[key[1]] += count
    return counts


def assert_clear_choice(logprobs: list[float]) -> None:
    """The greedy token won by more than the difference between two orders of float32 additions."""
    best, second = sorted(logprobs, reverse=True)[:2]
    assert best - second > 1e-4


@pytest.mark.parametrize("length", LENGTHS)
def test_greedy_completion_is_the_same_on_both_paths(app: Any, length: int) -> None:
    client = app.client()
    before = paths(app)
    common: dict[str, Any] = {
        "model": "tiny",
        "prompt": prompt_ids(length, seed=length),
        "max_tokens": 24,
        "temperature": 0.0,
        "logprobs": 2,
    }
    routed = client.completions.create(**common, extra_body={"cache_salt": "routed"}).choices[0]
    after = paths(app)
    expected = "local" if length <= 128 else "remote"
    assert {path: after[path] - before[path] for path in after if after[path] != before[path]} == {expected: 1}
    # Prompt logprobs need a local forward pass, so this one is computed by the decode engine alone; the salt keeps it
    # from reusing the KV that the first request brought over.
    local = client.completions.create(**common, extra_body={"cache_salt": "local", "prompt_logprobs": 1}).choices[0]
    assert routed.text == local.text
    for top in routed.logprobs.top_logprobs:
        assert_clear_choice(list(top.values()))


@pytest.mark.parametrize("length", [20, 400])
def test_streamed_text_equals_the_whole_text(app: Any, length: int) -> None:
    client = app.client()
    common: dict[str, Any] = {
        "model": "tiny",
        "prompt": prompt_ids(length, seed=79),
        "max_tokens": 32,
        "temperature": 0.0,
    }
    whole = client.completions.create(**common, logprobs=2, extra_body={"cache_salt": "whole"}).choices[0]
    for top in whole.logprobs.top_logprobs:
        assert_clear_choice(list(top.values()))
    parts = client.completions.create(**common, stream=True, extra_body={"cache_salt": "stream"})
    assert "".join(part.choices[0].text for part in parts) == whole.text


def test_chat_is_the_same_on_both_paths_streaming_and_not(app: Any) -> None:
    client = app.client()
    messages: Any = [{"role": "user", "content": "You may obtain a copy of the License. " * 60}]
    common: dict[str, Any] = {"model": "tiny", "messages": messages, "max_tokens": 24, "temperature": 0.0}
    before = paths(app)
    remote = client.chat.completions.create(**common, logprobs=True, top_logprobs=2, extra_body={"cache_salt": "a"})
    for token in remote.choices[0].logprobs.content:
        assert_clear_choice([top.logprob for top in token.top_logprobs])
    assert paths(app)["remote"] == before["remote"] + 1
    local = client.chat.completions.create(**common, extra_body={"cache_salt": "b", "prompt_logprobs": 1})
    assert paths(app)["local"] == before["local"] + 1
    parts = client.chat.completions.create(**common, stream=True, extra_body={"cache_salt": "c"})
    streamed = "".join(part.choices[0].delta.content or "" for part in parts)
    assert paths(app)["remote"] == before["remote"] + 2
    assert remote.choices[0].message.content == local.choices[0].message.content == streamed
    assert remote.usage.prompt_tokens > 128
    assert remote.usage.completion_tokens == 24


def test_a_cached_prompt_is_prefilled_locally_and_the_estimate_of_its_cached_tokens_is_exact(app: Any) -> None:
    client = app.client()
    before = prefill_metrics(app.metrics_url)
    for extra in ([], [401, 402]):
        client.completions.create(model="tiny", prompt=prompt_ids(900, seed=5) + extra, max_tokens=2, temperature=0.0)
    after = prefill_metrics(app.metrics_url)
    assert after["path", "local", "cached"] == before["path", "local", "cached"] + 1
    errors = "tandem_cached_tokens_error_tokens_bucket"
    assert total(app, errors, le="0.0") == total(app, errors, le="+Inf") > 0


def test_kv_moves_over_nixl(app: Any) -> None:
    before = prefill_metrics(app.metrics_url)["nixl_bytes",]
    app.client().completions.create(model="tiny", prompt=prompt_ids(512, seed=909), max_tokens=2)
    # 4 layers x K and V x 2 heads x 64 x 4 bytes = 4096 bytes a token, whole blocks.
    assert prefill_metrics(app.metrics_url)["nixl_bytes",] - before >= 480 * 4096


def test_prefill_tells_routers_how_many_tokens_wait(app: Any) -> None:
    import ray

    (name,) = [
        actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True) if "#prefill:g0#" in actor["name"]
    ]
    replica = ray.get_actor(name, namespace="serve")

    def queued() -> int:
        return int(ray.get(replica.record_routing_stats.remote())["queued_tokens"])

    with ThreadPoolExecutor() as pool:
        answers = [
            pool.submit(
                app.client().completions.create, model="tiny", prompt=prompt_ids(2500, seed=20 + n), max_tokens=1
            )
            for n in range(6)
        ]
        most = 0
        while not all(answer.done() for answer in answers):
            most = max(most, queued())
    assert [answer.result().usage.prompt_tokens for answer in answers] == [2500] * 6
    assert most >= 5000
    assert queued() == 0


@pytest.mark.parametrize("extra", [{"n": 2, "temperature": 1.0}, {"extra_body": {"prompt_logprobs": 1}}])
def test_a_prompt_that_cannot_be_handed_over_is_prefilled_on_decode(app: Any, extra: dict[str, Any]) -> None:
    before = total(app, "tandem_prefill_path_total", reason="not_transferable")
    answer = app.client().completions.create(
        **{"model": "tiny", "prompt": prompt_ids(300, seed=3), "max_tokens": 4, "temperature": 0.0, **extra}
    )
    assert [choice.finish_reason for choice in answer.choices] == ["length"] * extra.get("n", 1)
    assert total(app, "tandem_prefill_path_total", reason="not_transferable") == before + 1


def test_echo_repeats_the_prompt_on_the_remote_path_too(app: Any) -> None:
    before = paths(app)
    common: dict[str, Any] = {"model": "tiny", "prompt": "You may obtain a copy. " * 60, "max_tokens": 4}
    echoed = app.client().completions.create(**common, temperature=0.0, echo=True).choices[0].text
    assert paths(app)["remote"] == before["remote"] + 1
    plain = app.client().completions.create(**common, temperature=0.0).choices[0].text
    assert echoed == common["prompt"] + plain


def test_a_list_of_prompts_gives_each_its_own_answer(app: Any) -> None:
    client = app.client()
    prompts = [prompt_ids(300, seed=921), prompt_ids(260, seed=922), prompt_ids(10, seed=923)]
    before = paths(app)
    together = client.completions.create(model="tiny", prompt=prompts, max_tokens=8, temperature=0.0)
    assert paths(app) == {"local": before["local"] + 1, "remote": before["remote"] + 2}  # prefill lost none of them
    alone = [
        client.completions.create(model="tiny", prompt=one, max_tokens=8, temperature=0.0).choices[0].text
        for one in prompts
    ]
    assert [choice.text for choice in together.choices] == alone


@pytest.mark.parametrize(
    "smuggled",
    [
        {"kv_transfer_params": {"do_remote_prefill": True, "remote_block_ids": [1], "remote_engine_id": "x"}},
        {"ec_transfer_params": {"x": {}}},
        {"vllm_xargs": {"kv_transfer_params": "x"}},
    ],
    ids=lambda smuggled: "/".join(smuggled),
)
def test_clients_cannot_set_transfer_params(app: Any, smuggled: dict[str, Any]) -> None:
    common: dict[str, Any] = {"model": "tiny", "prompt": prompt_ids(20, seed=1), "max_tokens": 8, "temperature": 0.0}
    plain = app.client().completions.create(**common)
    assert app.client().completions.create(**common, extra_body=smuggled).choices[0].text == plain.choices[0].text


async def test_a_request_that_decode_refuses_leaves_no_kv_on_prefill(app: Any) -> None:
    body = {"model": "tiny", "prompt": prompt_ids(2000, seed=90), "logit_bias": {"999999": 1}, "max_tokens": 2}
    async with aiohttp.ClientSession() as session, session.post(f"{app.url}/v1/completions", json=body) as response:
        assert response.status == 400
    await eventually(lambda: not total(app, "vllm:kv_cache_usage_perc", role="prefill"))


def test_structured_output_comes_with_logprobs(app: Any) -> None:
    answer = app.client().chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "yes or no? " * 80}],
        max_tokens=8,
        temperature=0.0,
        logprobs=True,
        top_logprobs=2,
        extra_body={"structured_outputs": {"choice": ["yes", "no"]}},
    )
    assert answer.choices[0].message.content in ("yes", "no")
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2


def test_a_named_tool_is_called_with_arguments_of_its_schema(app: Any) -> None:
    tool: Any = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"unit": {"enum": ["celsius", "kelvin"]}},
                "required": ["unit"],
                "additionalProperties": False,
            },
        },
    }
    choice: Any = {"type": "function", "function": {"name": "get_weather"}}
    answer = app.client().chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "You may obtain a copy of the License. " * 30}],
        tools=[tool],
        tool_choice=choice,
        max_tokens=400,
        temperature=1.0,
        seed=1,
    )
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["unit"] in ("celsius", "kelvin")


def test_beam_search_is_served_by_decode_alone(app: Any) -> None:
    before = total(app, "tandem_prefill_path_total", path="remote")
    answer = app.client().completions.create(
        model="tiny",
        prompt=prompt_ids(300, seed=8),
        n=2,
        max_tokens=6,
        temperature=0.0,
        extra_body={"use_beam_search": True},
    )
    assert len({choice.text for choice in answer.choices}) == 2
    assert total(app, "tandem_prefill_path_total", path="remote") == before


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": value}
    return value


def test_replicas_run_on_nodes_with_the_demanded_labels(app: Any) -> None:
    import ray
    from ray._private.state import actors

    labels = {node["NodeID"]: node["Labels"] for node in ray.nodes()}
    where = {
        actor["Name"]: labels[actor["Address"]["NodeID"]].get("tandem.io/s0")
        for actor in actors().values()
        if actor["State"] == "ALIVE" and "tandem#" in actor["Name"]
    }
    assert {name.split("#")[1]: switch for name, switch in where.items() if "ingress" not in name} == {
        "prefill:g0": "left",
        "decode:g0": "right",
        "decode:offline": "right",
    }


CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
BAD_REQUESTS = [
    ("chat/completions", {**CHAT, "top_logprobs": 2}, 400, "top_logprobs"),
    ("chat/completions", {**CHAT, "tool_choice": 3}, 400, "tool_choice"),
    ("chat/completions", {**CHAT, "response_format": {"type": "json_schema"}}, 400, "response_format"),
    ("chat/completions", {**CHAT, "messages": 3}, 400, "messages"),
    ("chat/completions", {**CHAT, "messages": ["x"]}, 400, "messages"),
    ("chat/completions", {**CHAT, "messages": [{"role": "user", "content": "\ud800"}]}, 400, None),
    ("chat/completions", {**CHAT, "stop": "\ud800"}, 400, None),
    ("chat/completions", {**CHAT, "tool_choice": "zzz", "tools": []}, 400, "tools"),
    ("chat/completions", {**CHAT, "n": 0}, 400, "n"),
    ("chat/completions", {**CHAT, "presence_penalty": 3}, 400, "presence_penalty"),
    ("chat/completions", {**CHAT, "stop": ""}, 400, "stop"),
    ("chat/completions", {**CHAT, "stream": True, "min_tokens": 9}, 400, "min_tokens"),
    ("completions", {"prompt": "x", "stream_options": {"include_usage": True}}, 400, "stream_options"),
    ("completions", {"prompt": "x", "structured_outputs": {}}, 400, "structured_outputs"),
    ("completions", {"prompt": [301] * 5000}, 400, "prompt"),
    ("completions", {"prompt": "x", "logit_bias": nested(600)}, 400, None),
    ("completions", {"prompt": "a b " * 10_000_000}, 413, None),
    ("completions", {"prompt": "a b " * 4_000_000}, 400, None),
    ("completions", {"prompt": "x", "model": "other"}, 404, "model"),
    ("completions", {"prompt": "x", "model": None}, 400, "model"),  # there are two
    ("completions", {"prompt": "x", "model": 3}, 400, "model"),
    ("completions", {"prompt": ""}, 400, "prompt"),
    ("completions", {"prompt": []}, 400, "prompt"),
    ("completions", {}, 400, "prompt"),
    ("completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
    ("completions", {"prompt": "x", "max_tokens": -1}, 400, "max_tokens"),
    ("completions", {"prompt": "x", "max_tokens": 5000}, 400, "max_tokens"),
    ("completions", {"prompt": "x", "max_tokens": 5000, "stream": True}, 400, "max_tokens"),
    ("completions", {"prompt": "x", "temperature": "hot"}, 400, "temperature"),
    ("completions", {"prompt": "x", "suffix": "y"}, 400, "suffix"),
    ("completions", {"prompt": "x", "suffix": ""}, 400, "suffix"),
    ("completions", {"prompt": "x", "stream": "maybe"}, 400, "stream"),
    ("completions", {"prompt": "x", "n": "16384"}, 400, "n"),
    ("completions", {"prompt": "x", "max_tokens": 0, "stream": True}, 400, "max_tokens"),
    ("completions", {"prompt": [5] * 5000}, 400, None),
    ("completions", {"prompt": [5] * 5000, "stream": True}, 400, None),
    ("chat/completions", {"messages": []}, 400, "messages"),
    ("chat/completions", {}, 400, "messages"),
    ("chat/completions", {"messages": "hello"}, 400, "messages"),
    ("chat/completions", {**CHAT, "max_tokens": 0, "echo": True}, 400, "max_tokens"),
    ("chat/completions", {**CHAT, "kv_transfer_params": {"prompt_token_ids": "abc"}}, 400, "kv_transfer_params"),
    ("chat/completions", {**CHAT, "kv_transfer_params": {"prompt_token_ids": [10**6]}}, 400, None),
    ("chat/completions", {**CHAT, "kv_transfer_params": {"prompt_token_ids": [301] * 5000}}, 400, None),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 0},
        400,
        "max_completion_tokens",
    ),
]


@pytest.mark.parametrize(("endpoint", "body", "status", "param"), BAD_REQUESTS)
async def test_bad_input_is_an_openai_error_and_the_next_request_works(
    app: Any, endpoint: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{app.url}/v1/{endpoint}", json={"model": "tiny", **body}) as response:
            error = (await response.json())["error"]
            assert response.status == status, error
            assert error["message"]
            assert error["type"] == "invalid_request_error"
            if param is not None:
                assert error["param"] == param
        good = {"model": "tiny", "prompt": "x", "max_tokens": 1}
        async with session.post(f"{app.url}/v1/completions", json=good) as response:
            assert response.status == 200


@pytest.mark.parametrize("raw", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000, b'"text"'])
async def test_malformed_json_is_a_400(app: Any, raw: bytes) -> None:
    async with (
        aiohttp.ClientSession(headers={"Content-Type": "application/json"}) as session,
        session.post(f"{app.url}/v1/completions", data=raw) as response,
    ):
        assert response.status == 400
        assert (await response.json())["error"]["type"] == "invalid_request_error"


async def test_a_body_that_a_page_of_another_site_may_post_is_refused(app: Any) -> None:
    body = json.dumps({"model": "tiny", "prompt": "x"})  # aiohttp calls this text/plain
    async with aiohttp.ClientSession() as session, session.post(f"{app.url}/v1/completions", data=body) as response:
        assert response.status == 415
        assert "application/json" in (await response.json())["error"]["message"]


async def test_unknown_paths_and_methods_are_openai_errors(app: Any) -> None:
    async with aiohttp.ClientSession() as session:
        for method, path, status in (("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405)):
            async with session.request(method, f"{app.url}{path}") as response:
                assert response.status == status
                assert "error" in await response.json()


def test_official_but_harmless_fields_are_ignored(app: Any) -> None:
    answer = app.client().chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "x"}],
        max_tokens=2,
        metadata={"a": "b"},
        store=True,
        service_tier="auto",
        user="someone",
        extra_body={"nobody_knows_this": 1},
    )
    assert answer.usage.completion_tokens <= 2


def test_an_answer_has_the_request_id_of_its_request(app: Any) -> None:
    raw = app.client().completions.with_raw_response.create(
        model="tiny", prompt="x", max_tokens=1, extra_headers={"X-Request-Id": "my-id-1"}
    )
    assert raw.headers["x-request-id"] == "my-id-1"
    assert "my-id-1" in raw.parse().id


def test_models_are_listed_and_an_unknown_model_is_not_found(app: Any) -> None:
    client = app.client()
    assert [model.id for model in client.models.list()] == ["tiny", "offline"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


async def test_a_client_that_leaves_frees_its_work_on_both_sides(app: Any) -> None:
    body = {
        "model": "tiny",
        "prompt": prompt_ids(600, seed=31),
        "max_tokens": 3000,
        "stream": True,
        "ignore_eos": True,
    }
    before = total(app, "vllm:generation_tokens_total", role="decode")
    async with aiohttp.ClientSession() as session, session.post(f"{app.url}/v1/completions", json=body) as response:
        await response.content.readline()
    held = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    await eventually(lambda: not total(app, *held), within_s=30.0)
    assert total(app, "vllm:generation_tokens_total", role="decode") < before + body["max_tokens"]


@pytest.mark.parametrize(
    ("length", "max_tokens", "leaves_after_s"),
    [(20, 1000, 0.5), (4000, 90, 0.2)],
    ids=["while decoding", "while prefill computes"],
)
async def test_a_client_that_leaves_before_the_first_byte_frees_its_work(
    app: Any, length: int, max_tokens: int, leaves_after_s: float
) -> None:
    body = {"model": "tiny", "prompt": prompt_ids(length, seed=32), "max_tokens": max_tokens, "ignore_eos": True}
    generated = total(app, "vllm:generation_tokens_total", role="decode")
    prefilled = total(app, "tandem_remote_prefill_seconds_count")
    timeout = aiohttp.ClientTimeout(total=leaves_after_s)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        with pytest.raises(TimeoutError):
            await session.post(f"{app.url}/v1/completions", json=body)
    held = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    await eventually(lambda: not total(app, *held))
    await asyncio.sleep(2.0)  # longer than the remaining work would take
    assert total(app, "vllm:generation_tokens_total", role="decode") < generated + max_tokens
    assert total(app, "tandem_remote_prefill_seconds_count") == prefilled


def test_every_answer_is_counted_by_endpoint_and_code(app: Any) -> None:
    before = {code: total(app, "tandem_requests_total", endpoint="completions", code=code) for code in ("200", "400")}
    streams = total(app, "tandem_ttft_seconds_count")
    client = app.client()
    list(client.completions.create(model="tiny", prompt="x", max_tokens=3, stream=True))
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="tiny", prompt="", max_tokens=3)
    for code, count in before.items():
        assert total(app, "tandem_requests_total", endpoint="completions", code=code) == count + 1
    assert total(app, "tandem_ttft_seconds_count") == streams + 1
