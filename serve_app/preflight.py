"""What must be true of this machine before a local start; each problem is one line for the user."""

import ctypes.util
import errno
import json
import os
import shutil
import socket
from pathlib import Path

import psutil

from deployments.api_keys import ApiKeys
from deployments.config import RoleConfig
from deployments.ports import FIRST_PORT, is_free, listener
from serve_app.cluster import CLUSTER_PARENT, NODE_IP
from serve_app.config import AppConfig, ServiceConfig
from serve_app.validate import ConfigError

# Measured with the tiny model: an engine 2.6 GB without weights and KV, the Serve replica before it 0.8 GB.
_ENGINE_BYTES = int(2.6e9)
_REPLICA_BYTES = int(0.8e9)
# Of the machine's memory, what vLLM's CPU engine takes for itself and its KV where no size is given
# (vllm/config/cache.py:111, vllm/v1/worker/cpu_worker.py:74).
_DEFAULT_SHARE_FRAC = 0.92
_MIN_DISK_BYTES = 2 << 30


def check_machine(config: AppConfig, *, host: str, port: int) -> None:
    """Raise one line about the first thing that is missing.

    Raises:
        ConfigError: libnuma, model folder, key file, port, disk or memory.
    """
    for service in config.services:
        _check_model(service.model.folder)
    if config.ingress.api_keys_file is not None:
        try:
            ApiKeys(config.ingress.api_keys_file)
        except ValueError as error:
            raise ConfigError(f"ingress.{error}") from None
    on_cpu = [
        (service, pool)
        for service in config.services
        for pool in service.roles().values()
        if pool.gpus_per_replica == 0
    ]
    if on_cpu and ctypes.util.find_library("numa") is None:
        raise ConfigError("libnuma is missing, and vLLM's CPU build needs it: install the package libnuma1")
    _check_port(host, port)
    free = shutil.disk_usage(CLUSTER_PARENT).free
    if free < _MIN_DISK_BYTES:
        raise ConfigError(f"{CLUSTER_PARENT} has {_gb(free)} free, a start needs {_gb(_MIN_DISK_BYTES)}: free some")
    memory = psutil.virtual_memory()
    need = sum(_pool_bytes(pool, service, memory.total) for service, pool in on_cpu)
    if need > memory.available:
        engines = sum(pool.max_replicas or pool.replicas for _, pool in on_cpu)
        raise ConfigError(
            f"{engines} engines need about {_gb(need)} of memory (weights + KV + 3.4 GB each) and "
            f"{_gb(memory.available)} is available: use fewer replicas or a smaller kv_cache_memory_bytes, without "
            f"which each engine takes {_DEFAULT_SHARE_FRAC:.0%} of the machine"
        )
    engines = sum(pool.replicas for group in config.groups for pool in group.pools().values())
    for side_channel in range(FIRST_PORT, FIRST_PORT + engines):
        is_free(NODE_IP, side_channel)  # says it here, since the replicas' own logs end with their cluster


def _check_model(folder: Path | None) -> None:
    if folder is None:
        return
    try:
        folder.stat()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise ConfigError(f"model.source: {folder} cannot be read ({error.strerror}): give another folder") from None
    if folder.is_file():
        raise ConfigError(f"model.source: {folder} is a file: give the folder that it is in")
    if not folder.is_dir():
        raise ConfigError(
            f"model.source: there is no folder {folder}: give an existing one, or run `make model` for the tiny one"
        )
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model.source: {folder} has no config.json, so it is no model folder")
    for path in folder.glob("*.json"):
        try:
            json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.source: {path} is not readable JSON ({error}): get the file again") from None


def _check_port(host: str, port: int) -> None:
    if not 1 <= port <= 65535:
        raise ConfigError(f"http_options.port: {port} is not a port: choose one from 1 to 65535")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except socket.gaierror as error:
            raise ConfigError(
                f"http_options.host: {host!r} stands for no IPv4 address ({error.strerror}): use 127.0.0.1"
            ) from None
        except OSError as error:
            raise ConfigError(f"{host}:{port} cannot be used: {error.strerror}; {_remedy(error, host, port)}") from None


def _remedy(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRNOTAVAIL:
        return "use an http_options.host of this machine, such as 127.0.0.1"
    holder = listener(host, port)
    if holder is None:
        return "choose another http_options.port"
    return f"{holder} listens on it: end it, or choose another http_options.port"


def _pool_bytes(pool: RoleConfig, service: ServiceConfig, machine_bytes: int) -> int:
    count, folder = pool.max_replicas or pool.replicas, service.model.folder
    if pool.emulator is not None:
        return count * _REPLICA_BYTES
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors")) if folder else 0
    kwargs = {**service.engine_kwargs, **pool.engine_kwargs}
    kv = kwargs.get("kv_cache_memory_bytes")
    if kv is None and (gib := {**os.environ, **pool.env}.get("VLLM_CPU_KVCACHE_SPACE", "")).isdecimal():
        kv = int(gib) << 30  # vLLM's older way to say it
    if kv is not None and not isinstance(kv, int):  # YAML reads 1e9 as text
        raise ConfigError(f"engine_kwargs: kv_cache_memory_bytes is {kv!r}: write a whole number of bytes")
    if kv is not None:
        return count * (weights + kv + _ENGINE_BYTES + _REPLICA_BYTES)
    share = kwargs.get("gpu_memory_utilization")
    taken = machine_bytes * (share if isinstance(share, (int, float)) else _DEFAULT_SHARE_FRAC)
    return count * (int(taken) + _REPLICA_BYTES)


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
