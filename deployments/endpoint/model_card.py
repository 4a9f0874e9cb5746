"""A model as ``/v1/models`` lists it, with the fields of vLLM's cards (pure)."""

from typing import Any

_OWNER = "tandem"


def model_card(
    name: str, *, root: str, max_model_len: int | None, created_s: int, parent: str | None = None
) -> dict[str, Any]:
    """The card of one model.

    Args:
        name: its name in clients' requests.
        root: where its files are: a folder or the id of a model in a hub. `vllm bench serve` takes its tokenizer there.
        max_model_len: longest prompt and answer together, tokens; ``None``: not known.
        created_s: time since the epoch at which this replica of the endpoint started.
        parent: the model that an adapter changes; ``None``: it is no adapter.
    """
    return {
        "id": name,
        "object": "model",
        "created": created_s,
        "owned_by": _OWNER,
        "root": root,
        "parent": parent,
        "max_model_len": max_model_len,
        "permission": [_permission(name, created_s)],
    }


def _permission(name: str, created_s: int) -> dict[str, Any]:
    """What old clients of OpenAI expect in a card. It grants nothing: keys and limits are in the configuration."""
    return {
        "id": f"modelperm-{name}",
        "object": "model_permission",
        "created": created_s,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
