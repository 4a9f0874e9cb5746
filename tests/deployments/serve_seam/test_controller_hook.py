"""The plan's victims in Serve's scheduler, and the private parts that the start of Serve's proxies needs."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from deployments.serve_seam.controller_hook import IMPORT_PATH, _stopping


class Named(str):
    """A replica id: hashable, with a name."""

    @property
    def unique_id(self) -> str:
        return str(self)


def ids(*names: str) -> list[Named]:
    return [Named(name) for name in names]


@pytest.mark.parametrize(
    ("stock", "running", "victims", "expected"),
    [
        (["d"], ["a", "b", "c", "d"], ("b",), {"b"}),
        (["c", "d"], ["a", "b", "c", "d"], ("b",), {"b", "c"}),  # one of Serve's own choices makes up the number
        (["d"], ["a", "b", "c", "d"], ("b", "a"), {"b"}),  # no more than Serve would stop
        (["d"], ["a", "b", "c", "d"], (), {"d"}),
        (["d"], ["a", "b", "c", "d"], ("gone",), {"d"}),
        (["new"], ["a", "b"], (), {"new"}),
        (["new", "b"], ["a", "b"], ("a",), {"a", "new"}),  # a replica that does not run yet stops first
        (["b"], ["a", "b"], ("b",), {"b"}),
    ],
)
def test_the_plans_victims_stop_first_and_serve_decides_how_many(
    stock: list[str], running: list[str], victims: tuple[str, ...], expected: set[str]
) -> None:
    assert _stopping(ids(*stock), running=ids(*running), recovering=[], victims=victims) == expected


def test_a_victim_that_a_new_controller_recovers_stays_the_victim() -> None:
    # Serve itself would stop any replica of which it does not know yet that it runs.
    assert _stopping(ids("b"), running=[], recovering=ids("a", "b", "c"), victims=("a",)) == {"a"}
    assert _stopping(ids("b"), running=ids("c"), recovering=ids("a", "b"), victims=("a",)) == {"a"}


@pytest.mark.ray
def test_contract_controller_hook_choose_by_plan() -> None:
    from ray.serve._private import default_impl, deployment_state
    from ray.serve._private.deployment_scheduler import DeploymentScheduler

    stop = inspect.signature(DeploymentScheduler._get_replicas_to_stop).parameters
    assert list(stop)[:3] == ["self", "deployment_id", "max_num_to_stop"]
    create = inspect.signature(default_impl.create_deployment_scheduler).parameters
    assert list(create) == [
        "cluster_node_info_cache",
        "head_node_id_override",
        "create_placement_group_fn_override",
    ]
    # Looked up as an attribute of the module, so one assignment is enough.
    assert "default_impl.create_deployment_scheduler(" in inspect.getsource(deployment_state)
    assert "_running_replicas" in inspect.getsource(DeploymentScheduler)
    assert "_recovering_replicas" in inspect.getsource(DeploymentScheduler)


@pytest.mark.ray
def test_install_says_whether_the_scheduler_is_hooked_and_does_not_fail(
    run_python: Callable[..., Any],
) -> None:
    script = """
import json, sys
from importlib import import_module
import ray.serve._private.default_impl as default_impl
if sys.argv[1] == "without":
    import ray.serve._private.deployment_scheduler as scheduler
    del scheduler.DeploymentScheduler
from autoscale.ray_victims import VICTIMS
module, _, function = sys.argv[2].rpartition(".")
stock = default_impl.create_deployment_scheduler
getattr(import_module(module), function)()
print(json.dumps([VICTIMS.is_hooked, default_impl.create_deployment_scheduler is stock]))
"""
    assert run_python(script, "with", IMPORT_PATH) == [True, False]
    assert run_python(script, "without", IMPORT_PATH) == [False, True]


@pytest.mark.ray
def test_if_our_choice_of_victims_fails_serves_own_choice_holds(run_python: Callable[..., Any]) -> None:
    script = """
import json
import ray.serve._private.default_impl as default_impl
from ray.serve._private.common import DeploymentID
from ray.serve._private.deployment_scheduler import DeploymentScheduler
from deployments.serve_seam.controller_hook import install
install()
DeploymentScheduler._get_replicas_to_stop = lambda self, deployment_id, number: {"stock"}
scheduler = default_impl.create_deployment_scheduler(None, "head", lambda *_: None)
del scheduler._running_replicas
print(json.dumps(list(scheduler._get_replicas_to_stop(DeploymentID("decode:g0", "app"), 1))))
"""
    assert run_python(script) == ["stock"]


@pytest.mark.ray
def test_contract_controller_hook_start_proxies_with_routes() -> None:
    from ray.serve._private import controller, haproxy

    manager = haproxy.HAProxyManager.__ray_metadata__.modified_class
    # Looked up as an attribute of the module, so one assignment is enough.
    assert "HAProxyManager if self._ha_proxy_enabled" in inspect.getsource(controller)
    assert "self.event_loop.create_task(self._haproxy.start())" in inspect.getsource(manager.__init__)
    assert "_received_target_groups_broadcast = True" in inspect.getsource(manager.update_target_groups)
    applied = inspect.getsource(manager._coalesce_and_apply)
    assert applied.index("self._update_pending = False") < applied.index("self._update_haproxy_backends()")
    updated = inspect.getsource(manager._update_haproxy_backends)
    # There is no await before it.
    assert "await" not in updated[: updated.index("self._haproxy.set_backend_configs(")]
    assert "await self._haproxy_start_task" in inspect.getsource(manager._reload_haproxy)


@pytest.mark.ray
def test_install_leaves_serves_proxies_as_they_are_if_it_cannot_replace_them_and_says_so(
    run_python: Callable[..., Any],
) -> None:
    script = """
import json, logging, sys
from ray.serve._private import controller, haproxy
stock = haproxy.HAProxyManager
if sys.argv[1] == "without":
    del haproxy.HAProxyManager
if sys.argv[1] == "another":
    import ray
    stock = controller.HAProxyManager = ray.remote(type("Another", (), {}))
from deployments.serve_seam.controller_hook import install
said = []
logging.getLogger("ray.serve").addFilter(lambda record: said.append(record.getMessage()))
install()
install()
print(json.dumps([controller.HAProxyManager is stock, bool(said)]))
"""
    assert run_python(script, "with") == [False, False]
    assert run_python(script, "without") == [True, True]
    assert run_python(script, "another") == [True, True]
