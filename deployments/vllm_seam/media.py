"""Images and other media of a prompt on their way to prefill: what vLLM's processor has made of them, as bytes.

The processor runs once, on decode. Its tensors go to prefill with their hashes and their places in the prompt. So both
engines have the same tokens, positions and keys of blocks (DECISIONS 296).
"""

from collections import defaultdict
from typing import Any

from vllm.inputs import mm_input
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItems
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from router.length import PathReason

# A message of msgpack, and the tensors to which it refers. torch warns of memory that cannot be written, such as
# ``bytes``.
PackedMedia = tuple[bytearray, ...]


def keep_media(client: Any) -> None:
    """Let the processor of a client give the tensors of a repeated image too.

    vLLM's usual cache in front of an engine only remembers which images the engine has, and gives nothing for these.
    Such an image could not go to prefill. Nor would the engine have it while the first prompt with it is on prefill.

    Needs: ``renderer.mm_processor`` of the client with the attribute ``cache``, which is ``None`` without a cache;
    ``MULTIMODAL_REGISTRY.processor_only_cache_from_config``; an engine that takes tensors of an image that it has.
    Without it: no decode replica starts; the error names the missing part.
    """
    if (renderer := getattr(client, "renderer", None)) is None:  # an emulated engine has none
        return
    processor = renderer.mm_processor
    if processor is not None and processor.cache is not None:
        processor.cache = MULTIMODAL_REGISTRY.processor_only_cache_from_config(client.vllm_config)


def has_media(prompt: dict[str, Any]) -> bool:
    """Whether a rendered prompt is one sequence of tokens with images or other media in it.

    Embeddings that a client sends in a chat are no media, although vLLM treats them as such.

    Needs: ``type`` of rendered prompts, and ``mm_kwargs`` by modality, of which ``prompt_embeds`` is one.
    Without it: decode computes prompts with media itself.
    """
    return prompt.get("type") == "multimodal" and "prompt_embeds" not in prompt["mm_kwargs"]


def media_hashes(prompt: Any) -> tuple[str, ...]:
    """The hashes of the media in a rendered prompt, in their order; empty: it has none.

    Needs: ``mm_hashes`` of rendered prompts, by modality, the same in each process with the same model.
    Without it: a stream goes on from another replica although the image at a URL has changed.
    """
    hashes = prompt.get("mm_hashes") if isinstance(prompt, dict) else None
    return tuple(name for names in (hashes or {}).values() for name in names)


def packed_media(prompt: dict[str, Any], max_bytes: int) -> PackedMedia | PathReason:
    """The media of a rendered prompt, or the reason why they cannot go to prefill.

    Needs: a ``MsgpackEncoder`` that writes lists of ``MultiModalFeatureSpec``, as vLLM's client does for its engine,
    and raises TypeError for what it cannot write; ``mm_kwargs``, ``mm_hashes`` and ``mm_placeholders`` of the prompt.
    Without it: prompts with media fail; the error names the missing part.
    """
    features = [
        MultiModalFeatureSpec(data=item, modality=modality, identifier=name, mm_position=place)
        for modality, items in prompt["mm_kwargs"].items()
        for item, name, place in zip(
            items, prompt["mm_hashes"][modality], prompt["mm_placeholders"][modality], strict=True
        )
    ]
    if any(feature.data is None for feature in features):
        return PathReason.NOT_TRANSFERABLE
    try:
        parts = [memoryview(part) for part in MsgpackEncoder().encode(features)]
    except TypeError:  # the model's processor made an object that is no tensor
        return PathReason.NOT_TRANSFERABLE
    if sum(part.nbytes for part in parts) > max_bytes:
        return PathReason.MEDIA_TOO_LARGE
    return tuple(bytearray(part) for part in parts)


def prompt_with_media(token_ids: list[int], media: PackedMedia, cache_salt: str | None) -> Any:
    """The rendered prompt, for another client's ``generate``.

    Needs: a ``MsgpackDecoder`` that reads what ``MsgpackEncoder`` wrote; ``vllm.inputs.mm_input``.
    Without it: prefill fails for prompts with media, and decode computes them.
    """
    items: dict[str, list[Any]] = defaultdict(list)
    hashes: dict[str, list[str]] = defaultdict(list)
    places: dict[str, list[Any]] = defaultdict(list)
    for feature in MsgpackDecoder(list[MultiModalFeatureSpec]).decode(media):
        items[feature.modality].append(feature.data)
        hashes[feature.modality].append(feature.identifier)
        places[feature.modality].append(feature.mm_position)
    return mm_input(
        prompt_token_ids=token_ids,
        mm_kwargs=MultiModalKwargsItems(items),
        mm_hashes=hashes,
        mm_placeholders=places,
        cache_salt=cache_salt,
    )
