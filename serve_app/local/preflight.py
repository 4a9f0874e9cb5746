"""Checks this machine before a local start; each problem is one line for the user.

An engine on CPU is one without an ``accelerator_type``. Only such engines take the machine's memory for weights and KV.
"""

import ctypes.util
import errno
import json
import math
import os
import shutil
import socket
import stat
from pathlib import Path

import psutil

from deployments.config import ServiceConfig
from deployments.endpoint.api_keys import ApiKeys
from deployments.machine.claims import FIRST_PORT, is_free, listener
from deployments.pool_config import RoleConfig
from serve_app.checks.yaml_checks import ConfigError, config_errors
from serve_app.config import AppConfig
from serve_app.local.cluster import CLUSTER_PARENT, NODE_IP

# Memory of an engine without weights and KV, measured with the tiny model.
_ENGINE_BYTES = int(2.6e9)
# Memory of a Serve replica beside its engine, measured with the tiny model.
_REPLICA_BYTES = int(0.8e9)
# Share of the machine's memory that vLLM's CPU engine takes if no size of its KV is configured
# (vllm/config/cache.py:111, vllm/v1/worker/cpu_worker.py:74).
_DEFAULT_SHARE_FRAC = 0.92
# Free disk that a cluster's folder needs: logs, sockets and Ray's object store.
_MIN_DISK_BYTES = 2 << 30


def check_machine(config: AppConfig, *, host: str, port: int) -> None:
    """Check model folders, key file, libnuma, port, disk and memory. Raises ConfigError: one of them does not fit."""
    for service in config.services:
        if service.model.folder is not None:
            _check_model(service.model.folder)
    if config.ingress.api_keys_file is not None:
        with config_errors("ingress."):
            ApiKeys(config.ingress.api_keys_file)
    roles = [(service, pool) for service in config.services for pool in service.role_configs().values()]
    on_cpu = [(service, pool) for service, pool in roles if pool.gpus_per_replica == 0]
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
    # NIXL's side channels: each engine takes the next free port.
    for side_channel in range(FIRST_PORT, FIRST_PORT + sum(pool.replicas for _, pool in roles)):
        # For its warning about a port in use: engines warn too, but in the replicas' logs, which end with the cluster.
        is_free(NODE_IP, side_channel)


def _check_model(folder: Path) -> None:
    try:
        is_folder = stat.S_ISDIR(folder.stat().st_mode)
    except FileNotFoundError:
        raise ConfigError(f"model.source: there is no folder {folder}: give an existing one") from None
    except OSError as error:
        raise ConfigError(f"model.source: {folder} cannot be read ({error.strerror}): give another folder") from None
    if not is_folder:
        raise ConfigError(f"model.source: {folder} is a file: give the folder that it is in")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model.source: {folder} has no config.json: give a model folder")
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
    """What to do if an address cannot be bound."""
    if error.errno == errno.EADDRNOTAVAIL:
        return "use an http_options.host of this machine, such as 127.0.0.1"
    holder = listener(host, port)
    if holder is None:
        return "choose another http_options.port"
    return f"{holder} listens on it: end it, or choose another http_options.port"


def _pool_bytes(pool: RoleConfig, service: ServiceConfig, machine_bytes: int) -> int:
    """Memory that all replicas of a pool on CPU take, bytes, at the pool's highest count.

    ``machine_bytes``: memory of this machine. Raises ConfigError: ``kv_cache_memory_bytes`` is no whole number.
    """
    count, folder = pool.max_replicas or pool.replicas, service.model.folder
    if pool.emulator is not None:
        return count * _REPLICA_BYTES
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors")) if folder else 0
    kwargs = service.engine_kwargs_of(pool)
    kv = kwargs.get("kv_cache_memory_bytes")
    if kv is None:
        kv_gib = {**os.environ, **pool.env}.get("VLLM_CPU_KVCACHE_SPACE", "")  # vLLM's older setting
        kv = int(kv_gib) << 30 if kv_gib.isdecimal() else None
    if kv is not None and not isinstance(kv, int):  # YAML reads 1e9 as text
        raise ConfigError(f"engine_kwargs: kv_cache_memory_bytes is {kv!r}: write a whole number of bytes")
    if kv is not None:
        return count * (weights + kv + _ENGINE_BYTES + _REPLICA_BYTES)
    # Without a size of KV, an engine takes a share of the machine's memory, in which its weights are included.
    share_frac = kwargs.get("gpu_memory_utilization")
    taken = machine_bytes * (share_frac if isinstance(share_frac, (int, float)) else _DEFAULT_SHARE_FRAC)
    return count * (int(taken) + _REPLICA_BYTES)


def replica_cpus(config: AppConfig) -> int:
    """Logical CPUs of a node with room for the highest number of replicas, and for replicas that an update adds."""
    total = (config.ingress.replicas + 1) * config.ingress.cpus_per_replica  # one more for an update
    for pool in (pool for service in config.services for pool in service.role_configs().values()):
        replicas = pool.max_replicas or pool.replicas
        replicas += math.ceil(replicas * pool.max_surge_frac)
        total += replicas * (pool.placement.cpus_per_replica + pool.workers * pool.placement.cpus_per_worker)
    return math.ceil(total) + 1  # one more for Serve's own actors


def _gb(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
