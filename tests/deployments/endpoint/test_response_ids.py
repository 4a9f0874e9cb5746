"""Stored responses belong to the key that has created them."""

import re

import pytest

from deployments.endpoint.response_ids import check_owner, new_response_id
from deployments.wire.openai_errors import OpenAIError

SEED = "0123456789abcdef0123456789abcdef"


@pytest.mark.parametrize("key", [None, "", "team-a"])
def test_key_finds_its_own_response(key: str | None) -> None:
    response_id = new_response_id(SEED, key)
    assert re.fullmatch(r"resp_[0-9a-f]{32}", response_id)
    check_owner(response_id, key, "response_id")


@pytest.mark.parametrize("response_id", [new_response_id(SEED, "team-a"), "resp_1", "", "x" * 10_000])
def test_other_ids_are_not_found_and_not_told_apart(response_id: object) -> None:
    with pytest.raises(OpenAIError, match="is not here") as caught:
        check_owner(response_id, "team-b", "response_id")
    assert (caught.value.status, caught.value.param) == (404, "response_id")
    assert len(caught.value.message) < 300


@pytest.mark.parametrize("response_id", [7, None, {"wrong": [1.5]}])
def test_an_id_that_is_no_text_is_refused_by_its_type(response_id: object) -> None:
    with pytest.raises(OpenAIError, match="response_id must be a string, got ") as caught:
        check_owner(response_id, "team-b", "response_id")
    assert (caught.value.status, caught.value.param) == (400, "response_id")


def test_clients_without_keys_share_no_owner_with_a_key() -> None:
    assert new_response_id(SEED, None) != new_response_id(SEED, "")
