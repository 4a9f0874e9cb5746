"""The header that tells a client where its request went, and which replicas came next (pure)."""

import json
from typing import Any

from deployments.wire.messages import PromptRoute
from router.pool_router import ReplicaView
from router.routing import Chosen

HEADER = "x-tandem-routing"


def explanation(decode: Chosen | None, route: PromptRoute | None) -> str:
    """The header's value: JSON with ``decode``, ``path``, ``reason``, ``input_tokens``, ``cached_tokens``, ``prefill``.

    Each replica has its name, the tokens in its queue and the tokens of the prompt that the router took it to hold.
    ``None``: not known.
    """
    value: dict[str, Any] = {"decode": _chosen(decode)}
    if route is not None:
        value |= {
            "path": route.path,
            "reason": route.reason,
            "input_tokens": route.input_tokens,
            "cached_tokens": route.cached_tokens,
            "prefill": _chosen(route.prefill),
        }
    return json.dumps(value, separators=(",", ":"))


def _chosen(chosen: Chosen | None) -> dict[str, Any] | None:
    if chosen is None:
        return None
    runners_up = [_view(view) for view in chosen.runners_up]
    return {**_view(chosen.replica), "by": chosen.reason, "runners_up": runners_up}


def _view(view: ReplicaView) -> dict[str, Any]:
    return {"replica": view.replica_id, "queued_tokens": view.queued_tokens, "overlap_tokens": view.overlap_tokens}
