"""The private parts of Ray Serve are where our functions expect them, and what happens if they are not.

The contracts of the scheduler and of HAProxy are in test_controller_hook.py.
"""

import logging
import logging.handlers
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.serve_seam.environment import cluster_environment
from deployments.serve_seam.http_headers import _SERVE_HEADERS
from tests.installed_source import installed_source

CONSTANTS = "ray/serve/_private/constants.py"


def test_contract_controller_hook_install() -> None:
    assert '"RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH"' in installed_source(CONSTANTS)
    assert "RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH" in installed_source("ray/serve/_private/controller.py")


def test_contract_environment_serve_environment() -> None:
    constants = installed_source(CONSTANTS)
    environment = cluster_environment(Path("/c"), cache=Path("/d"), ports=(1, 2, 3))
    unknown = [name for name in environment if name.startswith("RAY_SERVE_") and f'"{name}"' not in constants]
    assert unknown == []
    # Two more lines follow the value of this one, so nothing may follow it on its own line.
    template = installed_source("ray/serve/_private/haproxy_templates.py")
    assert re.search(r"^ +retry-on \{\{ config\.retry_on \}\}$", template, re.M)


def test_contract_environment_cluster_environment() -> None:
    haproxy = installed_source("ray/serve/_private/haproxy.py")
    for name in ("CONFIG_FILE_LOC", "SOCKET_PATH", "SERVER_STATE_FILE", "STATS_PORT", "METRICS_PORT"):
        assert f"RAY_SERVE_HAPROXY_{name}" in haproxy
    assert '"VLLM_NO_USAGE_STATS"' in installed_source("vllm/envs.py")


def test_contract_http_headers_middlewares() -> None:
    constants = installed_source(CONSTANTS)
    switches = {name.decode() for name in _SERVE_HEADERS} - {"serve-multiplexed-model-id"}
    assert all(f'"{name}"' in constants for name in switches)
    assert set(re.findall(r'"(x-request-[a-z-]+|serve_multiplexed_model_id)"', constants)) <= {
        *switches,
        "x-request-id",
    }
    assert "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH" in installed_source("ray/serve/_private/http_util.py")


