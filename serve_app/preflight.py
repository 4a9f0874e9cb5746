"""What must be true of this machine before a local start; each problem is one line for the user."""

import ctypes.util
import shutil
import socket
import tempfile
from pathlib import Path

import psutil

from deployments.config import RoleConfig
from serve_app.config import AppConfig
from serve_app.validate import ConfigError

_ENGINE_BYTES = int(2.6e9)
_REPLICA_BYTES = int(0.8e9)
_DEFAULT_KV_BYTES = 4 << 30
_MIN_DISK_BYTES = 2 << 30


def check_machine(config: AppConfig, *, host: str, port: int) -> None:
    """Raise one line about the first thing that is missing.

    Raises:
        ConfigError: libnuma, model folder, port, disk or memory.
    """
    folder = config.model.folder
    _check_model(folder)
    on_cpu = [pool for group in config.groups for pool in group.pools().values() if pool.gpus_per_replica == 0]
    if on_cpu and ctypes.util.find_library("numa") is None:
        raise ConfigError("libnuma is missing, and vLLM's CPU build needs it: install the package libnuma1")
    _check_port(host, port)
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if free < _MIN_DISK_BYTES:
        raise ConfigError(
            f"{tempfile.gettempdir()} has {_gb(free)} free, a start needs {_gb(_MIN_DISK_BYTES)}: free some"
        )
    need = sum(_pool_bytes(pool, config, folder) for pool in on_cpu)
    available = psutil.virtual_memory().available
    if need > available:
        engines = sum(pool.replicas for pool in on_cpu)
        raise ConfigError(
            f"{engines} engines need about {_gb(need)} of memory (weights + KV + 3.4 GB each) and {_gb(available)} is "
            "available: use fewer replicas or a smaller kv_cache_memory_bytes"
        )


def _check_model(folder: Path | None) -> None:
    if folder is None:
        return
    if not folder.is_dir():
        raise ConfigError(
            f"model.source: there is no folder {folder}: give an existing one, or run `make model` for the tiny one"
        )
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model.source: {folder} has no config.json, so it is no model folder")


def _check_port(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"{host}:{port} cannot be used: {error.strerror}{_holder(port)}") from None


def _holder(port: int) -> str:
    for connection in psutil.net_connections("tcp"):
        if (
            connection.laddr
            and connection.laddr.port == port
            and connection.status == psutil.CONN_LISTEN
            and connection.pid
        ):
            try:
                name = " ".join(psutil.Process(connection.pid).cmdline())[:80]
            except psutil.Error:
                name = "?"
            return f"; process {connection.pid} ({name}) listens on it: end it, or choose another http_options.port"
    return "; choose another http_options.port"


def _pool_bytes(pool: RoleConfig, config: AppConfig, folder: Path | None) -> int:
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors")) if folder else 0
    kv = pool.engine_kwargs.get("kv_cache_memory_bytes", config.engine_kwargs.get("kv_cache_memory_bytes"))
    return pool.replicas * (weights + int(kv or _DEFAULT_KV_BYTES) + _ENGINE_BYTES + _REPLICA_BYTES)


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
