"""Faults of ``make drill``: each breaks a process of a local cluster, the youngest of its kind."""

import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain, product

import psutil

from tests.lab.drill.links import Connection, connections, cut, silence
from tests.lab.stand.processes import ENGINE, Processes, cpu_s, raylet_socket, title
from tests.lab.stand.spot import give_notice

# Labels of the nodes of a drill's cluster: the part that runs there (endpoint or engines), and the number of the node.
PART_LABEL, NODE_LABEL = "tandem.io/part", "tandem.io/drill-node"
# Prefill stands still this long before a lease begins to run out, in seconds.
GATHER_S = 2.0
# Prefill stands still this long before it is killed, in seconds.
_GATHER_PROMPTS_S = 1.0
# An engine computes if it takes this share of a core.
_BUSY_FRAC = 0.1
# CPU time of engines is compared over this time, in seconds.
_GLANCE_S = 0.2
# No replica has work if no engine has computed within this time, in seconds.
_WORK_S = 8.0
# A killed process keeps its connections until its last thread has left the kernel: 20 to 120 ms, and 9 s once.
_GONE_S = 60.0
# Time from a notice until the node is taken away, in seconds; short, so that it ends during the load.
_NOTICE_S = 8.0
# Parts of the titles of all processes of an application.
_ALL = ("ServeController", "Coordinator", "HealthBoard", "ServeReplica", ENGINE)
# Time between two looks at a process that ends, in seconds.
_LOOK_S = 0.01


class DrillError(RuntimeError):
    """The fault cannot be injected; the message says why."""


def kill_prefill(processes: Processes) -> str:
    """End a prefill replica."""
    replica = _at_work(processes, "prefill")
    return _kill_with_prompts(replica, _engines_below(replica))


def kill_decode(processes: Processes) -> str:
    """End a decode replica."""
    return _kill(_at_work(processes, "decode"))


def kill_engine_worker(processes: Processes) -> str:
    """End the engine of a prefill replica; the replica lives on."""
    engine = _engine_of(_at_work(processes, "prefill"))
    return _kill_with_prompts(engine, [engine])


def kill_decode_engine(processes: Processes) -> str:
    """End the engine of a decode replica; the replica lives on."""
    return _kill(_engine_of(_at_work(processes, "decode")))


def hang_prefill_engine(processes: Processes) -> str:
    """Stop the engine of a prefill replica without ending it."""
    return _signal(_engine_of(_at_work(processes, "prefill")), signal.SIGSTOP)


def hang_engine(processes: Processes) -> str:
    """Stop the engine of a decode replica without ending it."""
    return _signal(_engine_of(_at_work(processes, "decode")), signal.SIGSTOP)


def hang_decode(processes: Processes) -> str:
    """Stop the front of a decode replica for good; its engine goes on."""
    return _signal(_at_work(processes, "decode"), signal.SIGSTOP)


def hang_prefill(processes: Processes) -> str:
    """Stop the front of a prefill replica for good; its engine goes on."""
    return _signal(_at_work(processes, "prefill"), signal.SIGSTOP)


def kill_controller(processes: Processes) -> str:
    """End Serve's controller."""
    return _kill(_one(processes, "Serve controller", "ServeController"))


def kill_coordinator(processes: Processes) -> str:
    """End the coordinator of the autoscaler."""
    return _kill(_one(processes, "coordinator (an application has one where args.autoscale is given)", "Coordinator"))


def kill_ingress(processes: Processes) -> str:
    """End a replica of the endpoint."""
    return _end(_one(processes, "ingress replica", "ServeReplica", ":ingress"))


def kill_proxy(processes: Processes) -> str:
    """End the HTTP proxy, HAProxy, which Serve starts again."""
    proxies = [process for process in processes if title(process).split(" ")[0].endswith("haproxy")]
    if not proxies:
        raise DrillError("no HAProxy runs here: set serve_environment()'s variables for the cluster")
    for proxy in proxies:
        with suppress(DrillError):  # one that was replaced may be ending already
            _kill(proxy)
    for proxy in proxies:
        _wait_until_gone(proxy)
    return f"SIGKILL to haproxy ({', '.join(str(proxy.pid) for proxy in proxies)})"


def node_loss(processes: Processes) -> str:
    """End every process of a node that decodes."""
    _, below = _node_that_decodes(processes)
    return _end_node(below)


def spot_notice(processes: Processes) -> str:
    """Tell Ray that a node that decodes will be taken away, and end every process of it at that time."""
    import ray

    raylet, below = _node_that_decodes(processes)
    node = next(node for node in ray.nodes() if node["RayletSocketName"] == raylet_socket(raylet))
    give_notice(node["NodeID"], _NOTICE_S)
    time.sleep(_NOTICE_S)
    return f"{_end_node(below)}, {_NOTICE_S:g} s after the notice"


