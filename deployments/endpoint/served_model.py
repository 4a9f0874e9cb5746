"""One model at the endpoint: its groups, the choice of a group for a request, and the end of the model's sleep.

A model may have groups for very long prompts alone. They are a ``ServedModel`` of their own, ``long``, with a queue of
its own, so that these prompts delay no others.

A model sleeps while autoscaling has left it no replica. A request wakes it.
"""

import asyncio
import logging
import math
import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayError
from ray.serve import Application
from ray.serve.handle import DeploymentHandle

from autoscale.engines.variants import Worth
from autoscale.types import PoolKey
from deployments.config import ServiceConfig
from deployments.endpoint.gate import Gate
from deployments.endpoint.prompt_pieces import CHARS_PER_TOKEN
from deployments.serve_seam.calls import answers_in_time
from deployments.wire.call import PoolCaller
from deployments.wire.messages import Frame
from deployments.wire.openai_errors import OpenAIError
from router import known_pools
from router.groups import GroupLoad, choose_group
from router.prompt_keys import PromptKeys
from router.ray_coordinator import MembershipFeed, find_coordinator

logger = logging.getLogger(__name__)

_HEALTH_TIMEOUT_S = 5.0  # seconds that a decode pool has for the answer to a health check
_LOOKUP_S = 5.0  # seconds that decode replicas have to say whether they hold a response
_WAKE_INTERVAL_S = 2.0  # seconds between two calls to the coordinator for one request
# Weight of the latest prompt in the mean characters of a token: the mean follows a change within some tens of prompts.
_CHARS_WEIGHT = 0.05
# Bounds of this mean: a byte of a rare character may be a token, and a row of spaces may be one.
_LEAST_CHARS, _MOST_CHARS = 0.1, 32.0
_POLL_S = 0.05  # seconds between two checks whether a sleeping model has a replica
NO_REPLICA_RETRY_S = 5.0  # Retry-After, seconds, of a request that came while no decode replica ran


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One model with its deployments by group. The graph has applications here; Serve makes handles of them."""

    config: ServiceConfig
    worth: Mapping[PoolKey, Worth]  # of each pool: replicas of the first group that one of its own is worth
    decodes: Mapping[str, DeploymentHandle | Application]
    prefills: Mapping[str, DeploymentHandle | Application]  # only of groups with a prefill pool
    long: "Service | None" = None  # the deployments for very long prompts

    def handles(self) -> list[Any]:
        """Handles of all pools."""
        return [*self.decodes.values(), *self.prefills.values(), *([] if self.long is None else self.long.handles())]


class DecodeGroup:
    """One group's decode pool, and the load that this replica of the endpoint has put on it."""

    def __init__(
        self, name: str, caller: PoolCaller[Frame], *, replicas: int, capacity: float, prefill_pool: str | None = None
    ) -> None:
        """A group without load yet.

        ``replicas``: number of decode replicas in the configuration. ``capacity``: decode replicas of the first group
        that one of them is worth. ``prefill_pool``: the group's prefill deployment, if it has one.
        """
        self.name = name
        self.caller = caller
        self.pool = caller.pool
        self.prefill_pool = prefill_pool
        self.load = GroupLoad()
        self._replicas, self._capacity = replicas, capacity

    def capacity(self) -> float:
        """Capacity of the decode replicas that requests go to; before the first request, of the configured ones."""
        return (known_pools.count(self.pool) or self._replicas) * self._capacity

    async def check_health(self) -> None:
        """Raises an error if the replica that Serve chooses is not healthy, or does not answer in time."""
        handle: DeploymentHandle = self.caller.handle.options(method_name="check_health", stream=False)
        await asyncio.wait_for(handle.remote(), _HEALTH_TIMEOUT_S)


