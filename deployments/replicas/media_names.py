"""Names that a client gives images and other media: they are not used (pure).

To an engine the name of an image is its identity, for all clients. With the name of another client's image a request
would read that image, and a false name would give other clients the KV of a wrong image.
"""

import hashlib
from typing import Any

from deployments.replicas.body_bounds import CONVERSATIONS
from deployments.wire.openai_errors import OpenAIError

# Fields with messages or parts of messages, in any of vLLM's APIs.
_PLACES = (*CONVERSATIONS, "content_parts")


def with_own_media_names(fields: dict[str, Any]) -> dict[str, Any]:
    """A body whose images are named by their content alone.

    Raises OpenAIError: 400, ``features`` of token ids in and out name an image that they do not have.
    """
    renamed = {name: _without_names(value) if name in _PLACES else value for name, value in fields.items()}
    if isinstance(features := fields.get("features"), dict):
        renamed["features"] = _named_by_content(features)
    return renamed


def _without_names(value: Any) -> Any:
    """Messages or parts without ``uuid``; what the parts hold is left as it is."""
    if isinstance(value, list):
        return [_without_names(each) for each in value]
    if isinstance(value, dict):
        kept = {name: each for name, each in value.items() if name != "uuid"}
        return kept | {"content": _without_names(kept["content"])} if "content" in kept else kept
    return value


def _named_by_content(features: dict[str, Any]) -> dict[str, Any]:
    """The features of ``/inference/v1/generate`` with hashes of their data; vLLM refuses features of a wrong shape."""
    named, data = features.get("mm_hashes"), features.get("kwargs_data") or {}
    if not isinstance(named, dict) or not isinstance(data, dict):
        return features
    return {
        **features,
        "mm_hashes": {modality: _hashes(data.get(modality), names) for modality, names in named.items()},
    }


def _hashes(data: Any, names: Any) -> Any:
    if not isinstance(names, list):
        return names
    if not isinstance(data, list) or len(data) != len(names) or not all(isinstance(item, str) for item in data):
        raise OpenAIError(400, "features: give kwargs_data for every item of mm_hashes", param="features")
    return [hashlib.sha256(item.encode()).hexdigest() for item in data]
