"""The process of a replica in Serve: its log, the folder of its node's logs, and the address of its port."""

import logging
import logging.handlers
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.schema import EncodingType, LoggingConfig

_SERVE_LOGGER = "ray.serve"  # the name of Serve's logger
_EVERY_INTERFACE = "[::]:0"  # the address that Serve binds: every interface, any port


def serve_logs_folder() -> Path:
    """The folder of Serve's logs.

    Needs: ``ray._private.worker._global_node.get_logs_dir_path``.
    Without it: the coordinator does not start, since the decision log would have no folder.
    """
    return Path(ray._private.worker._global_node.get_logs_dir_path()) / "serve"


def restore_replica_log() -> None:
    """Open the log file of this replica again if vLLM has closed it.

    At its import vLLM closes every log handler of the process, also Serve's. Such a replica logs nothing and cannot
    report its log's path, so a restarted Serve controller counts it as broken and replaces it.

    Needs: a ``logging.handlers.MemoryHandler`` on the logger ``ray.serve``; ``ray.serve._private.logging_utils``
    (``get_component_file_name``, ``get_serve_logs_dir``, ``JSONFormatter``, ``ServeFormatter``);
    ``ray.serve._private.common.ServeComponentType``; ``_deployment_config`` of the replica's context; ``max_bytes`` and
    ``backup_count`` of ``ray._private.worker._global_node``.
    Without it: the replica refuses to start, with a RuntimeError.
    """
    for handler in logging.getLogger(_SERVE_LOGGER).handlers:
        if isinstance(handler, logging.handlers.MemoryHandler) and handler.target is None:
            try:
                handler.setTarget(_file_handler())
            except (ImportError, AttributeError) as error:
                raise RuntimeError(
                    f"the log of this replica cannot be opened again with Ray {ray.__version__} ({error}), and a "
                    "restarted Serve controller would replace the replica: install ray[serve]==2.60.0"
                ) from error


def _file_handler() -> logging.Handler:
    """A handler for this replica's log file, with Serve's own file name, limits and format."""
    from ray.serve._private.common import ServeComponentType
    from ray.serve._private.logging_utils import (
        JSONFormatter,
        ServeFormatter,
        get_component_file_name,
        get_serve_logs_dir,
    )

    context = serve.get_replica_context()
    settings = context._deployment_config.logging_config or {}
    config = settings if isinstance(settings, LoggingConfig) else LoggingConfig(**settings)
    name, replica_id = f"{context.app_name}_{context.deployment}", context.replica_id.unique_id
    file_name = get_component_file_name(
        component_name=name, component_id=replica_id, component_type=ServeComponentType.REPLICA, suffix=".log"
    )
    node = ray._private.worker._global_node
    handler = logging.handlers.RotatingFileHandler(
        Path(config.logs_dir or get_serve_logs_dir()) / file_name,
        maxBytes=node.max_bytes,
        backupCount=node.backup_count,
    )
    is_json = config.encoding == EncodingType.JSON
    handler.setFormatter(JSONFormatter() if is_json else ServeFormatter(name, replica_id))
    return handler


def listen_on_node_address() -> None:
    """Bind Serve's gRPC port to the node's address; called in a replica's constructor, before Serve binds the port.

    Serve would bind every interface. It unpickles what it receives, so any client could run code in the replica.

    Needs: ``ray.serve._private.replica.add_port_to_grpc_server``, called with ``[::]:0``.
    Without it: the replica refuses to start, with a RuntimeError.
    """
    from ray.serve._private import replica

    add_port = getattr(replica, "add_port_to_grpc_server", None)
    if add_port is None:
        raise _unknown_serve("replica.add_port_to_grpc_server is gone")
    if add_port.__module__ == __name__:
        return  # already replaced in this process
    host = ray.util.get_node_ip_address()
    address = f"[{host}]:0" if ":" in host else f"{host}:0"

    def add_on_node(server: Any, serve_address: str) -> int:
        if serve_address != _EVERY_INTERFACE:
            raise _unknown_serve(f"it asks for {serve_address!r} and not for {_EVERY_INTERFACE!r}")
        return int(add_port(server, address))

    replica.add_port_to_grpc_server = add_on_node


def _unknown_serve(change: str) -> RuntimeError:
    return RuntimeError(
        f"this Ray Serve ({ray.__version__}) binds the gRPC port of a replica in a way that Tandem does not know "
        f"({change}), so the port could be open on every interface: install ray[serve]==2.60.0"
    )
