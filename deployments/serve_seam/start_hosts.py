"""Worker processes that Ray starts before a replica needs them, and the hook that runs at the start of a process."""

from collections.abc import Mapping
from typing import Any

import ray
from ray._private.grpc_utils import init_grpc_channel
from ray.core.generated import common_pb2, node_manager_pb2, node_manager_pb2_grpc
from ray.runtime_env import RuntimeEnv
from ray.serve import Application

# Ray's variable with the import path of a function that a worker process calls before it takes work.
_HOOK_VARIABLE = "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR"
_RPC_TIMEOUT_S = 3.0  # longest wait for a node's answer, seconds


def hook_variables(import_path: str) -> dict[str, str]:
    """Variables of a runtime environment with which each worker process calls a function at its start.

    Ray offers ``worker_process_setup_hook`` for a whole job alone, and ignores it in the options of an actor.

    Needs: ``__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR``, which Ray reads at the start of a worker process.
    Without it: the process imports everything once a replica takes it, and start hosts gain nothing.
    """
    return {_HOOK_VARIABLE: import_path}


def own_runtime_env() -> str:
    """This process's runtime environment, as Ray writes it and compares it.

    Needs: ``get_current_runtime_env`` of Ray's core worker.
    Without it: no replica starts that has start hosts; the error names the missing part.
    """
    return str(ray._private.worker.global_worker.core_worker.get_current_runtime_env())


def runtime_env_of(application: Application) -> str:
    """The runtime environment of a bound deployment's replicas, as Ray writes it.

    Needs: ``_bound_deployment`` of Serve's ``Application``.
    Without it: an application is not built; the error names the part.
    """
    options = application._bound_deployment.ray_actor_options or {}
    return str(RuntimeEnv(**options.get("runtime_env", {})).serialize())


def prestart(node: Mapping[str, Any], runtime_env: str, processes: int, keep_s: int) -> None:
    """Let a node start worker processes that no job owns yet; blocks until the node has taken the request.

    ``node``: as ``ray.nodes()`` describes it. ``runtime_env``: as Ray writes it; only an actor with the same one is
    given such a process. ``keep_s``: seconds for which an idle process stays.

    Raises:
        grpc.RpcError: the node does not answer.

    Needs: the call ``PrestartWorkers`` of Ray's node manager.
    Without it: no start host is started; the coordinator's log names the error.
    """
    request = node_manager_pb2.PrestartWorkersRequest(
        language=common_pb2.Language.PYTHON, num_workers=processes, keep_alive_duration_secs=keep_s
    )
    request.runtime_env_info.serialized_runtime_env = runtime_env
    with init_grpc_channel(f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}") as channel:
        node_manager_pb2_grpc.NodeManagerServiceStub(channel).PrestartWorkers(request, timeout=_RPC_TIMEOUT_S)
