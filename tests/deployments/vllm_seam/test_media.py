"""Images of a prompt reach another engine unchanged, or the reason says why they cannot."""

from types import SimpleNamespace
from typing import Any

import pytest

from router.length import PathReason

pytestmark = pytest.mark.vllm

SIZE_BYTES = 4 * 3 * 14 * 14  # of the pixels of one patch


def item(value: float, patches: int = 4) -> Any:
    """One processed image."""
    import torch
    from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFieldElem, MultiModalKwargsItem

    values = {"pixel_values": torch.full((patches, 3, 14, 14), value), "image_grid_thw": torch.tensor([1, 2, 2])}
    fields = {
        name: MultiModalFieldElem(data=data, field=MultiModalBatchedField(keep_on_cpu=name == "image_grid_thw"))
        for name, data in values.items()
    }
    return MultiModalKwargsItem(fields)


def prompt(*items: Any, **changes: Any) -> dict[str, Any]:
    """A rendered prompt with images at every tenth token, of which only the first embedding counts."""
    import torch
    from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

    mask = torch.tensor([True, False])
    places = [PlaceholderRange(offset=10 * number, length=2, is_embed=mask) for number in range(len(items))]
    return {
        "type": "multimodal",
        "prompt_token_ids": list(range(100)),
        "mm_kwargs": MultiModalKwargsItems({"image": list(items)}),
        "mm_hashes": {"image": [f"hash-{number}" for number in range(len(items))]},
        "mm_placeholders": {"image": places},
        **changes,
    }


def test_a_prompt_arrives_as_it_was_rendered() -> None:
    import torch

    from deployments.vllm_seam.media import has_media, packed_media, prompt_with_media

    rendered = prompt(item(0.25), item(0.5))
    media = packed_media(rendered, 1 << 20)
    assert not isinstance(media, PathReason)
    arrived = prompt_with_media(rendered["prompt_token_ids"], media, "salt")
    assert has_media(arrived)
    assert arrived["prompt_token_ids"] == rendered["prompt_token_ids"]
    assert arrived["mm_hashes"] == rendered["mm_hashes"]
    assert arrived["cache_salt"] == "salt"
    for there, here in zip(arrived["mm_placeholders"]["image"], rendered["mm_placeholders"]["image"], strict=True):
        assert (there.offset, there.length) == (here.offset, here.length)
        assert torch.equal(there.is_embed, here.is_embed)
    for there, here in zip(arrived["mm_kwargs"]["image"], rendered["mm_kwargs"]["image"], strict=True):
        assert there.keys() == here.keys()
        assert all(torch.equal(there[name].data, here[name].data) for name in here)
        assert all(there[name].field == here[name].field for name in here)  # of it decode's positions depend


def test_media_beyond_the_bound_stay_on_decode() -> None:
    from deployments.vllm_seam.media import packed_media

    rendered = prompt(item(0.25, patches=100), item(0.5, patches=100))
    assert packed_media(rendered, 200 * SIZE_BYTES) is PathReason.MEDIA_TOO_LARGE
    media = packed_media(rendered, 200 * SIZE_BYTES + 1000)
    assert not isinstance(media, PathReason)
    assert 200 * SIZE_BYTES < sum(map(len, media)) <= 200 * SIZE_BYTES + 1000


def test_media_that_vllm_left_out_or_cannot_write_stay_on_decode() -> None:
    from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFieldElem, MultiModalKwargsItem

    from deployments.vllm_seam.media import packed_media

    assert packed_media(prompt(item(0.25), None), 1 << 20) is PathReason.NOT_TRANSFERABLE
    odd: Any = MultiModalFieldElem(data=[object()], field=MultiModalBatchedField())  # type: ignore[list-item]
    assert packed_media(prompt(MultiModalKwargsItem({"odd": odd})), 1 << 20) is PathReason.NOT_TRANSFERABLE


def test_embeddings_of_a_client_are_no_media() -> None:
    from deployments.vllm_seam.media import has_media

    assert not has_media({"type": "token", "prompt_token_ids": [1]})
    assert not has_media({"type": "embeds"})
    assert not has_media(prompt(mm_kwargs={"image": [item(0.25)], "prompt_embeds": [item(0.5)]}))


def test_a_processor_without_a_cache_or_without_media_is_left_alone() -> None:
    from deployments.vllm_seam.media import keep_media

    keep_media(SimpleNamespace())  # an emulated engine
    for processor in (None, SimpleNamespace(cache=None)):
        keep_media(client := SimpleNamespace(renderer=SimpleNamespace(mm_processor=processor)))
        assert client.renderer.mm_processor is processor and getattr(processor, "cache", None) is None
