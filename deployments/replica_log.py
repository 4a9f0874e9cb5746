"""Gives a replica its log file back, which vLLM takes away from it (private parts of Ray Serve 2.60).

Serve sets its logger up before it imports a deployment's class. vLLM, imported with the class, calls
``logging.config.dictConfig``, which closes every handler of the process: Serve's then has no target. From then on the
replica logs nothing, and it cannot say where its log is, for which a restarted Serve controller takes it for broken and
replaces it: every engine of the application at once.
"""

import logging
import logging.handlers
from pathlib import Path

import ray
from ray import serve
from ray.serve._private.common import ServeComponentType
from ray.serve._private.constants import SERVE_LOGGER_NAME
from ray.serve._private.logging_utils import JSONFormatter, ServeFormatter, get_component_file_name, get_serve_logs_dir
from ray.serve.schema import EncodingType, LoggingConfig


def restore_replica_log() -> None:
    """Open the log file of this replica again, if it was closed."""
    for handler in logging.getLogger(SERVE_LOGGER_NAME).handlers:
        if isinstance(handler, logging.handlers.MemoryHandler) and handler.target is None:
            handler.setTarget(_file_handler())


def _file_handler() -> logging.Handler:
    context = serve.get_replica_context()
    given = context._deployment_config.logging_config or {}
    config = given if isinstance(given, LoggingConfig) else LoggingConfig(**given)
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
