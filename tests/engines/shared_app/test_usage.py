"""Cached tokens and times in answers are true over prefill, the handoff and decode."""

import time
from typing import Any

import pytest

from serve_app.local.quickstart import prefill_metrics
from tests.engines.endpoint import prompt_ids, total

pytestmark = [pytest.mark.ray, pytest.mark.vllm]

BLOCK = 32  # tokens in a block of the tiny model's KV
STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}


def remote_paths(app: Any) -> int:
    metrics = prefill_metrics(app.metrics_url)
    return sum(int(count) for key, count in metrics.items() if key[:2] == ("path", "remote"))


def completion(app: Any, ids: list[int], **fields: Any) -> Any:
    """The answer that has the usage: the whole one, or the last event of a stream."""
    answer = app.client().completions.create(model="tiny", prompt=ids, max_tokens=3, temperature=0.0, **fields)
    return list(answer)[-1] if fields.get("stream") else answer


def chat(app: Any, text: str, **fields: Any) -> Any:
    answer = app.client().chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": text}], max_tokens=3, temperature=0.0, **fields
    )
    return list(answer)[-1] if fields.get("stream") else answer


def cached(answer: Any) -> int:
    return int(answer.usage.prompt_tokens_details.cached_tokens)


@pytest.mark.parametrize("fields", [{}, STREAM], ids=["whole", "stream"])
def test_cached_tokens_are_those_that_no_engine_computed(app: Any, fields: dict[str, Any]) -> None:
    ids, before = prompt_ids(300, seed=700 + len(fields)), remote_paths(app)
    assert cached(completion(app, ids, **fields)) == 0
    assert remote_paths(app) == before + 1
    assert cached(completion(app, ids, **fields)) == 300 // BLOCK * BLOCK  # now decode has it
    # Decode has 288 tokens and pulls the rest; prefill has 288 too, and computes the rest.
    longer = ids + prompt_ids(400, seed=800 + len(fields))
    assert cached(completion(app, longer, **fields)) == 288
    assert remote_paths(app) == before + 2


def test_cached_tokens_of_a_prompt_of_which_decode_alone_has_a_part_are_those_of_prefill(app: Any) -> None:
    ids, before = prompt_ids(96, seed=710), remote_paths(app)
    assert cached(completion(app, ids)) == 0  # local: short
    assert remote_paths(app) == before
    assert cached(completion(app, ids + prompt_ids(600, seed=711))) == 0  # prefill computed all of it
    assert remote_paths(app) == before + 1


@pytest.mark.parametrize("fields", [{}, STREAM], ids=["whole", "stream"])
def test_a_chat_reports_what_prefill_had_cached_and_what_it_added(app: Any, fields: dict[str, Any]) -> None:
    salt, before = {"cache_salt": f"usage-{len(fields)}"}, remote_paths(app)
    text = "You may obtain a copy of the License. " * 60
    first = chat(app, text, extra_body=salt, **fields).usage
    assert first.prompt_tokens_details.cached_tokens == 0
    assert first.prompt_tokens_details.created_cache_tokens == first.prompt_tokens // BLOCK * BLOCK
    longer = chat(
        app, text + "It applies to each file of the Work and to its Derivatives. " * 30, extra_body=salt, **fields
    )
    assert 0 < cached(longer) <= first.prompt_tokens // BLOCK * BLOCK
    assert remote_paths(app) == before + 2


@pytest.mark.parametrize("fields", [{}, STREAM], ids=["whole", "stream"])
def test_times_of_an_answer_cover_prefill_and_the_handoff(app: Any, fields: dict[str, Any]) -> None:
    sums = ("tandem_remote_prefill_seconds_sum", "tandem_handoff_seconds_sum")
    before, began_s = [total(app, name) for name in sums], time.monotonic()
    metrics = completion(app, prompt_ids(4000, seed=720 + len(fields)), **fields).metrics
    took_ms = 1000 * (time.monotonic() - began_s)
    prefill_ms, handoff_ms = (1000 * (total(app, name) - old) for name, old in zip(sums, before, strict=True))
    first_ms = metrics["queue_time_ms"] + metrics["time_to_first_token_ms"]
    assert prefill_ms > 0
    # The handoff's time ends when the token is read, and that of an answer when the engine has it.
    assert prefill_ms < first_ms <= took_ms - metrics["generation_time_ms"]
    assert handoff_ms / 2 < metrics["time_to_first_token_ms"] < first_ms


def test_vllms_own_time_to_first_token_on_decode_includes_prefill(app: Any) -> None:
    names = {"role": "decode", "group": "g0"}
    count, spent_s = (f"vllm:time_to_first_token_seconds_{part}" for part in ("count", "sum"))
    before = total(app, count, **names), total(app, spent_s, **names)
    answer = completion(app, prompt_ids(4000, seed=730))
    assert total(app, count, **names) == before[0] + 1
    reported_ms = answer.metrics["queue_time_ms"] + answer.metrics["time_to_first_token_ms"]
    assert 1000 * (total(app, spent_s, **names) - before[1]) == pytest.approx(reported_ms, rel=0.1, abs=20.0)


@pytest.mark.parametrize("fields", [{}, STREAM], ids=["whole", "stream"])
def test_no_answer_names_the_place_of_kv(app: Any, fields: dict[str, Any]) -> None:
    ids = prompt_ids(300, seed=740 + len(fields))
    own = {"kv_transfer_params": {"do_remote_decode": True}, "vllm_xargs": {"kv_transfer_params": 1}}
    for answer in (
        completion(app, ids, extra_body=own, **fields),
        chat(app, "You may obtain a copy of the License. " * 50, extra_body=own, **fields),
    ):
        named = answer.model_dump()
        assert (named.get("kv_transfer_params"), named.get("ec_transfer_params")) == (None, None)
