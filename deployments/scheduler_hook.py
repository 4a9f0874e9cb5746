"""The one use of Serve's private scheduler: which replica stops is the plan's choice, not Serve's."""

import logging
from collections.abc import Iterable
from typing import Any

from autoscale.ray_victims import VICTIMS

logger = logging.getLogger("ray.serve")


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
            return VictimScheduler(
                cache,
                head or default_impl.get_head_node_id(),
                create_placement_group_fn=placement_group or default_impl._default_create_placement_group,
            )

        default_impl.create_deployment_scheduler = create
        VICTIMS.is_hooked = True
    except Exception:
        # An error here would keep Serve's controller from starting.
        logger.exception("Tandem cannot choose which replicas stop: Serve will")


def _chosen(app: str) -> tuple[str, ...]:
    """The plan's victims; before the first plan of this process those of the last one of the process before it."""
    if app not in VICTIMS.chosen:
        from router.ray_coordinator import kept_state  # tandem top reads this module's name without ray

        update = kept_state(app).get("update")
        VICTIMS.chosen[app] = tuple(update["plan"]["victims"]) if update else ()
    return VICTIMS.chosen[app]


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
