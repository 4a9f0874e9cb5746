"""Model cards have the fields of vLLM's own."""

import pytest

from deployments.endpoint.model_card import model_card


@pytest.mark.vllm
def test_a_card_has_the_fields_of_vllms_and_of_its_permission() -> None:
    from vllm.entrypoints.serve.engine.protocol import ModelCard, ModelPermission

    card = model_card("m", root="/models/m", max_model_len=4096, created_s=7)
    theirs = ModelCard(id="m", root="/models/m", max_model_len=4096, created=7, permission=[ModelPermission(created=7)])
    assert card.keys() == theirs.model_dump().keys()
    own = {"owned_by", "permission"}
    assert {key: card[key] for key in card.keys() - own} == theirs.model_dump(exclude=own)
    (permission,) = card["permission"]
    assert permission == {**theirs.permission[0].model_dump(), "id": "modelperm-m"}


def test_an_adapter_names_the_model_that_it_changes() -> None:
    card = model_card("adapter", root="/adapters/a", max_model_len=None, created_s=7, parent="m")
    assert (card["root"], card["parent"], card["max_model_len"]) == ("/adapters/a", "m", None)
