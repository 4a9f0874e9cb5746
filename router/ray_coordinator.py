"""An application's coordinator: how to find it, its stored state, and the membership that it sends to every router.

The membership says which replicas the autoscaler's last plan admits. Here are also questions to a replica's own actor.
"""

import time
from typing import Any

import ray
from ray.exceptions import ActorDiedError
from ray.serve._private.common import DeploymentID
from ray.serve.request_router import ReplicaID

from router import ray_kv
from router.membership import Membership, obeyed
from router.ray_actors import NAMESPACE, find_actor, follow

# Age, seconds, above which a membership no longer holds: three answers are missing by then, since the coordinator
# answers every 5 s even when nothing has changed.
_SILENCE_S = 15.0
# Time, seconds, in which a replica must answer: one large prompt can block its event loop for seconds.
_ANSWER_S = 5.0


def coordinator_key(app: str) -> bytes:
    """Key in Ray's key-value store under which the name of the coordinator's actor is announced."""
    return f"tandem:coordinator:{app}".encode()


def find_coordinator(app: str) -> Any:
    """The handle of an application's coordinator; ``None``: it does not exist. Blocks for a millisecond."""
    return find_actor(coordinator_key(app))


def load_state(app: str, name: str | None = None) -> bytes | None:
    """The state that a coordinator stored last; ``None``: nothing is stored. Blocks for two milliseconds.

    ``name``: name of the coordinator's actor; ``None`` means the coordinator that is announced now.
    """
    if name is None and (announced := ray_kv.get(coordinator_key(app))) is not None:
        name = announced.decode()
    return None if name is None else ray_kv.get(_state_key(app, name))


def save_state(app: str, name: str, state: bytes) -> None:
    """Store a coordinator's state, so that it outlives the actor; ``name``: name of the actor."""
    ray_kv.put(_state_key(app, name), state)


def _state_key(app: str, name: str) -> bytes:
    return f"tandem:state:{app}:{name}".encode()


def is_alive(app: str, deployment: str, replica_id: str) -> bool:
    """Whether a replica's actor still exists, in any state. Blocks for a millisecond."""
    try:
        _actor(app, deployment, replica_id)
    except ValueError:
        return False
    return True


def is_answering(app: str, deployment: str, replica_id: str) -> bool:
    """Whether a replica's actor answers; ``False``: it no longer exists. Blocks for milliseconds, at most for 5 s.

    Raises:
        TimeoutError: the actor exists, but did not answer within 5 s.
        RayError: whether the actor exists is unknown, for instance because its node cannot be reached.
    """
    try:
        actor = _actor(app, deployment, replica_id)
        ray.get(actor.get_num_ongoing_requests.remote(), timeout=_ANSWER_S)
    except (ValueError, ActorDiedError):
        return False
    return True


def _actor(app: str, deployment: str, replica_id: str) -> Any:
    """The actor of a replica.

    Needs: ``ray.serve._private.common.DeploymentID``, ``ReplicaID.to_full_id_str`` as the actor's name, and the actor's
    method ``get_num_ongoing_requests``.
    Without it: no replica starts if the class has moved; with other names every replica counts as dead.

    Raises:
        ValueError: no such actor exists.
    """
    replica = ReplicaID(replica_id, DeploymentID(name=deployment, app_name=app))
    return ray.get_actor(replica.to_full_id_str(), namespace=NAMESPACE)


class MembershipFeed:
    """The coordinator's latest membership, kept up to date by ``run`` in this process."""

    def __init__(self, app: str) -> None:
        self.membership: Membership | None = None  # from the last answer, however old
        self._app = app

    def now(self) -> Membership | None:
        """The membership if it holds now; ``None``: it is unknown or too old."""
        return obeyed(self.membership, now_s=time.monotonic(), silence_s=_SILENCE_S)

    async def run(self) -> None:
        """Follow the coordinator until this process leaves Ray."""
        # When the coordinator is lost, nothing has to be done: the last membership holds until it is too old.
        await follow(coordinator_key(self._app), self._watch, lambda: None)

    async def _watch(self, coordinator: Any, version: int) -> int:
        """Wait for the coordinator's next answer and store it. Returns the version of the answer."""
        new_version, admitted_by_pool = await coordinator.watch.remote(version)
        self._store(admitted_by_pool)
        return int(new_version)

    def _store(self, admitted_by_pool: dict[str, list[str]] | None) -> None:
        """Store the admitted replicas by pool; ``None``: the coordinator gets no plans any more, so none holds."""
        if admitted_by_pool is None:
            self.membership = None
            return
        admitted = frozenset(name for names in admitted_by_pool.values() for name in names)
        if self.membership is not None and self.membership.admitted == admitted:
            admitted = self.membership.admitted  # the same object tells readers that nothing has changed
        pools = {pool: len(names) for pool, names in admitted_by_pool.items() if names}
        self.membership = Membership(admitted=admitted, heard_s=time.monotonic(), pools=pools)
