"""Where the policy and the scheduler hook meet: both live in Serve's controller, and neither can reach the other."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Victims:
    """What the plans say of single replicas, by application.

    Attributes:
        is_hooked: someone asks for it.
        chosen: replicas that are to stop next.
        allowed: by deployment, the nodes that its replicas may start on, where that is not every one.
        cordoned: nodes on which none may start.
    """

    is_hooked: bool = False
    chosen: dict[str, tuple[str, ...]] = field(default_factory=dict)
    allowed: dict[str, dict[str, tuple[str, ...]]] = field(default_factory=dict)
    cordoned: dict[str, tuple[str, ...]] = field(default_factory=dict)


# The policy's own module is copied into the controller by value, so its globals would be nobody else's.
VICTIMS = Victims()
