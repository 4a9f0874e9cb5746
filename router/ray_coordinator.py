"""An application's coordinator: where to find it, and the membership that it tells every router."""

import asyncio
import json
import logging
import time
from typing import Any

import ray
from ray.exceptions import ActorDiedError
from ray.experimental import internal_kv
from ray.serve._private.common import DeploymentID
from ray.serve.request_router import ReplicaID

from router.membership import Membership, obeyed
from router.ray_actors import NAMESPACE, find_actor

logger = logging.getLogger(__name__)

_RETRY_S = 1.0
# The coordinator speaks every few seconds even when nothing has changed.
_SILENCE_S = 15.0
# Of a replica whose event loop is held up by one large prompt.
_ANSWER_S = 5.0


def coordinator_key(app: str) -> bytes:
    """Where in Ray's key-value store the name of an application's coordinator is: Serve chooses its actors' names."""
    return f"tandem:coordinator:{app}".encode()


def find_coordinator(app: str) -> Any:
    """The handle of an application's coordinator; ``None`` while there is none. Blocks for a millisecond."""
    return find_actor(coordinator_key(app))


def state_key(app: str, name: str) -> bytes:
    """Where in Ray's key-value store a coordinator keeps what must outlive it."""
    return f"tandem:state:{app}:{name}".encode()


def state_of(app: str, name: str) -> dict[str, Any]:
    """What the coordinator of that name has kept last; empty where it has kept nothing. Blocks for a millisecond."""
    kept = internal_kv._internal_kv_get(state_key(app, name))
    return json.loads(kept) if kept else {}


def kept_state(app: str) -> dict[str, Any]:
    """What an application's coordinator has kept last; empty where there is none. Blocks for two milliseconds."""
    name = internal_kv._internal_kv_get(coordinator_key(app))
    return state_of(app, name.decode()) if name else {}


def is_alive(app: str, deployment: str, replica_id: str) -> bool:
    """Whether a replica's actor still exists, in whatever state. Blocks for a millisecond."""
    replica = ReplicaID(replica_id, DeploymentID(name=deployment, app_name=app))
    try:
        ray.get_actor(replica.to_full_id_str(), namespace=NAMESPACE)
    except ValueError:
        return False
    return True


def answers(app: str, deployment: str, replica_id: str) -> bool:
    """Whether a replica's actor exists; asks it something. Blocks for a few milliseconds, or for seconds.

    Raises:
        TimeoutError: it has not answered: its process stands still.
    """
    replica = ReplicaID(replica_id, DeploymentID(name=deployment, app_name=app))
    try:
        actor = ray.get_actor(replica.to_full_id_str(), namespace=NAMESPACE)
        ray.get(actor.get_num_ongoing_requests.remote(), timeout=_ANSWER_S)
    except (ValueError, ActorDiedError):
        return False
    return True


class MembershipFeed:
    """Keeps ``membership`` as the coordinator last told it, until the process ends."""

    def __init__(self, app: str) -> None:
        self.membership: Membership | None = None
        self._app = app

    def now(self) -> Membership | None:
        """What holds now; ``None``: nothing is known, or has been for too long."""
        return obeyed(self.membership, now_s=time.monotonic(), silence_s=_SILENCE_S)

    def _hear(self, told: dict[str, list[str]] | None) -> None:
        if told is None:  # there is a coordinator, but no policy that speaks to it
            self.membership = None
            return
        admitted = frozenset(name for names in told.values() for name in names)
        if self.membership is not None and self.membership.admitted == admitted:
            admitted = self.membership.admitted  # the same object says that nothing has changed
        pools = frozenset(pool for pool, names in told.items() if names)
        self.membership = Membership(admitted=admitted, heard_s=time.monotonic(), pools=pools)

    async def run(self) -> None:
        """Ask, and be answered when something has changed or a few seconds have passed."""
        handle: Any = None
        version = -1
        while ray.is_initialized():
            try:
                found = await asyncio.to_thread(find_coordinator, self._app)
                if found is not None and (handle is None or found._actor_id != handle._actor_id):
                    handle, version = found, -1  # the first, or that of a redeployed application
                if handle is not None:
                    version, admitted = await handle.watch.remote(version)
                    self._hear(admitted)
                    continue
            except Exception as error:  # whatever it is, this must go on
                logger.debug("the coordinator of %s does not answer: %s", self._app, error)
                handle, version = None, -1
            await asyncio.sleep(_RETRY_S)
