"""Ray's key-value store: notes that outlive the process that wrote them, for every process of a cluster.

Needs: ``ray.experimental.internal_kv`` (``_internal_kv_put``, ``_internal_kv_get``, ``_internal_kv_del``,
``_internal_kv_list``).
Without it: no Tandem actor or replica starts, since no process can find the coordinator.
"""

from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_list, _internal_kv_put


def put(key: bytes, value: bytes) -> None:
    """Write a note, over an older one of that key."""
    _internal_kv_put(key, value, overwrite=True)


def get(key: bytes) -> bytes | None:
    """The note of a key; ``None``: the store has none."""
    value: bytes | None = _internal_kv_get(key)
    return value


def delete(key: bytes) -> None:
    """Delete the note of a key, if the store has one."""
    _internal_kv_del(key)


def keys(prefix: bytes) -> list[bytes]:
    """Every key that begins with ``prefix``."""
    return list(_internal_kv_list(prefix))
