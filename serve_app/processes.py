"""What the processes of a local cluster are, by the titles that Ray, vLLM and HAProxy give them."""

from collections import Counter
from collections.abc import Sequence
from itertools import takewhile

import psutil

Processes = Sequence[psutil.Process]

OTHER = "other"
ENGINE = "VLLM::EngineCore"
# Of a process's title -> what it is; the first that fits.
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
    ("gcs_server ", "ray gcs"),
    ("raylet/raylet ", "raylet"),
)
# Those of which no replica is one, and of which nothing may be missing for long.
SINGLE_KINDS = ("haproxy", "serve controller", "serve proxy", "coordinator", "health board")


def title(process: psutil.Process) -> str:
    """The whole command line; empty for one that has ended."""
    try:
        return " ".join(process.cmdline()) or process.name()
    except psutil.Error:
        return ""


def kind(process: psutil.Process) -> str:
    """What a process is now: Ray starts workers that take their title later."""
    text = title(process)
    return next((name for word, name in _KINDS if word.lower() in text.lower()), OTHER)


def count_kinds(processes: Processes) -> Counter[str]:
    """How many processes of each kind there are."""
    return Counter(kind(process) for process in processes)


def count_running(processes: Processes) -> Counter[str]:
    """How many engines and how many replicas there are, without those whose process is stopped."""
    found = Counter[str]()
    for process in processes:
        name = title(process)
        part = "engines" if ENGINE in name else "replicas" if "ServeReplica" in name else None
        if part is not None and not _is_stopped(process):
            found[part] += 1
    return found


def _is_stopped(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return True


def replica_pids(processes: Processes) -> set[int]:
    """The processes of all replicas that run."""
    return {one.pid for one in processes if "ServeReplica" in title(one)}


def server_pids(processes: Processes) -> set[int]:
    """Every process that requests need: of replicas, engines, proxies and of the cluster itself."""
    return {one.pid for one in processes if kind(one) != OTHER}


def replaced_pids(processes: Processes) -> set[int]:
    """HAProxies that others took over from: Serve reloads it by a new process that is told which ones those are."""
    words = [title(one).partition(" -sf ")[2].split() for one in processes if kind(one) == "haproxy"]
    return {int(word) for told in words for word in takewhile(str.isdecimal, told)}


def cpu_s(process: psutil.Process) -> float:
    """CPU seconds of one process so far; 0 of one that has ended."""
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def listening(process: psutil.Process) -> int:
    """On how many TCP ports a process listens."""
    try:
        return sum(one.status == psutil.CONN_LISTEN for one in process.net_connections("tcp"))
    except psutil.Error:
        return 0