class ServedModel:
    """One model, its groups and the gate where its requests wait for their turn."""

    def __init__(
        self,
        config: ServiceConfig,
        groups: Sequence[DecodeGroup],
        gate: Gate,
        membership: MembershipFeed | None,
        *,
        max_prompt_tokens: int | None,
        usual: "ServedModel | None" = None,
    ) -> None:
        """A model without requests.

        Args:
            config: the service, or its part for very long prompts.
            groups: its groups.
            gate: where its requests wait for their turn.
            membership: the pools that serve by the autoscaler's plan; ``None``: no policy sizes them.
            max_prompt_tokens: the endpoint's own bound of a prompt.
            usual: for very long prompts: the model whose groups compute them while ``groups`` have no replica.
        """
        self.model_id, self.source = config.model.id, config.model.source
        self.groups = tuple(groups)
        self.gate = gate
        self.max_model_len = config.max_model_len  # context that every group has, tokens; ``None``: the model's own
        bounds = [bound for bound in (config.longest_context_tokens, max_prompt_tokens) if bound is not None]
        self.most_prompt_tokens = min(bounds, default=None)  # longer prompts are not computed
        # Tokens in a piece of a prompt; ``None``: decode replicas are chosen by load alone.
        self.piece_tokens = config.router.prefix.piece_tokens if config.router.follows_prefixes else None
        self.chars_per_token: float = CHARS_PER_TOKEN  # mean characters of the model's tokens, from its prompts so far
        self.slow_tpot_s = config.router.outlier.slow_tpot_s
        self.can_sleep = config.autoscale is not None and not any(group.decode.replicas for group in config.groups)
        self._membership = membership
        self._usual = usual
        self.long: ServedModel | None = None  # the part for very long prompts, if there is one
        self.least_long_tokens = math.inf if config.long_prompts is None else config.long_prompts.least_tokens

    def serving_prompt(self, tokens: int) -> "ServedModel":
        """The model, or its part for very long prompts if that has replicas.

        ``tokens``: estimate of the request's longest prompt.
        """
        if self.long is None or tokens < self.least_long_tokens:
            return self
        return self.long if any(known_pools.has_replicas(group.pool) for group in self.long.groups) else self

    def note_tokens(self, pieces: PromptKeys, input_tokens: int) -> None:
        """Learn the model's tokens from a prompt: what its text was estimated at, and its real number of tokens.

        A prompt of token ids teaches nothing, since both numbers are equal. A prompt without a whole piece teaches
        nothing either: many of its tokens are of the template, which its text lacks.
        """
        if self.piece_tokens is None or not pieces.keys or pieces.tokens == input_tokens:
            return
        # The mean when the prompt was cut. Other prompts may have changed it since, so the present one would not do.
        estimated = CHARS_PER_TOKEN * self.piece_tokens / pieces.piece_tokens
        measured = estimated * pieces.tokens / max(1, input_tokens)
        mean = self.chars_per_token + _CHARS_WEIGHT * (measured - self.chars_per_token)
        self.chars_per_token = min(max(mean, _LEAST_CHARS), _MOST_CHARS)

    def serving(self) -> list[DecodeGroup]:
        """The groups whose decode pool has replicas that the plan admits. Without such a group: all that have replicas.

        If no group for very long prompts has replicas, they are the model's usual groups.

        A replica that the plan does not admit waits for more replicas of the other role, or is about to leave. The
        router of a group knows no other group. If a group had only such replicas, its router would send requests there.
        """
        groups = [group for group in self.groups if known_pools.has_replicas(group.pool)]
        if not groups and self._usual is not None:
            return self._usual.serving()
        membership = None if self._membership is None else self._membership.now()
        if membership is None:  # no plan holds
            return groups
        return [group for group in groups if group.pool in membership.pools] or groups

    def can_answer(self) -> bool:
        """Whether a decode replica runs, or a request would wake the model."""
        return self.can_sleep or bool(self.serving())

    def can_answer_any(self) -> bool:
        """Whether it can answer some prompt, perhaps only a very long one."""
        return self.can_answer() or (self.long is not None and self.long.can_answer())

    def is_stranded(self, pool: str) -> bool:
        """Whether a decode pool of this model has no replica while another pool of the model has one."""
        is_own = any(group.pool == pool for group in self.groups)
        return is_own and not known_pools.has_replicas(pool) and bool(self.serving())

    def choose(self, avoid: Collection[str], rng: random.Random) -> DecodeGroup:
        """The least loaded group that serves; ``avoid``: names of groups that are chosen only if there is no other."""
        serving = {group.name: group for group in self.serving() or self.groups}
        groups = {name: group for name, group in serving.items() if name not in avoid} or serving
        loads = {name: group.load for name, group in groups.items()}
        return groups[choose_group(loads, {name: group.capacity() for name, group in groups.items()}, rng)]

    async def holders_of(self, response_id: str) -> list["Holder"]:
        """The decode replicas of its own groups that hold a stored response: one or none."""
        groups = [group for group in self.groups if known_pools.has_replicas(group.pool)]
        asked = (answers_in_time(group.caller.handle, "holder_of", _LOOKUP_S, response_id) for group in groups)
        answers = zip(groups, await asyncio.gather(*asked), strict=True)
        return [Holder(self, group, name) for group, names in answers for name in names if name is not None]

    async def check_health(self) -> str | None:
        """Why no decode pool can serve the model; ``None``: one can, or the model sleeps."""
        serving = self.serving()
        if not serving and self.can_sleep:
            return None
        checks = [group.check_health() for group in serving or self.groups]
        errors = await asyncio.gather(*checks, return_exceptions=True)
        if None in errors:
            return None
        return f"no healthy decode replica of {self.model_id}: {type(errors[0]).__name__}"