def _node_that_decodes(processes: Processes) -> tuple[psutil.Process, list[psutil.Process]]:
    """The raylet of a node beside the head's with a decode replica that has work, and all processes of the node."""
    raylets = [one for one in processes if "raylet" in title(one).split(" ")[0] and NODE_LABEL in title(one)]
    replica = _at_work(processes, "decode")
    for raylet in raylets:
        below = [raylet, *raylet.children(recursive=True)]
        if replica in below:
            return raylet, below
    raise DrillError("the decode replica that has work is not on a node beside the head's")


def _end_node(below: Sequence[psutil.Process]) -> str:
    for one in below:
        with suppress(DrillError):  # it may have ended with its parent
            _kill(one)
    return f"a node of {len(below)} processes"


def kill_everything(processes: Processes) -> str:
    """End Serve's controller, the coordinator, the health board and every replica at once."""
    lost = [one for one in processes if any(name in title(one) for name in _ALL)]
    if not lost:
        raise DrillError("there is no process of an application to end")
    for one in lost:
        with suppress(DrillError):  # it may have ended with its parent
            _kill(one)
    for one in lost:
        _wait_until_gone(one)
    return f"SIGKILL to {len(lost)} processes"


def expire_lease(processes: Processes, *, seconds: float = 60.0) -> str:
    """Stop the front of a decode replica for longer than prefill keeps KV; its engine goes on.

    Prefill engines stand still until then, so that they certainly have prompts of that replica.
    """
    replica = _youngest(_replicas(processes, "decode"))
    with _standing_still(_engines(processes, "prefill")):
        time.sleep(GATHER_S)
        stopped = _signal(replica, signal.SIGSTOP)
    time.sleep(seconds)
    return f"{stopped}, {_signal(replica, signal.SIGCONT)} after {seconds:g} s"


def break_nixl(processes: Processes) -> str:
    """Cut the connections over which decode engines pull KV from prefill engines; the engines live on."""
    return _on_links(processes, "cut", cut)


def silence_nixl(processes: Processes) -> str:
    """Drop every packet on the connections over which decode engines pull KV, without closing them."""
    return _on_links(processes, "silenced", silence)


FAULTS: dict[str, Callable[..., str]] = {
    "kill-prefill": kill_prefill,
    "kill-decode": kill_decode,
    "kill-engine-worker": kill_engine_worker,
    "kill-decode-engine": kill_decode_engine,
    "hang-engine": hang_engine,
    "hang-prefill-engine": hang_prefill_engine,
    "hang-decode": hang_decode,
    "hang-prefill": hang_prefill,
    "break-nixl": break_nixl,
    "silence-nixl": silence_nixl,
    "expire-lease": expire_lease,
    "kill-controller": kill_controller,
    "kill-coordinator": kill_coordinator,
    "kill-ingress": kill_ingress,
    "kill-proxy": kill_proxy,
    "node-loss": node_loss,
    "spot-notice": spot_notice,
    "kill-everything": kill_everything,
}
# Faults that take a decode replica with all of its streams.
DECODE_FAULTS = ("kill-decode", "kill-decode-engine", "hang-engine", "hang-decode", "node-loss")
# Faults after which everything that a person has set must hold. No process is left that could go on with an answer.
SETTINGS_FAULTS = ("kill-everything",)
# Faults that take a prefill replica with all of its prompts.
PREFILL_FAULTS = ("kill-prefill", "kill-engine-worker", "hang-prefill-engine", "hang-prefill")
# Faults after which decode can pull no KV from prefill until both have made new links.
LINK_FAULTS = ("break-nixl", "silence-nixl")
# Faults after which streams end as transport errors, since their ingress replica or proxy has died.
FRONT_FAULTS = ("kill-ingress", "kill-proxy", *SETTINGS_FAULTS)


def _one(processes: Processes, what: str, *words: str) -> psutil.Process:
    matching = [process for process in processes if all(word in title(process) for word in words)]
    if not matching:
        raise DrillError(f"there is no {what} to end: no process here is called {' '.join(words)}")
    return _youngest(matching)


def _youngest(processes: Iterable[psutil.Process]) -> psutil.Process:
    # During a long soak the oldest of each kind then lives through all faults, and shows whether its memory grows.
    return max(processes, key=lambda process: (process.create_time(), process.pid))


