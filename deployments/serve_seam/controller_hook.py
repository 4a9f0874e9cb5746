"""What Serve's controller runs before it starts anything: all that Tandem changes in Serve itself."""

import asyncio
import logging
import os
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from autoscale.ray_victims import VICTIMS

logger = logging.getLogger("ray.serve")

# Longest wait for the routes. The controller sends them at once, also when nothing is deployed.
_ROUTES_TIMEOUT_S = 3.0
_POLL_S = 0.02  # pause between two looks at whether the routes have come
# For a retry HAProxy copies each request into a buffer. glibc gave that memory back to the kernel and fetched it again
# page by page, 0.65 ms a request (DECISIONS 144). Other processes would only hold more memory than they need.
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(4 << 20), "MALLOC_TRIM_THRESHOLD_": str(16 << 20)}
_REPLICA_PREFIX = "SERVE_REPLICA::"  # how the name of a replica's placement group begins in Serve
_NODE_LABEL = "ray.io/node-id"  # the label that Ray gives every node
# The value of RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH in the controller's environment.
IMPORT_PATH = "deployments.serve_seam.controller_hook.install"


def start_proxies_with_routes() -> None:
    """Let Serve's controller start HAProxy with its routes, and with settings of the memory allocator.

    Serve starts HAProxy at once and gives it the routes by a reload a second later; until then every path is unknown.

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
                os.environ.update(_ALLOCATOR)  # for processes that start from now on
                super().__init__(*args, **kwargs)
                self._haproxy_start_task.cancel()
                self._haproxy_start_task = self.event_loop.create_task(self._start_with_routes())

            async def _start_with_routes(self) -> None:
                until_s = time.monotonic() + _ROUTES_TIMEOUT_S
                try:
                    # An update that is no longer pending is in HAProxy's configuration, which waits for this task.
                    while not self._received_target_groups_broadcast or self._update_pending:
                        if time.monotonic() > until_s:
                            logger.warning("no routes in %g s: HAProxy starts without them", _ROUTES_TIMEOUT_S)
                            break
                        await asyncio.sleep(_POLL_S)
                except Exception:
                    logger.exception("HAProxy starts without routes: Tandem cannot see them")
                await self._haproxy.start()

        current = controller.HAProxyManager
        if current is haproxy.HAProxyManager:
            controller.HAProxyManager = ray.remote(num_cpus=0)(RoutedHAProxyManager)
        elif current.__ray_metadata__.modified_class.__name__ != RoutedHAProxyManager.__name__:
            raise TypeError(f"Serve's controller starts proxies of another class: {current}")
    except Exception:
        # An error here would keep Serve's controller from starting.
        logger.exception("HAProxy starts without routes: clients get 404 for a second after its restart")


def choose_by_plan() -> None:
    """Let Serve build its deployment scheduler with the plan's choices of which replica stops and where one starts.

    A plan is stricter than a deployment's own labels, which may also allow scarce switches or cordoned nodes.

    Needs: ``ray.serve._private.deployment_scheduler.DeploymentScheduler`` (``_get_replicas_to_stop``,
    ``_running_replicas``, ``_recovering_replicas``); ``ray.serve._private.default_impl``
    (``create_deployment_scheduler``, ``_default_create_placement_group``, ``get_head_node_id``).
    Without it: Serve chooses which replica stops and where one starts within its labels; ``tandem top`` says so.
    """
    try:
        from ray.serve._private import default_impl
        from ray.serve._private.deployment_scheduler import DeploymentScheduler

        class VictimScheduler(DeploymentScheduler):
            """Serve's scheduler; the plan's victims stop first."""

            def _get_replicas_to_stop(
                self, deployment_id: Any, max_num_to_stop: int, *args: Any, **kwargs: Any
            ) -> set[Any]:
                stock = super()._get_replicas_to_stop(deployment_id, max_num_to_stop, *args, **kwargs)
                try:
                    return _choose(
                        stock,
                        running=self._running_replicas[deployment_id],
                        recovering=self._recovering_replicas[deployment_id],
                        chosen=_chosen(deployment_id.app_name),
                    )
                except Exception:
                    logger.exception("Serve's own choice of what stops: Tandem's cannot be made")
                    return set(stock)

        def create(cache: Any, head: str | None = None, placement_group: Any = None) -> Any:
            stock = placement_group or default_impl._default_create_placement_group

            def place(request: Any) -> Any:
                try:
                    request = _narrowed(request)
                except Exception:
                    logger.exception("Serve's own choice of nodes: Tandem's cannot be made")
                return stock(request)

            return VictimScheduler(cache, head or default_impl.get_head_node_id(), create_placement_group_fn=place)

        default_impl.create_deployment_scheduler = create
        VICTIMS.is_hooked = True
    except Exception:
        # An error here would keep Serve's controller from starting.
        logger.exception("Tandem cannot choose which replicas stop: Serve will")


def _chosen(app: str) -> tuple[str, ...]:
    """The plan's victims; before this process's first plan, those of the last plan of the process before it."""
    if app not in VICTIMS.chosen:
        from autoscale.decide.status import stored_state
        from router.ray_coordinator import load_state  # tandem top reads this module's name without ray

        cycle = stored_state(load_state(app)).cycle
        records = () if cycle is None else cycle.services.values()
        VICTIMS.chosen[app] = tuple(name for record in records for name in record.plan.victims)
    return VICTIMS.chosen[app]


def _narrowed(request: Any) -> Any:
    """Serve's request for a replica's placement group, limited to the nodes that the plan allows."""
    app, _, rest = request.name.removeprefix(_REPLICA_PREFIX).partition("#")
    deployment = rest.rpartition("#")[0]
    allowed, cordoned = VICTIMS.allowed.get(app, {}).get(deployment), VICTIMS.cordoned.get(app)
    if allowed:
        nodes = f"in({','.join(allowed)})"
    elif cordoned:
        nodes = f"!in({','.join(cordoned)})"
    else:
        return request
    selectors = request.bundle_label_selector or [{}] * len(request.bundles)
    return replace(request, bundle_label_selector=[{**one, _NODE_LABEL: nodes} for one in selectors])


def _choose(
    stock: Iterable[Any], *, running: Iterable[Any], recovering: Iterable[Any], chosen: tuple[str, ...]
) -> set[Any]:
    """As many replicas as Serve would stop: the plan's first, then those that do not run yet, then Serve's choice."""
    stock, running = list(stock), list(running)
    rank = {name: index for index, name in enumerate(chosen)}
    victims = sorted((r for r in [*running, *recovering] if r.unique_id in rank), key=lambda r: rank[r.unique_id])
    others = sorted((r for r in stock if r not in victims), key=lambda r: r in running)
    return set([*victims, *others][: len(stock)])


def install() -> None:
    """Make every change that this Serve allows; log the others.

    Needs: the variable ``RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH``, which Serve's controller reads at its start.
    Without it: Serve chooses which replica stops (``tandem top`` says so), and a restarted HAProxy answers 404 for a
    second.
    """
    choose_by_plan()
    start_proxies_with_routes()
