"""Where the policy and the scheduler hook meet: both live in Serve's controller, and neither can reach the other."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Victims:
    """What the plans say of single replicas, by application.

    Attributes:
        is_hooked: the scheduler hook reads this.
        chosen: replicas that are to stop next.
        allowed: by deployment, the nodes that its replicas may start on, if these are not all nodes.
        cordoned: nodes on which no replica may start.
    """

    is_hooked: bool = False
    chosen: dict[str, tuple[str, ...]] = field(default_factory=dict)
    allowed: dict[str, dict[str, tuple[str, ...]]] = field(default_factory=dict)
    cordoned: dict[str, tuple[str, ...]] = field(default_factory=dict)


# Registry: what the policy tells the scheduler hook. Serve copies the policy's own module into its controller by value,
# so no other module could reach globals there.
VICTIMS = Victims()
