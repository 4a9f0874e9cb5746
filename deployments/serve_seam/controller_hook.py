"""The changes that Tandem makes in Serve's controller, which runs ``install`` before it starts anything.

A plan is the autoscaler's decision about an application. Its victims are the replicas that should stop. The policy, in
the same process, writes its plans' victims and nodes into ``VICTIMS``. ``stock`` marks Serve's own class, function or
choice.
"""

import asyncio
import logging
import os
import time
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

from autoscale.ray_victims import VICTIMS
from deployments.serve_seam.replica_moves import REPLICA_PREFIX, move_by_plan, withdraw_requests

logger = logging.getLogger("ray.serve")

# Longest wait for the routes, seconds. The controller sends them at once, also if nothing is deployed.
_ROUTES_TIMEOUT_S = 3.0
_POLL_S = 0.02  # seconds between two checks whether the routes have come
# glibc's settings for HAProxy, bytes. HAProxy copies each request into a buffer, to be able to retry it. By default
# glibc returned that memory to the kernel and got it again page by page, 0.65 ms a request (DECISIONS 144). Other
# processes do not have these settings: they would only use more memory.
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(4 << 20), "MALLOC_TRIM_THRESHOLD_": str(16 << 20)}
_NODE_LABEL = "ray.io/node-id"  # Ray's label of every node
# Value of RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH in the controller's environment.
IMPORT_PATH = "deployments.serve_seam.controller_hook.install"


def start_proxies_with_routes() -> None:
    """Let Serve's controller start HAProxy with its routes, and with settings for the memory allocator.

    Serve starts HAProxy at once and reloads it with the routes a second later; until then every path is unknown.

    Needs: ``ray.serve._private.haproxy.HAProxyManager`` (``__ray_metadata__.modified_class``, ``_haproxy``,
    ``_haproxy_start_task``, ``_update_pending``, ``_received_target_groups_broadcast``) and
    ``ray.serve._private.controller.HAProxyManager``.
    Without it: a restarted HAProxy answers 404 for a second; the controller's log says so.
    """
    try:
        import ray
        from ray.serve._private import controller, haproxy

        stock: Any = haproxy.HAProxyManager.__ray_metadata__.modified_class

        class RoutedHAProxyManager(stock):
            """Serve's manager of a node's HAProxy."""

            _haproxy_start_task: asyncio.Task[None]

            def __init__(self, *args: Any, **kwargs: Any) -> None:
                os.environ.update(_ALLOCATOR)  # for HAProxy, which starts from this process
                super().__init__(*args, **kwargs)
                self._haproxy_start_task.cancel()
                self._haproxy_start_task = self.event_loop.create_task(self._start_with_routes())

            async def _start_with_routes(self) -> None:
                until_s = time.monotonic() + _ROUTES_TIMEOUT_S
                try:
                    # An update that is no longer pending is in HAProxy's configuration. Serve's reload of HAProxy waits
                    # for this task.
                    while not self._received_target_groups_broadcast or self._update_pending:
                        if time.monotonic() > until_s:
                            logger.warning("no routes in %g s: HAProxy starts without them", _ROUTES_TIMEOUT_S)
                            break
                        await asyncio.sleep(_POLL_S)
                except Exception:
                    logger.exception("HAProxy starts without routes: Tandem cannot read them")
                await self._haproxy.start()

        current = controller.HAProxyManager
        if current is haproxy.HAProxyManager:
            controller.HAProxyManager = ray.remote(num_cpus=0)(RoutedHAProxyManager)
        elif current.__ray_metadata__.modified_class.__name__ != RoutedHAProxyManager.__name__:
            # If it is our class, an earlier call has set it.
            raise TypeError(f"Serve's controller starts proxies of another class: {current}")
    except Exception:
        # An error here would keep Serve's controller from starting.
        logger.exception("HAProxy starts without routes: clients get 404 for a second after its restart")


