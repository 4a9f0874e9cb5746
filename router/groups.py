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


def choose_group(loads: Mapping[str, GroupLoad], capacities: Mapping[str, float], rng: random.Random) -> str:
    """The group with the least load for its capacity.

    The load is the number of requests and of prompt tokens, each divided by its mean, so that both weigh the same.
    ``loads``: at least one group. ``capacities``: decode replicas by group, each counted as the replicas of the first
    group that it is worth; 0 counts as 1. Prompt tokens are divided by it too, since prefill is in proportion to
    decode. ``rng``: breaks ties.
    """
    capacities = {name: capacities[name] or 1.0 for name in loads}
    total = sum(capacities.values())
    mean_requests = sum(load.requests for load in loads.values()) / total or 1.0
    mean_tokens = sum(load.prompt_tokens for load in loads.values()) / total or 1.0

    def load_per_capacity(name: str) -> tuple[float, float]:
        load = loads[name]
        relative = load.requests / mean_requests + load.prompt_tokens / mean_tokens
        return relative / capacities[name], rng.random()

    return min(loads, key=load_per_capacity)
