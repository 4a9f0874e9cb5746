"""One model as the endpoint serves it: its groups, which of them get requests, and how it is woken."""

import asyncio
import logging
import math
import random
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ray.exceptions import RayError
from ray.serve import Application
from ray.serve.handle import DeploymentHandle

from deployments.config import ServiceConfig
from deployments.endpoint.gate import Gate
from deployments.wire.call import PoolCaller
from deployments.wire.messages import Frame
from deployments.wire.openai_errors import OpenAIError
from router import known_pools
from router.groups import GroupLoad, choose_group
from router.ray_coordinator import MembershipFeed, find_coordinator

logger = logging.getLogger(__name__)

_HEALTH_TIMEOUT_S = 5.0  # seconds that a decode pool has for the answer to a health check
_WAKE_INTERVAL_S = 2.0  # seconds between two calls to the coordinator for one request
_POLL_S = 0.05  # seconds between two looks for a replica
NO_REPLICA_RETRY_S = 5.0  # seconds after which a client may repeat a request that came while no decode replica ran


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One model with its deployments by group; the graph holds applications, for which Serve puts in handles."""

    config: ServiceConfig
    decodes: Mapping[str, DeploymentHandle | Application]
    prefills: Mapping[str, DeploymentHandle | Application]  # of groups that do not compute prompts on decode


class DecodeGroup:
    """One group as the endpoint calls it: the decode pool, and what this endpoint replica has under way there."""

    def __init__(self, name: str, caller: PoolCaller[Frame], *, replicas: int) -> None:
        """``replicas``: decode replicas by the configuration."""
        self.name = name
        self.caller = caller
        self.pool = caller.pool
        self.load = GroupLoad()
        self._replicas = replicas

    def replicas(self) -> int:
        """Number of decode replicas that requests go to."""
        return known_pools.count(self.pool) or self._replicas

    async def check_health(self) -> None:
        """Raises an error if no replica of the decode pool is healthy."""
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
    ) -> None:
        """``membership``: where the plan says which pools serve; ``max_prompt_tokens``: the endpoint's own bound."""
        self.model_id = config.model.id
        self.groups = tuple(groups)
        self.gate = gate
        self.max_model_len = config.max_model_len  # tokens that every group has; ``None``: the model's own
        bounds = [bound for bound in (config.max_model_len, max_prompt_tokens) if bound is not None]
        self.most_prompt_tokens = min(bounds, default=None)  # of a prompt that is computed
        self.slow_tpot_s = config.router.outlier.slow_tpot_s
        self.can_sleep = config.autoscale is not None and not any(group.decode.replicas for group in config.groups)
        self._membership = membership

    def serving(self) -> list[DecodeGroup]:
        """The groups whose decode pool has replicas; where the plan names some of these as serving, only these."""
        groups = [group for group in self.groups if known_pools.has_replicas(group.pool)]
        plan = None if self._membership is None else self._membership.now()
        # Replicas that wait, or are under observation, would get requests: their own router knows no other group.
        return groups if plan is None else [group for group in groups if group.pool in plan.pools] or groups

    def can_answer(self) -> bool:
        """Whether a decode replica runs, or will when a request comes."""
        return self.can_sleep or bool(self.serving())

    def is_stranded(self, pool: str) -> bool:
        """Whether a decode pool of this model has no replica while another one has."""
        is_here = any(group.pool == pool for group in self.groups)
        return is_here and not known_pools.has_replicas(pool) and bool(self.serving())

    def choose(self, avoid: Collection[str], rng: random.Random) -> DecodeGroup:
        """The least loaded group that serves, if possible none of those to avoid (names)."""
        serving = self.serving() or self.groups
        groups = {group.name: group for group in serving if group.name not in avoid}
        groups = groups or {group.name: group for group in serving}
        loads = {name: group.load for name, group in groups.items()}
        return groups[choose_group(loads, {name: group.replicas() for name, group in groups.items()}, rng)]

    async def check_health(self) -> str | None:
        """Why the model cannot be served; ``None`` if it can, or sleeps."""
        serving = self.serving()
        if not serving and self.can_sleep:
            return None
        for group in serving or self.groups:
            try:
                await group.check_health()
            except Exception as error:
                return f"no healthy decode replica of {self.model_id}: {type(error).__name__}"
        return None


def no_replica() -> OpenAIError:
    """The error of a request to a model without a decode replica."""
    message = "no decode replica runs; the request may be sent again"
    return OpenAIError(503, message, code="overloaded", retry_after_s=NO_REPLICA_RETRY_S)


async def wait_until_awake(app_name: str, model: ServedModel, deadline_s: float) -> None:
    """Wait while a sleeping model has no decode replica. Raises OpenAIError: 503 at ``deadline_s`` (monotonic)."""
    last_call_s = -math.inf
    while model.can_sleep and not model.serving():
        now_s = time.monotonic()
        if now_s > deadline_s:
            raise no_replica()
        if now_s - last_call_s > _WAKE_INTERVAL_S:
            last_call_s = now_s
            await _wake(app_name, model.model_id)
        await asyncio.sleep(_POLL_S)


async def _wake(app_name: str, model_id: str) -> None:
    try:
        coordinator = await asyncio.to_thread(find_coordinator, app_name)
        if coordinator is not None:
            await coordinator.wake.remote(model_id)
    except RayError as error:
        logger.warning("could not ask the coordinator to wake %s: %s", model_id, error)
