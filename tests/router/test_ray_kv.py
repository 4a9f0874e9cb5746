"""Ray's key-value store, which processes find each other by; tests/engines use it on a cluster."""

import pytest


def test_contract_ray_kv() -> None:
    store = pytest.importorskip("ray.experimental.internal_kv")
    for name in ("_internal_kv_put", "_internal_kv_get", "_internal_kv_del", "_internal_kv_list"):
        assert callable(getattr(store, name))
