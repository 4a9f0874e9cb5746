"""Replicas that must start on another node: Serve's controller lets them, by the changes that are made here.

Two cases: the node of a replica will be taken away, or the node that a replica waits for does not come.
"""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from autoscale.ray_victims import VICTIMS
from autoscale.types import PoolKey

logger = logging.getLogger("ray.serve")

REPLICA_PREFIX = "SERVE_REPLICA::"  # begins the name of a replica's placement group in Serve
# A replica of a pool stops this long before its node goes, seconds, unless a replacement runs earlier. Most answers end
# in this time; the others go on on another replica.
_STOPS_BEFORE_S = 30.0


def move_by_plan() -> None:
    """Let replicas serve until shortly before their node goes, and let those that wait in vain ask for another node.

    Serve stops a replica as soon as its node goes in less than ``graceful_shutdown_timeout_s`` (600 s by default). So
    at a usual notice of two minutes it would stop at once, although its replacement only starts. Replicas of the
    endpoint do stop at once: streams that go through them cannot go on elsewhere.

    Needs: ``ray.serve._private.deployment_state.DeploymentState`` (``_group_shutdown_timeout_ms``,
    ``migrate_replicas_on_draining_nodes``, ``_replicas``, ``_id``, ``stop_replicas``) and ``ReplicaState``.
    Without it: at a notice the replicas of the node stop at once; a replica that the lowest count of its pool requires
    goes on waiting for a node type that does not come; the controller's log says so.
    """
    try:
        from ray.serve._private.deployment_state import DeploymentState, ReplicaState

        stock_timeout_ms = DeploymentState._group_shutdown_timeout_ms
        stock_migrate = DeploymentState.migrate_replicas_on_draining_nodes
        DeploymentState.stop_replicas  # noqa: B018 - missing: this version of Serve is another one

        def timeout_ms(group: list[Any]) -> float:
            stock = stock_timeout_ms(group)
            try:
                is_of_pool = _is_of_pool(group[0].replica_id.deployment_id.name)
            except Exception:
                logger.exception("a replica leaves its node when Serve says: Tandem cannot read what it is")
                return stock
            return min(stock, _STOPS_BEFORE_S * 1e3) if is_of_pool else stock

        causes: set[str] = set()  # in Serve's control loop, each cause is logged once

        def migrate(self: Any, draining_nodes: Mapping[str, float], *args: Any, **kwargs: Any) -> None:
            try:
                _start_again(self, ReplicaState.STARTING)
            except Exception as error:
                if type(error).__name__ not in causes:
                    causes.add(type(error).__name__)
                    logger.exception("replicas of %s go on waiting for their nodes: Tandem cannot stop them", self._id)
            stock_migrate(self, draining_nodes, *args, **kwargs)

        DeploymentState._group_shutdown_timeout_ms = staticmethod(timeout_ms)
        DeploymentState.migrate_replicas_on_draining_nodes = migrate
    except Exception:
        # An error here would keep Serve's controller from starting.
        logger.exception("Serve moves replicas from nodes that go: Tandem cannot change when")


def _is_of_pool(deployment: str) -> bool:
    """Whether a deployment is a pool of engines, and not the endpoint."""
    try:
        PoolKey.parse(deployment)
    except ValueError:
        return False
    return True


def _start_again(state: Any, starting: Any) -> None:
    """Stop the replicas of a deployment that wait for a node if the plan says so; Serve then starts others.

    ``state``: Serve's state of the deployment. ``starting``: Serve's state of a replica that starts.
    """
    names = VICTIMS.again.get(state._id.app_name, set())
    if state._id.name not in names:
        return
    for replica in list(state._replicas.get([starting])):
        state.stop_replicas(withdraw_requests([replica.replica_id]))  # one by one: an error then leaves none half done
    names.discard(state._id.name)


def withdraw_requests(replicas: Iterable[Any]) -> list[Any]:
    """End the replicas that wait for a node, with their requests for one; returns these replicas.

    Serve lets a replica end in order, and waits for it for as long as ``graceful_shutdown_timeout_s``, also if it waits
    for a node. For all that time Ray's autoscaler would try to add a node for it, and its application could not be
    deleted.

    Needs: ``SERVE_REPLICA::app#deployment#replica`` as the name of a replica's placement group and of its actor, and
    ``ray.serve._private.constants.SERVE_NAMESPACE``.
    Without it: they end after that time.
    """
    import ray
    from ray.serve._private.constants import SERVE_NAMESPACE
    from ray.util import get_placement_group, placement_group_table, remove_placement_group

    waited = []
    for replica in replicas:
        of = replica.deployment_id
        name = f"{REPLICA_PREFIX}{of.app_name}#{of.name}#{replica.unique_id}"
        try:
            group = get_placement_group(name)
            if placement_group_table(group).get("state") == "PENDING":
                remove_placement_group(group)
                waited.append(replica)
                ray.kill(ray.get_actor(name, SERVE_NAMESPACE))
        except (ValueError, ray.exceptions.RayError) as error:  # it has none, or none any more
            logger.debug("no request for a node of %s to withdraw: %s", replica, error)
    return waited
