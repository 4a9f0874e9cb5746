"""Which deployment group a request goes to: the one whose replicas have the least to do (pure).

KV moves only inside a group, so each has queues of its own, and what waits in one is no use to another. Requests in
flight say how full its decode batches are, and prompts without a first token how long the next one waits for prefill.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class GroupLoad:
    """What one endpoint has under way in a group.

    Attributes:
        requests: that have not been answered to the end.
        prompt_tokens: of those that have no first token yet.
    """

    requests: int = 0
    prompt_tokens: int = 0


def choose_group(loads: Mapping[str, GroupLoad], replicas: Mapping[str, int], rng: random.Random) -> str:
    """The group with the least of both per decode replica, each beside its mean over all; equals at random.

    Prefill replicas are in proportion to decode replicas, so these stand for both.

    Args:
        loads: by group, at least one.
        replicas: decode replicas of the same groups; one is assumed where there is none.
        rng: for equals.
    """
    here = {name: max(1, replicas[name]) for name in loads}
    total = sum(here.values())
    mean_requests = sum(load.requests for load in loads.values()) / total or 1.0
    mean_tokens = sum(load.prompt_tokens for load in loads.values()) / total or 1.0

    def busy(name: str) -> tuple[float, float]:
        load = loads[name]
        relative = load.requests / mean_requests + load.prompt_tokens / mean_tokens
        return relative / here[name], rng.random()

    return min(loads, key=busy)