def choose_by_plan() -> None:
    """Let Serve's deployment scheduler follow the plan: which replica stops, and on which nodes a replica starts.

    A plan is stricter than a deployment's own labels. These may also allow cordoned nodes, and scarce ones: nodes that
    offer what few others offer.

    Needs: ``ray.serve._private.deployment_scheduler.DeploymentScheduler`` (``_get_replicas_to_stop``,
    ``_running_replicas``, ``_recovering_replicas``); ``ray.serve._private.default_impl``
    (``create_deployment_scheduler``, ``_default_create_placement_group``, ``get_head_node_id``).
    Without it: Serve chooses which replica stops, and a node within the labels; ``tandem top`` says so.
    """
    try:
        from ray.serve._private import default_impl
        from ray.serve._private.deployment_scheduler import DeploymentScheduler

        class VictimScheduler(DeploymentScheduler):
            """Serve's scheduler, which stops the plan's victims first."""

            def _get_replicas_to_stop(
                self, deployment_id: Any, max_num_to_stop: int, *args: Any, **kwargs: Any
            ) -> set[Any]:
                stock = super()._get_replicas_to_stop(deployment_id, max_num_to_stop, *args, **kwargs)
                try:
                    running = self._running_replicas[deployment_id]
                    chosen = _stopping(
                        stock,
                        running=running,
                        recovering=self._recovering_replicas[deployment_id],
                        victims=_plan_victims(deployment_id.app_name),
                    )
                    withdraw_requests(replica for replica in chosen if replica not in running)
                    return chosen
                except Exception:
                    logger.exception("Serve chooses which replicas stop: Tandem's choice failed")
                    return set(stock)

        def create(cache: Any, head: str | None = None, placement_group: Any = None) -> Any:
            stock = placement_group or default_impl._default_create_placement_group

            def place(request: Any) -> Any:
                try:
                    request = _narrowed(request)
                except Exception:
                    logger.exception("Serve chooses the node of a replica: Tandem's choice failed")
                return stock(request)

            return VictimScheduler(cache, head or default_impl.get_head_node_id(), create_placement_group_fn=place)

        default_impl.create_deployment_scheduler = create
        VICTIMS.is_hooked = True
    except Exception:
        # An error here would keep Serve's controller from starting.
        logger.exception("Tandem cannot choose which replicas stop: Serve will")


def _plan_victims(app: str) -> tuple[str, ...]:
    """Ids of the plan's victims. Before the first plan of this process, the last stored plan has them."""
    if app not in VICTIMS.chosen:
        from autoscale.decide.status import stored_state
        from router.ray_coordinator import load_state  # not above: ``tandem top`` imports this module without ray

        cycle = stored_state(load_state(app)).cycle
        records = () if cycle is None else cycle.services.values()
        VICTIMS.chosen[app] = tuple(name for record in records for name in record.plan.victims)
    return VICTIMS.chosen[app]


def _narrowed(request: Any) -> Any:
    """Serve's request for a replica's placement group, limited to the nodes that the plan allows.

    Ray's autoscaler adds a node for a request that no node satisfies. A node that does not exist has labels, but no id.
    """
    # A name is SERVE_REPLICA::APPLICATION#DEPLOYMENT#REPLICA.
    app, _, rest = request.name.removeprefix(REPLICA_PREFIX).partition("#")
    deployment = rest.rpartition("#")[0]
    allowed, cordoned = VICTIMS.allowed.get(app, {}).get(deployment), VICTIMS.cordoned.get(app)
    narrower = dict(VICTIMS.labels.get(app, {}).get(deployment, {}))
    if allowed:
        narrower[_NODE_LABEL] = f"in({','.join(allowed)})"
    elif cordoned:
        narrower[_NODE_LABEL] = f"!in({','.join(cordoned)})"
    if not narrower:
        return request
    selectors = request.bundle_label_selector or [{}] * len(request.bundles)
    return replace(request, bundle_label_selector=[{**selector, **narrower} for selector in selectors])


def _stopping(
    stock: Collection[Any], *, running: Iterable[Any], recovering: Iterable[Any], victims: tuple[str, ...]
) -> set[Any]:
    """Replicas to stop, as many as in ``stock``, which is Serve's choice.

    The plan's victims come first, in their order; then replicas of ``stock`` that do not run yet; then the rest of
    ``stock``. ``recovering``: replicas that a restarted controller found and still checks.
    """
    running = set(running)
    replicas = {replica.unique_id: replica for replica in [*running, *recovering]}
    chosen = [replicas[name] for name in victims if name in replicas]
    others = [replica for replica in stock if replica not in chosen]
    starting = [replica for replica in others if replica not in running]
    started = [replica for replica in others if replica in running]
    return set([*chosen, *starting, *started][: len(stock)])


def install() -> None:
    """Make every change that this version of Serve allows, and log the others.

    Needs: the variable ``RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH``, which Serve's controller reads at its start.
    Without it: Serve chooses which replica stops (``tandem top`` says so) and when replicas leave a node that goes, and
    a restarted HAProxy answers 404 for a second.
    """
    choose_by_plan()
    move_by_plan()
    start_proxies_with_routes()
