"""Notes in Ray's key-value store by which start hosts and the coordinator that asks for them know of each other."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from router import ray_kv

BEAT_S = 5.0  # time between two notes of a host or of a coordinator, seconds
_HOSTS, _ENVIRONMENTS, _KEEPERS = (f"tandem:start_hosts:{name}:" for name in ("hosts", "environments", "keepers"))

# A host: its kind, its node and its process id.
Host = tuple[str, str, str]


def kind(environment: Mapping[str, Any]) -> str:
    """Short name of what a pool's processes may differ in: pools with the same can take the same hosts."""
    return hashlib.sha256(json.dumps(dict(environment), sort_keys=True, default=str).encode()).hexdigest()[:16]


def host_key(host: Host) -> bytes:
    """Key of a host's note."""
    return (_HOSTS + ":".join(host)).encode()


def keeper_key(host_kind: str) -> bytes:
    """Key of the note of the coordinators that ask for hosts of a kind."""
    return (_KEEPERS + host_kind).encode()


def environment_key(app: str, host_kind: str) -> bytes:
    """Key of the runtime environment of the application's latest replica of a kind."""
    return f"{_ENVIRONMENTS}{app}:{host_kind}".encode()


def waiting_hosts() -> dict[Host, bytes]:
    """The latest note of each host that waits."""
    notes = {}
    for key in ray_kv.keys(_HOSTS.encode()):
        host_kind, node, process = key.decode().removeprefix(_HOSTS).split(":")
        if (note := ray_kv.get(key)) is not None:
            notes[host_kind, node, process] = note
    return notes
