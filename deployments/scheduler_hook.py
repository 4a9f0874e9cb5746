"""The one use of Serve's private scheduler: which replica stops, and on which nodes one starts, is the plan's choice.

A plan says more than a deployment's own labels where these allow scarce switches too, or nodes that are cordoned.
"""

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from autoscale.ray_victims import VICTIMS

logger = logging.getLogger("ray.serve")

_REPLICA, _NODE_LABEL = "SERVE_REPLICA::", "ray.io/node-id"


def install() -> None:
    """Let Serve build its deployment scheduler with our choice of who stops."""
    try:
        from ray.serve._private import default_impl
        from ray.serve._private.deployment_scheduler import DeploymentScheduler

        class VictimScheduler(DeploymentScheduler):
            """Serve's scheduler, asked for the plan's victims first."""

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
    """The plan's victims; before the first plan of this process those of the last one of the process before it."""
    if app not in VICTIMS.chosen:
        from router.ray_coordinator import kept_state  # tandem top reads this module's name without ray

        update = kept_state(app).get("update") or {"services": {}}
        VICTIMS.chosen[app] = tuple(name for of in update["services"].values() for name in of["plan"]["victims"])
    return VICTIMS.chosen[app]


def _narrowed(request: Any) -> Any:
    """Serve's request for a replica's placement group, with the nodes that its bundles may be on."""
    app, _, rest = request.name.removeprefix(_REPLICA).partition("#")
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
    order = {name: index for index, name in enumerate(chosen)}
    here = [*running, *recovering]
    ours = sorted((r for r in here if r.unique_id in order), key=lambda r: order[r.unique_id])
    others = sorted((r for r in stock if r not in ours), key=lambda r: r in running)
    return set([*ours, *others][: len(stock)])