@dataclass(frozen=True, slots=True)
class Holder:
    """The decode replica that holds a stored response of the Responses API."""

    model: ServedModel
    group: DecodeGroup
    replica_id: str


async def find_holder(models: Iterable[ServedModel], response_id: str) -> Holder | None:
    """The holder of a stored response; ``models``: where it may be, also in their parts for very long prompts."""
    parts = [part for model in models for part in (model, model.long) if part is not None]
    found = await asyncio.gather(*(part.holders_of(response_id) for part in parts))
    return next((holder for holders in found for holder in holders), None)


def count_prefill(
    config: ServiceConfig, worth: Mapping[PoolKey, Worth], membership: MembershipFeed | None
) -> Callable[[], float]:
    """A function for the replicas that compute a model's prompts now, in replicas of the first group, at least 1.

    They are those that the plan admits, or the configured ones. ``worth``: of a replica of each pool.
    ``membership``: the admitted replicas by pool; ``None``: no model is autoscaled.
    """
    # Once: the count is asked for each request. A replica of a group without prefill counts for the prompts alone.
    weights = {key: worth[key].prompts or worth[key].own for key in (group.prompt_pool_key for group in config.groups)}
    by_pool = {str(key): weight for key, weight in weights.items()}
    # A model that may sleep is deployed with 0 replicas.
    pools = zip(config.groups, weights.values(), strict=True)
    configured = max(1.0, math.fsum(group.prompt_pool.replicas * weight for group, weight in pools))
    if membership is None or config.autoscale is None:
        return lambda: configured

    def admitted() -> float:
        now = membership.now()
        if now is None:
            return configured
        return max(1.0, math.fsum(now.pools.get(pool, 0) * weight for pool, weight in by_pool.items()))

    return admitted


def no_replica() -> OpenAIError:
    """The error of a request to a model without a decode replica."""
    message = "no decode replica runs; the request may be sent again"
    return OpenAIError(503, message, code="overloaded", retry_after_s=NO_REPLICA_RETRY_S)


async def wait_until_awake(app_name: str, model: ServedModel, deadline_s: float) -> None:
    """Wake a sleeping model, and wait for a decode replica. Raises OpenAIError: 503 at ``deadline_s`` (monotonic)."""
    last_call_s = -math.inf
    while model.can_sleep and not model.serving():
        now_s = time.monotonic()
        if now_s > deadline_s:
            raise no_replica()
        if now_s - last_call_s > _WAKE_INTERVAL_S:
            last_call_s = now_s
            try:
                coordinator = await asyncio.to_thread(find_coordinator, app_name)
                if coordinator is not None:
                    await coordinator.wake.remote(model.model_id)
            except RayError as error:
                logger.warning("could not ask the coordinator to wake %s: %s", model.model_id, error)
        await asyncio.sleep(_POLL_S)