def _is_replica(process: psutil.Process, role: str) -> bool:
    """Ours are called ``decode:GROUP``, those of Ray Serve LLM ``Decode:MODEL``."""
    name = title(process)
    return "ServeReplica" in name and f":{role}:" in name.lower()


def _replicas(processes: Processes, role: str) -> list[psutil.Process]:
    replicas = [process for process in processes if _is_replica(process, role)]
    if not replicas:
        raise DrillError(f"no process here is a {role} replica")
    return replicas


def _engines(processes: Processes, role: str) -> list[psutil.Process]:
    engines = [engine for replica in _replicas(processes, role) for engine in _engines_below(replica)]
    if not engines:
        raise DrillError(f"no {role} replica has an engine of its own here: this fault needs real engines")
    return engines


def _engine_of(replica: psutil.Process) -> psutil.Process:
    engines = _engines_below(replica)
    if not engines:
        raise DrillError(f"process {replica.pid} has no engine of its own: this fault needs real engines")
    return _youngest(engines)


def _engines_below(replica: psutil.Process) -> list[psutil.Process]:
    try:
        return [child for child in replica.children(recursive=True) if ENGINE in title(child)]
    except psutil.Error:
        return []


def _at_work(processes: Processes, role: str) -> psutil.Process:
    """The youngest replica of a role whose engine computes: breaking an idle one would show nothing.

    It is the youngest of all replicas if no engine computes for a while, or if engines are emulated (no processes).
    """
    replicas = _replicas(processes, role)
    engines = {replica: _engines_below(replica) for replica in replicas}
    until_s = time.monotonic() + _WORK_S
    while any(engines.values()) and time.monotonic() < until_s:
        before_s = {replica: sum(map(cpu_s, below)) for replica, below in engines.items()}
        time.sleep(_GLANCE_S)
        busy = [
            replica
            for replica, below in engines.items()
            if sum(map(cpu_s, below)) - before_s[replica] >= _BUSY_FRAC * _GLANCE_S
        ]
        if busy:
            return _youngest(busy)
    return _youngest(replicas)


def _on_links(processes: Processes, done: str, harm: Callable[[Connection], None]) -> str:
    # All pairs: a single pair may carry no more KV during the drill.
    pairs = product(_engines(processes, "decode"), _engines(processes, "prefill"))
    try:
        linked = [links for decode, prefill in pairs if (links := connections(decode, prefill))]
        for link in chain.from_iterable(linked):
            harm(link)
    except (OSError, psutil.Error) as error:
        raise DrillError(f"a NIXL connection cannot be {done}: {error}") from None
    if not linked:
        raise DrillError("no decode engine is connected to a prefill engine by TCP: does UCX use another transport?")
    return f"{done}: {sum(map(len, linked))} connections of {len(linked)} pairs of engines"


def _kill_with_prompts(process: psutil.Process, engines: Sequence[psutil.Process]) -> str:
    """Kill a process while its engines stand still, so that it certainly has prompts."""
    with _standing_still(engines):
        time.sleep(_GATHER_PROMPTS_S if engines else 0.0)
        return _kill(process)


@contextmanager
def _standing_still(engines: Sequence[psutil.Process]) -> Iterator[None]:
    """Suspend engines, and resume them at the end: one whose replica is gone can only end while it runs."""
    try:
        for engine in engines:
            engine.suspend()
        yield
    except psutil.NoSuchProcess as error:
        raise DrillError(f"process {error.pid} ended before the fault: run the drill again") from None
    finally:
        for engine in engines:
            with suppress(psutil.Error):
                engine.resume()


def _end(process: psutil.Process) -> str:
    """Kill a process and wait until its connections are closed."""
    killed = _kill(process)
    _wait_until_gone(process)
    return killed


def _wait_until_gone(process: psutil.Process) -> None:
    until_s = time.monotonic() + _GONE_S
    while not _is_gone(process):
        if time.monotonic() > until_s:
            raise DrillError(f"process {process.pid} has not ended {_GONE_S:g} s after SIGKILL")
        time.sleep(_LOOK_S)


def _is_gone(process: psutil.Process) -> bool:
    try:
        # Its first thread is a zombie while others still end.
        return not process.is_running() or (process.status() == psutil.STATUS_ZOMBIE and process.num_threads() <= 1)
    except psutil.Error:
        return True


def _kill(process: psutil.Process) -> str:
    return _signal(process, signal.SIGKILL)


def _signal(process: psutil.Process, number: signal.Signals) -> str:
    name = title(process).split(" ")[0]
    try:
        os.kill(process.pid, number)
    except ProcessLookupError:
        raise DrillError(f"process {process.pid} ended before {number.name}: run the drill again") from None
    return f"{number.name} to {name} ({process.pid})"
