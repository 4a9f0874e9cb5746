"""The registry through which the policy tells the scheduler hook which replicas stop, and where new ones may start.

Both run in Serve's controller. The hook is in ``deployments.serve_seam``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(slots=True)
class Victims:
    """Replicas and nodes that the plans of each application choose; all by the application's name.

    Attributes:
        is_hooked: whether the scheduler hook reads this.
        chosen: replicas that stop next.
        allowed: for each deployment, the nodes on which its replicas may start; one that is left out may use all.
        labels: for each deployment whose new replicas wait for a node that does not exist yet: the labels of that node.
        cordoned: nodes on which no replica may start.
        again: deployments whose replicas that wait for a node are to be stopped, and started again on other nodes. The
            hook removes what it has done.
    """

    is_hooked: bool = False
    chosen: dict[str, tuple[str, ...]] = field(default_factory=dict)
    allowed: dict[str, dict[str, tuple[str, ...]]] = field(default_factory=dict)
    labels: dict[str, dict[str, Mapping[str, str]]] = field(default_factory=dict)
    cordoned: dict[str, tuple[str, ...]] = field(default_factory=dict)
    again: dict[str, set[str]] = field(default_factory=dict)


# Registry: Serve copies the policy into its controller by value, with the objects that its module imports by name. So
# the registry has a module of its own, and the policy imports this module instead: then the hook sees the same object.
VICTIMS = Victims()
