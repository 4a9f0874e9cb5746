"""A client that leaves in the middle of a stream of vLLM's own application frees its work on both sides."""

from typing import Any

import aiohttp
import pytest

from tests.engines.endpoint import eventually, prompt_ids, total

pytestmark = [pytest.mark.ray, pytest.mark.vllm]

TEXT = "You may obtain a copy of the License. " * 40
SAID = [{"role": "user", "content": TEXT}]
# More than an engine computes until it is asked what it holds.
MOST_TOKENS = 3000
HELD = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "response": ("/v1/responses", {"input": TEXT, "max_output_tokens": MOST_TOKENS, "ignore_eos": True}),
    "messages": ("/v1/messages", {"messages": SAID, "max_tokens": MOST_TOKENS}),
    "token ids": (
        "/inference/v1/generate",
        {
            "token_ids": prompt_ids(600, seed=41),
            "sampling_params": {"max_tokens": MOST_TOKENS, "temperature": 0.0, "ignore_eos": True},
        },
    ),
    "chat over SageMaker's route": (
        "/invocations",
        {"messages": SAID, "max_tokens": MOST_TOKENS, "ignore_eos": True},
    ),
}


@pytest.mark.parametrize("name", STREAMS)
async def test_a_client_that_leaves_frees_its_work_on_both_sides(app: Any, name: str) -> None:
    path, fields = STREAMS[name]
    body = {"model": "tiny", "stream": True, "temperature": 0.0, "cache_salt": name, **fields}
    prefilled = total(app, "tandem_prefill_path_total", path="remote")
    generated = total(app, "vllm:generation_tokens_total", role="decode")
    async with aiohttp.ClientSession() as session, session.post(f"{app.url}{path}", json=body) as response:
        assert response.status == 200, await response.text()
        for _ in range(20):  # well inside of the answer: each event has several lines
            assert await response.content.readline()
    assert total(app, "tandem_prefill_path_total", path="remote") == prefilled + 1
    await eventually(lambda: not total(app, *HELD), within_s=30.0)
    assert total(app, "vllm:generation_tokens_total", role="decode") < generated + MOST_TOKENS
