"""Kinds of processes of a local cluster, by the titles that Ray, vLLM and HAProxy give them."""

from collections import Counter
from collections.abc import Sequence
from itertools import takewhile

import psutil

Processes = Sequence[psutil.Process]

OTHER = "other"
ENGINE = "VLLM::EngineCore"
# A part of a process's title and its kind; the first part that fits counts.
_KINDS = (
    (":ingress", "ingress"),
    (":decode:", "decode replica"),
    (":prefill:", "prefill replica"),
    (ENGINE, "engine"),
    ("HAProxyManager", "serve proxy"),
    ("ProxyActor", "serve proxy"),
    ("haproxy", "haproxy"),
    ("ServeController", "serve controller"),
    ("Coordinator", "coordinator"),
    ("HealthBoard", "health board"),
    ("PrefixBoard", "prefix board"),
    ("gcs_server ", "ray gcs"),
    ("raylet/raylet ", "raylet"),
)
# Kinds that are no replicas and that a cluster always needs.
SINGLE_KINDS = ("haproxy", "serve controller", "serve proxy", "coordinator", "health board")


def title(process: psutil.Process) -> str:
    """The whole command line; empty for one that has ended."""
    try:
        return " ".join(process.cmdline()) or process.name()
    except psutil.Error:
        return ""


def kind(process: psutil.Process) -> str:
    """The kind of a process by its title now; Ray's workers get their title after their start."""
    text = title(process)
    return next((name for word, name in _KINDS if word.lower() in text.lower()), OTHER)


def raylet_socket(process: psutil.Process) -> str:
    """The name of a raylet's socket, which ``ray.nodes()`` has as ``RayletSocketName``; empty for other processes."""
    words = title(process).split() if kind(process) == "raylet" else []
    return next((word.partition("=")[2] for word in words if word.startswith("--raylet_socket_name=")), "")


def count_kinds(processes: Processes) -> Counter[str]:
    """Number of processes of each kind."""
    return Counter(kind(process) for process in processes)


def count_running(processes: Processes) -> Counter[str]:
    """Numbers of engines and of replicas; stopped processes do not count."""
    counts = Counter[str]()
    for process in processes:
        name = title(process)
        part = "engines" if ENGINE in name else "replicas" if "ServeReplica" in name else None
        if part is not None and not _is_stopped(process):
            counts[part] += 1
    return counts


def _is_stopped(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return True


def replica_pids(processes: Processes) -> set[int]:
    """Pids of all running replicas."""
    return {one.pid for one in processes if "ServeReplica" in title(one)}


def server_pids(processes: Processes) -> set[int]:
    """Pids of every process that requests need: replicas, engines, proxies and the cluster itself."""
    return {one.pid for one in processes if kind(one) != OTHER}


def replaced_pids(processes: Processes) -> set[int]:
    """Pids of replaced HAProxies: Serve reloads HAProxy by a new process with ``-sf`` and the pids of the old ones."""
    words = [title(one).partition(" -sf ")[2].split() for one in processes if kind(one) == "haproxy"]
    return {int(word) for line in words for word in takewhile(str.isdecimal, line)}


def cpu_s(process: psutil.Process) -> float:
    """CPU seconds of a process so far; 0 after its end."""
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def listening(process: psutil.Process) -> int:
    """Number of TCP ports that a process listens on."""
    try:
        return sum(one.status == psutil.CONN_LISTEN for one in process.net_connections("tcp"))
    except psutil.Error:
        return 0


def is_start_host(process: psutil.Process) -> bool:
    """Whether a process waits with everything imported: it has the memory of the imports, and uses no core."""
    return "ray::IDLE" in title(process) and process.memory_info().rss > 0.5e9 and process.cpu_percent(0.5) < 10.0
