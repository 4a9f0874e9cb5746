"""The autoscaling of a running application, seen and changed through its coordinator."""

from collections.abc import Mapping
from typing import Any

from router.ray_coordinator import find_coordinator
from serve_app.cluster import DeployError
from serve_app.validate import ConfigError

_ANSWER_S = 10.0


class Control:
    """One application on the cluster that this process is connected to."""

    def __init__(self, app: str) -> None:
        """Find the coordinator.

        Raises:
            DeployError: the application has none.
        """
        self._app = app
        self._handle = find_coordinator(app)
        if self._handle is None:
            raise DeployError(
                f"application {app} has no coordinator: it is not on this cluster, has no args.autoscale, or is just "
                "starting; `tandem status` lists the applications"
            )

    def tune(self, changes: Mapping[str, Any], why: str) -> None:
        """Change the configuration, nested as ``args.autoscale``; an empty one returns to what was deployed.

        Raises:
            ConfigError: what is wrong with it; nothing was changed.
        """
        complaint = self._ask("tune", dict(changes), why)
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
        status: dict[str, Any] = self._ask("status")
        return status

    def _ask(self, method: str, *arguments: Any) -> Any:
        import ray

        try:
            return ray.get(getattr(self._handle, method).remote(*arguments), timeout=_ANSWER_S)
        except ray.exceptions.RayError as error:
            raise DeployError(
                f"the coordinator of {self._app} does not answer ({type(error).__name__}): Serve restarts it; try again"
            ) from None
