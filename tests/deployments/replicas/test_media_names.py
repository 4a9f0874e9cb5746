"""Clients cannot name images for others."""

import copy
import hashlib
from typing import Any

import pytest

from deployments.replicas.media_names import with_own_media_names
from deployments.wire.openai_errors import OpenAIError

PART = {"type": "image_url", "image_url": {"url": "data:x", "uuid": "inner"}, "uuid": "mine"}
PLAIN = {"type": "image_url", "image_url": {"url": "data:x", "uuid": "inner"}}
TEXT = {"type": "text", "text": "uuid"}


@pytest.mark.parametrize("name", ["messages", "input"])
def test_the_name_of_an_image_is_left_out(name: str) -> None:
    body = {"model": "m", name: [{"role": "user", "content": [TEXT, PART]}, {"role": "user", "content": "hello"}]}
    given = copy.deepcopy(body)
    assert with_own_media_names(body)[name] == [
        {"role": "user", "content": [TEXT, PLAIN]},
        {"role": "user", "content": "hello"},
    ]
    assert body == given


def test_several_conversations_and_bare_parts_are_searched_too() -> None:
    assert with_own_media_names({"messages": [[{"role": "user", "content": [PART]}]]})["messages"][0][0]["content"] == [
        PLAIN
    ]
    assert with_own_media_names({"content_parts": [PART, TEXT]})["content_parts"] == [PLAIN, TEXT]


def test_other_fields_keep_their_values() -> None:
    fields: dict[str, Any] = {"metadata": {"uuid": "kept"}, "tools": [{"uuid": "kept"}], "prompt": [1, 2], "input": "x"}
    assert with_own_media_names(fields) == fields


def test_features_are_named_by_their_content() -> None:
    features = {"mm_hashes": {"image": ["a", "a"]}, "kwargs_data": {"image": ["red", "blue"]}, "mm_placeholders": {}}
    named = with_own_media_names({"features": features})["features"]
    assert named["mm_hashes"] == {"image": [hashlib.sha256(data).hexdigest() for data in (b"red", b"blue")]}
    assert (named["kwargs_data"], named["mm_placeholders"]) == (features["kwargs_data"], {})


@pytest.mark.parametrize("data", [None, {}, {"image": ["red"]}, {"image": ["red", None]}, {"image": "rb"}])
def test_features_without_data_are_refused(data: Any) -> None:
    features = {"mm_hashes": {"image": ["a", "b"]}, "kwargs_data": data}
    with pytest.raises(OpenAIError, match="give kwargs_data for every item of mm_hashes") as caught:
        with_own_media_names({"features": features})
    assert (caught.value.status, caught.value.param) == (400, "features")


@pytest.mark.parametrize(
    "features", [7, None, {}, {"mm_hashes": 7}, {"mm_hashes": {"image": 7}}, {"mm_hashes": {}, "kwargs_data": 7}]
)
def test_features_of_a_wrong_shape_are_left_to_vllm(features: Any) -> None:
    assert with_own_media_names({"features": features}) == {"features": features}
