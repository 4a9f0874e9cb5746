"""The registry through which the policy reaches the scheduler hook; both run in Serve's controller."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Victims:
    """Replicas and nodes that the plans of each application choose.

    Attributes:
        is_hooked: whether the scheduler hook reads this.
        chosen: replicas that stop next.
        allowed: nodes that replicas of a deployment may start on; a deployment that is left out may use all.
        cordoned: nodes on which no replica may start.
    """

    is_hooked: bool = False
    chosen: dict[str, tuple[str, ...]] = field(default_factory=dict)
    allowed: dict[str, dict[str, tuple[str, ...]]] = field(default_factory=dict)
    cordoned: dict[str, tuple[str, ...]] = field(default_factory=dict)


# Registry: Serve copies the policy's own module into its controller by value. The hook could not reach globals there,
# so the registry has a module of its own, and both import the module instead of its object.
VICTIMS = Victims()
