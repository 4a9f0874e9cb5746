"""Choice of a deployment group for a request: the one whose replicas have the least to do (pure).

KV moves only inside a group, so each group has its own queues. A group's requests in flight show how full its decode
batches are. Its prompts without a first token show how long the next prompt waits for prefill.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class GroupLoad:
    """Load that one replica of the endpoint has put on a group."""

    requests: int = 0  # number of requests that have not ended
    prompt_tokens: int = 0  # tokens of the prompts without a first token


def choose_group(loads: Mapping[str, GroupLoad], replicas: Mapping[str, int], rng: random.Random) -> str:
    """The group with the least load per decode replica.

    The load is the number of requests and of prompt tokens, each divided by its mean, so that both weigh the same.
    ``loads``: at least one group. ``replicas``: number of decode replicas by group; 0 counts as 1. Prompt tokens are
    divided by it too, since prefill replicas are in proportion to decode replicas. ``rng``: breaks ties.
    """
    replicas = {name: max(1, replicas[name]) for name in loads}
    total = sum(replicas.values())
    mean_requests = sum(load.requests for load in loads.values()) / total or 1.0
    mean_tokens = sum(load.prompt_tokens for load in loads.values()) / total or 1.0

    def load_per_replica(name: str) -> tuple[float, float]:
        load = loads[name]
        relative = load.requests / mean_requests + load.prompt_tokens / mean_tokens
        return relative / replicas[name], rng.random()

    return min(loads, key=load_per_replica)
