"""The header that explains where a request went."""

import json

from deployments.endpoint.explanation import explanation
from deployments.wire.messages import PromptRoute
from router.pool_router import ReplicaView
from router.routing import ChoiceReason, Chosen


def view(name: str, queued_tokens: int, overlap_tokens: int) -> ReplicaView:
    return ReplicaView(replica_id=name, queued_tokens=queued_tokens, overlap_tokens=overlap_tokens)


def test_header_has_path_replicas_and_runners_up_with_their_scores() -> None:
    decode = Chosen(
        replica=view("d1", 500, 256),
        reason=ChoiceReason.PREFIX,
        runners_up=(view("d2", 0, 0), view("d3", 1000, 128)),
    )
    prefill = Chosen(replica=view("p1", 70, 0), reason=ChoiceReason.LOAD)
    route = PromptRoute(
        path="remote", reason="long", input_tokens=900, cached_tokens=256, block_tokens=32, prefill=prefill
    )
    assert json.loads(explanation(decode, route)) == {
        "decode": {
            "replica": "d1",
            "queued_tokens": 500,
            "overlap_tokens": 256,
            "by": "prefix",
            "runners_up": [
                {"replica": "d2", "queued_tokens": 0, "overlap_tokens": 0},
                {"replica": "d3", "queued_tokens": 1000, "overlap_tokens": 128},
            ],
        },
        "path": "remote",
        "reason": "long",
        "input_tokens": 900,
        "cached_tokens": 256,
        "prefill": {"replica": "p1", "queued_tokens": 70, "overlap_tokens": 0, "by": "load", "runners_up": []},
    }


def test_what_is_not_known_is_null_or_left_out() -> None:
    assert json.loads(explanation(None, None)) == {"decode": None}
