"""The autoscaling of a running application, seen and changed through its coordinator."""

from collections.abc import Mapping
from typing import Any

from router.ray_coordinator import find_coordinator
from serve_app.cluster import DeployError
from serve_app.validate import ConfigError

_ANSWER_S = 10.0


class Control:
    """One service of an application on the cluster that this process is connected to."""

    def __init__(self, app: str, service: str | None = None) -> None:
        """Find the coordinator.

        Args:
            app: the application.
            service: its model's name; ``None``: the one that there is.

        Raises:
            DeployError: the application has no coordinator.
            ConfigError: it has no such service, or several and none is named.
        """
        self._app = app
        services = list(statuses(app))
        if service is None and len(services) > 1:
            raise ConfigError(f"{app} has several services: name one of {', '.join(services)}")
        if service is not None and service not in services:
            raise ConfigError(f"{app} has no service {service!r}: it has {', '.join(services)}")
        self.service = service or services[0]

    def tune(self, changes: Mapping[str, Any], why: str) -> None:
        """Change the configuration, nested as ``args.autoscale``; an empty one returns to what was deployed.

        Raises:
            ConfigError: what is wrong with it; nothing was changed.
        """
        complaint = self._ask("tune", self.service, dict(changes), why)
        if complaint is not None:
            raise ConfigError(complaint)

    def scale(self, prefill: int, decode: int) -> None:
        """Set the counts by hand, until ``resume``.

        Raises:
            ConfigError: they are outside bounds or budget.
        """
        self.tune(
            {"override": {"prefill": prefill, "decode": decode}, "is_paused": False},
            f"scale {prefill}P{decode}D by hand",
        )

    def pause(self) -> None:
        """Decide nothing, until ``resume``."""
        self.tune({"is_paused": True}, "pause")

    def resume(self) -> None:
        """End ``scale`` and ``pause``."""
        self.tune({"override": None, "is_paused": False}, "resume")

    def status(self) -> dict[str, Any]:
        """Configuration, what was tuned, the last plan and who runs, as plain values."""
        return statuses(self._app)[self.service]

    def cordon(self, name: str, is_cordoned: bool = True) -> None:
        """Let a node, or all nodes under a switch, take nothing new; or let them take it again."""
        self._ask("cordon", name, is_cordoned)

    def _ask(self, method: str, *arguments: Any) -> Any:
        return ask(self._app, method, *arguments)


def ask(app: str, method: str, *arguments: Any) -> Any:
    """What an application's coordinator answers.

    Raises:
        DeployError: there is none, or it does not answer.
    """
    import ray

    handle = find_coordinator(app)
    if handle is None:
        raise DeployError(
            f"application {app} has no coordinator: it is not on this cluster, has no args.autoscale, or is just "
            "starting; `tandem status` lists the applications"
        )
    try:
        return ray.get(getattr(handle, method).remote(*arguments), timeout=_ANSWER_S)
    except ray.exceptions.RayError as error:
        raise DeployError(
            f"the coordinator of {app} does not answer ({type(error).__name__}): Serve restarts it; try again"
        ) from None


def statuses(app: str) -> dict[str, dict[str, Any]]:
    """What ``Control.status`` says of every service of an application, by its model's name.

    Raises:
        DeployError: the application has no coordinator, or it does not answer.
    """
    status: dict[str, Any] = ask(app, "status")
    of = status.pop("services")
    return {name: {**status, **each} for name, each in of.items()}
