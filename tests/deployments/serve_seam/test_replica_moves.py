"""Replicas that move to other nodes, in Serve's own classes."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from deployments.serve_seam.replica_moves import REPLICA_PREFIX

pytestmark = pytest.mark.ray

SCRIPT = """
import json, logging
from types import SimpleNamespace as Made
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve._private.deployment_state import DeploymentState, ReplicaState
from autoscale.ray_victims import VICTIMS
import deployments.serve_seam.replica_moves as moves
migrated, said = [], []
DeploymentState.migrate_replicas_on_draining_nodes = lambda self, nodes, compacting_node_id=None: migrated.append(
    (nodes, compacting_node_id)
)
logging.getLogger("ray.serve").addFilter(lambda record: said.append(record.getMessage()))
def replica(name, deployment="decode:g0", timeout_s=600.0):
    replica_id = ReplicaID(name, DeploymentID(deployment, "app"))
    return Made(replica_id=replica_id, _actor=Made(graceful_shutdown_timeout_s=timeout_s))
"""


def test_contract_replica_moves_move_by_plan() -> None:
    from ray.serve._private.deployment_state import DeploymentState, DeploymentStateManager, ReplicaState

    assert list(inspect.signature(DeploymentState._group_shutdown_timeout_ms).parameters) == ["group"]
    # Looked up on the object, so assignments to the class are enough.
    assert "self._group_shutdown_timeout_ms(group)" in inspect.getsource(DeploymentState._partition_groups_to_stop)
    migrate = inspect.signature(DeploymentState.migrate_replicas_on_draining_nodes).parameters
    assert list(migrate) == ["self", "draining_nodes", "compacting_node_id"]
    called = inspect.getsource(DeploymentStateManager)
    assert "deployment_state.migrate_replicas_on_draining_nodes(" in called
    assert list(inspect.signature(DeploymentState.stop_replicas).parameters) == ["self", "replicas_to_stop"]
    assert "self._replicas.get(" in inspect.getsource(DeploymentState)
    assert "self._id = id" in inspect.getsource(DeploymentState.__init__)
    assert ReplicaState.STARTING


def test_a_replica_of_a_pool_serves_until_shortly_before_its_node_goes_and_one_of_the_endpoint_does_not(
    run_python: Callable[..., Any],
) -> None:
    script = f"""{SCRIPT}
moves.move_by_plan()
groups = [replica("a")], [replica("b", timeout_s=5.0)], [replica("c", "ingress")]
print(json.dumps([DeploymentState._group_shutdown_timeout_ms(group) for group in groups]))
"""
    assert run_python(script) == [30000.0, 5000.0, 600000.0]


def test_replicas_that_wait_for_a_node_stop_once_if_the_plan_names_their_pool(run_python: Callable[..., Any]) -> None:
    script = f"""{SCRIPT}
moves.move_by_plan()
moves.withdraw_requests = lambda ids: [one for one in ids if one.unique_id != "has-a-node"]
stopped = []
starting = [replica("has-a-node"), replica("waits"), replica("waits-too")]
state = Made(
    _id=DeploymentID("decode:g0", "app"),
    _replicas=Made(get=lambda states: starting if states == [ReplicaState.STARTING] else []),
    stop_replicas=lambda ids: stopped.append([one.unique_id for one in ids]),
)
other = Made(_id=DeploymentID("prefill:g0", "app"))
migrate = DeploymentState.migrate_replicas_on_draining_nodes
VICTIMS.again["app"] = {{"decode:g0"}}
for one in (other, state, state):
    migrate(one, {{}}, compacting_node_id="n")
del state._replicas  # another version of Serve
VICTIMS.again["app"] = {{"decode:g0"}}
migrate(state, {{"leaves": 1.0}})
left = list(VICTIMS.again["app"])
print(json.dumps([stopped, migrated, said, left]))
"""
    stopped, migrated, said, left = run_python(script)
    assert stopped == [[], ["waits"], ["waits-too"]]
    assert migrated == [[{}, "n"]] * 3 + [[{"leaves": 1.0}, None]]  # Serve's own part always runs
    assert left == ["decode:g0"]  # not done, so it is tried again
    assert len(said) == 1
    assert "go on waiting for their nodes" in said[0]


@pytest.mark.parametrize("missing", ["_group_shutdown_timeout_ms", "stop_replicas"])
def test_without_serves_private_parts_the_log_says_so_and_nothing_changes(
    run_python: Callable[..., Any], missing: str
) -> None:
    script = f"""{SCRIPT}
import sys
delattr(DeploymentState, sys.argv[1])
before = DeploymentState.migrate_replicas_on_draining_nodes
moves.move_by_plan()
print(json.dumps([before is DeploymentState.migrate_replicas_on_draining_nodes, said]))
"""
    assert run_python(script, missing) == [
        True,
        ["Serve moves replicas from nodes that go: Tandem cannot change when"],
    ]


def test_contract_replica_moves_withdraw_requests() -> None:
    from ray.serve._private.common import DeploymentID, ReplicaID

    replica = ReplicaID("r", DeploymentID("decode:g0", "app"))
    assert replica.to_full_id_str() == f"{REPLICA_PREFIX}app#decode:g0#r"
