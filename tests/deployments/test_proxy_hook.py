"""That Serve still has what its proxies' start hangs on; tests/engines/test_front.py sees one start."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.ray


def test_ray_still_has_the_seams() -> None:
    from ray.serve._private import controller, haproxy

    manager = haproxy.HAProxyManager.__ray_metadata__.modified_class
    # Looked up as an attribute of the module, so one assignment is enough.
    assert "HAProxyManager if self._ha_proxy_enabled" in inspect.getsource(controller)
    assert "self.event_loop.create_task(self._haproxy.start())" in inspect.getsource(manager.__init__)
    assert "_received_target_groups_broadcast = True" in inspect.getsource(manager.update_target_groups)
    applied = inspect.getsource(manager._coalesce_and_apply)
    assert applied.index("self._update_pending = False") < applied.index("self._update_haproxy_backends()")
    updated = inspect.getsource(manager._update_haproxy_backends)
    # With nothing to wait for before it.
    assert "await" not in updated[: updated.index("self._haproxy.set_backend_configs(")]
    assert "await self._haproxy_start_task" in inspect.getsource(manager._reload_haproxy)


def test_install_keeps_serve_alive_where_it_cannot_be_and_says_so(run_python: Callable[..., Any]) -> None:
    script = """
import json, logging, sys
from ray.serve._private import controller, haproxy
stock = haproxy.HAProxyManager
if sys.argv[1] == "without":
    del haproxy.HAProxyManager
if sys.argv[1] == "another":
    import ray
    stock = controller.HAProxyManager = ray.remote(type("Another", (), {}))
from deployments.proxy_hook import install
said = []
logging.getLogger("ray.serve").addFilter(lambda record: said.append(record.getMessage()))
install()
install()
print(json.dumps([controller.HAProxyManager is stock, bool(said)]))
"""
    assert run_python(script, "with") == [False, False]
    assert run_python(script, "without") == [True, True]
    assert run_python(script, "another") == [True, True]
