"""Where the policy and the scheduler hook meet: both live in Serve's controller, and neither can reach the other."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Victims:
    """Replicas that are to stop next, by application; ``is_hooked``: someone asks for them."""

    is_hooked: bool = False
    chosen: dict[str, tuple[str, ...]] = field(default_factory=dict)


# The policy's own module is copied into the controller by value, so its globals would be nobody else's.
VICTIMS = Victims()
