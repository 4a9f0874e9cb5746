"""Watches and changes the autoscaling of a running application through its coordinator.

The coordinator is the actor that keeps an application's autoscaling state. Without autoscaling there is none.
"""

from collections.abc import Mapping
from typing import Any

from autoscale.decide.status import STATUS, ServiceStatus, Status
from autoscale.extension import DEFERRED
from serve_app.checks.yaml_checks import ConfigError
from serve_app.local.cluster import DeployError

# Time that the coordinator has to answer, seconds.
_ANSWER_S = 10.0


class Control:
    """One service of an application on the cluster that this process is connected to."""

    def __init__(self, app: str, service: str | None = None) -> None:
        """Find the coordinator. ``service``: name of the service's model; ``None``: the application's only service.

        Raises:
            DeployError: the application has no coordinator.
            ConfigError: it has no such service, or has several and ``service`` is ``None``.
        """
        self._app = app
        self.service = service_name(app, status_of(app), service)
        # Options with which a command reaches this service.
        self.options = ([] if app == "tandem" else ["--app", app]) + ([] if service is None else ["--service", service])

    def tune(self, changes: Mapping[str, Any], why: str) -> None:
        """Change the configuration. ``changes``: fields of ``args.autoscale``, nested as there.

        Empty ``changes`` return to the configuration that was deployed. ``why``: text for the decision log.

        Raises:
            ConfigError: a change is wrong. Nothing was changed.
        """
        complaint = ask(self._app, "tune", self.service, dict(changes), why)
        if complaint is not None:
            raise ConfigError(complaint)

    def scale(self, prefill: int, decode: int) -> None:
        """Set the counts by hand, until ``resume``; raises ConfigError if they are outside bounds or budget."""
        override = {"prefill": prefill, "decode": decode}
        self.tune({"override": override, "is_paused": False}, f"scale {prefill}P{decode}D by hand")

    def pause(self) -> None:
        """Decide nothing, until ``resume``."""
        self.tune({"is_paused": True}, "pause")

    def resume(self) -> None:
        """End ``scale`` and ``pause``."""
        self.tune({"override": None, "is_paused": False}, "resume")

    def status(self) -> ServiceStatus:
        """The service's configuration, the tuned fields, and the last plan with the replicas that run."""
        return status_of(self._app).services[self.service]

    def cordon(self, name: str, is_cordoned: bool = True) -> None:
        """Keep new replicas off a node, or off all nodes under a switch; or allow them again."""
        ask(self._app, "cordon", name, is_cordoned)


def ask(app: str, method: str, *arguments: Any) -> Any:
    """The answer of an application's coordinator; raises DeployError if there is none, or it does not answer."""
    import ray  # only now: it reads its token when it is imported

    from router.ray_coordinator import find_coordinator

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


def service_name(app: str, status: Status, service: str | None) -> str:
    """The name of a service; ``service`` may be ``None`` if there is only one.

    Raises ConfigError: there is no such service, or there are several and none is named.
    """
    names = list(status.services)
    if service is None and len(names) > 1:
        raise ConfigError(f"{app} has several services: name one of {', '.join(names)}")
    if service is not None and service not in names:
        raise ConfigError(f"{app} has no service {service!r}: it has {', '.join(names)}")
    return service or names[0]


def status_of(app: str) -> Status:
    """The state of a running application's autoscaling, as its coordinator shows it; raises as ``ask``."""
    return STATUS.validate_python(ask(app, "status"), context=DEFERRED)