@pytest.fixture
def replica(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Serve's module of replicas, whose gRPC binds are recorded."""
    module = pytest.importorskip("ray.serve._private.replica")
    import ray

    binds: list[str] = []

    def add_port(server: Any, address: str) -> int:
        binds.append(address)
        return 7

    monkeypatch.setattr(module, "add_port_to_grpc_server", add_port)
    monkeypatch.setattr(module, "binds", binds, raising=False)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    return module


def test_contract_replica_process_listen_on_node_address(replica: Any) -> None:
    from deployments.serve_seam.replica_process import listen_on_node_address

    # Serve looks the function up in its module, and asks for every interface.
    assert 'add_port_to_grpc_server(self._server, "[::]:0")' in installed_source("ray/serve/_private/replica.py")
    listen_on_node_address()
    listen_on_node_address()
    assert replica.add_port_to_grpc_server(None, "[::]:0") == 7
    assert replica.binds == ["127.0.0.1:0"]


@pytest.mark.parametrize("change", ["gone", "another address"])
def test_a_replica_refuses_to_start_if_its_port_would_be_open_to_other_machines(
    replica: Any, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    from deployments.serve_seam.replica_process import listen_on_node_address

    if change == "gone":
        monkeypatch.delattr(replica, "add_port_to_grpc_server")
        with pytest.raises(RuntimeError, match=r"add_port_to_grpc_server is gone.*install ray\[serve\]==2.60.0"):
            listen_on_node_address()
        return
    listen_on_node_address()
    with pytest.raises(RuntimeError, match=r"asks for '0.0.0.0:0'.*could be open on every interface"):
        replica.add_port_to_grpc_server(None, "0.0.0.0:0")
    assert replica.binds == []


def test_contract_replica_process_restore_replica_log(monkeypatch: pytest.MonkeyPatch) -> None:
    utils = pytest.importorskip("ray.serve._private.logging_utils")
    for name in ("JSONFormatter", "ServeFormatter", "get_component_file_name", "get_serve_logs_dir"):
        assert hasattr(utils, name), name
    assert "logging.handlers.MemoryHandler(" in installed_source("ray/serve/_private/logging_utils.py")
    assert "_deployment_config: DeploymentConfig" in installed_source("ray/serve/context.py")
    node = installed_source("ray/_private/node.py")
    assert "self.max_bytes = " in node
    assert "self.backup_count = " in node
    from deployments.serve_seam.replica_process import restore_replica_log

    logger = logging.getLogger("ray.serve")
    closed = logging.handlers.MemoryHandler(10)
    monkeypatch.setattr(logger, "handlers", [closed])
    monkeypatch.delattr(utils, "get_component_file_name")
    with pytest.raises(RuntimeError, match=r"log of this replica cannot be opened.*install ray\[serve\]==2.60.0"):
        restore_replica_log()


def test_contract_llm_server_engine_client() -> None:
    engine = installed_source("ray/llm/_internal/serve/engines/vllm/vllm_engine.py")
    assert "self._engine_client" in engine
    client = installed_source("vllm/v1/engine/async_llm.py")
    for name in (
        "generate",
        "collective_rpc",
        "check_admission",
        "get_num_queued_tokens",
        "notify_kv_transfer_request_rejected",
        "encode",
        "get_supported_tasks",
    ):
        assert f"def {name}(" in client, name


def test_contract_llm_server_native_app() -> None:
    engine = installed_source("ray/llm/_internal/serve/engines/vllm/vllm_engine.py")
    assert "async def build_asgi_app(self):" in engine
    assert "app.state._state.update(self._app_state._state)" in engine


def test_contract_llm_server_served_adapters() -> None:
    assert "self._oai_models = " in installed_source("ray/llm/_internal/serve/engines/vllm/vllm_engine.py")
    models = installed_source("vllm/entrypoints/openai/models/serving.py")
    assert "self.lora_requests: dict[str, LoRARequest] = {}" in models


def test_contract_llm_server_start_no_download() -> None:
    engine = installed_source("ray/llm/_internal/serve/engines/vllm/vllm_engine.py")
    assert "callback = self.llm_config.get_or_create_callback()" in engine
    assert "if callback.ctx.run_init_node:\n            await initialize_node(self.llm_config)" in engine
    # For a source without a scheme Ray's task returns the source.
    download = installed_source("ray/llm/_internal/common/utils/download_utils.py")
    assert "if is_remote_path(model_id):" in download
    assert 'logger.info("No cloud storage mirror configured")\n            return model_id' in download


@pytest.mark.vllm
@pytest.mark.parametrize(("value", "reports"), [("0", 0), ("1", 1)])
async def test_contract_llm_server_report_no_usage(value: str, reports: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.llm._internal.serve.core.server import llm_server

    from deployments.serve_seam.llm_server import report_no_usage

    class Engine:
        async def start(self) -> None: ...

    sent = []
    monkeypatch.setattr(llm_server, "push_telemetry_report_for_all_models", lambda all_models: sent.append(all_models))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", value)
    report_no_usage()
    await llm_server.LLMServer._start_engine(SimpleNamespace(engine=Engine(), _llm_config="config"))
    assert len(sent) == reports


def test_contract_llm_server_engine_door() -> None:
    servers = Path(__import__("ray").__file__).parent / "llm" / "_internal" / "serve"
    sources = {path.name: path.read_text(encoding="utf-8") for path in servers.rglob("*.py")}
    assert any("async def _pd_handle_request(" in text for text in sources.values())
    assert any("async def _run_request(" in text for text in sources.values())
    assert "class LLMEngine(" in sources["protocol.py"] or any("class LLMEngine(" in text for text in sources.values())


def test_contract_calls_answers_in_time() -> None:
    handle = installed_source("ray/serve/handle.py")
    assert "async def _fetch_replica_results_async(self) -> List[ReplicaResult]" in handle
    assert "async def get_async(" in installed_source("ray/serve/_private/replica_result.py")


def test_contract_replica_process_serve_logs_folder() -> None:
    assert "_global_node" in installed_source("ray/_private/worker.py")
    assert "def get_logs_dir_path(self)" in installed_source("ray/_private/node.py")


def test_contract_start_hosts_hook_variables() -> None:
    from deployments.serve_seam.start_hosts import _HOOK_VARIABLE

    assert f'"{_HOOK_VARIABLE}"' in installed_source("ray/_private/ray_constants.py")
    worker = installed_source("ray/_private/workers/default_worker.py")
    # The hook runs before the process takes work.
    assert worker.index("load_and_execute_setup_hook(") < worker.index("worker.main_loop()")


def test_contract_start_hosts_own_runtime_env() -> None:
    assert "core_worker.get_current_runtime_env()" in installed_source("ray/_private/worker.py")


def test_contract_start_hosts_runtime_env_of() -> None:
    assert "_bound_deployment" in installed_source("ray/serve/deployment.py")


def test_contract_start_hosts_prestart() -> None:
    from ray.core.generated import node_manager_pb2

    fields = node_manager_pb2.PrestartWorkersRequest.DESCRIPTOR.fields_by_name
    assert {"language", "num_workers", "keep_alive_duration_secs", "runtime_env_info"} <= set(fields)
    assert "def init_grpc_channel(" in installed_source("ray/_private/grpc_utils.py")


@pytest.mark.ray
def test_contract_calls_own_call_id() -> None:
    from ray.serve import context

    from deployments.serve_seam.calls import own_call_id

    impl = installed_source("ray/serve/_private/default_impl.py")
    assert "if _request_context._internal_request_id\n        else generate_request_id()" in impl
    router = installed_source("ray/serve/_private/request_router/request_router.py")
    assert "self._pending_requests_by_id.get(request_metadata.internal_request_id)" in router
    token = context._serve_request_context.set(context._RequestContext(request_id="r", _internal_request_id="i"))
    try:
        with own_call_id():
            inside = context._get_serve_request_context()
            assert (inside.request_id, inside._internal_request_id) == ("r", "")
        assert context._get_serve_request_context()._internal_request_id == "i"
    finally:
        context._serve_request_context.reset(token)
