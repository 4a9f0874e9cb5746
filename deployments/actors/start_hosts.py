"""Keeps the number of start hosts on each node that could run a pool of the application."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import ray

from deployments.serve_seam.host_notes import BEAT_S, Host, environment_key, host_key, keeper_key, waiting_hosts
from deployments.serve_seam.start_hosts import prestart
from kvtransfer.selectors import matches
from kvtransfer.strict_config import StrictConfig
from router import ray_kv

logger = logging.getLogger(__name__)

# Time for which a node's number of hosts must be too low before new ones start, seconds: the replica that has taken
# a host needs the node's cores first.
_SETTLE_S = 30.0
_MOST_WAIT_S = 960.0  # longest time between two requests for hosts that do not come, seconds
_LOST_S = 4 * BEAT_S  # a host without a new note for this time has died, seconds
_KEEP_S = 24 * 3600  # time for which Ray keeps an idle host, seconds; the host itself ends earlier if no app needs it


class HostPool(StrictConfig):
    """What a pool's replicas need of a start host and of its node."""

    kind: str
    resources: dict[str, float]  # of one worker
    node_labels: dict[str, str]
    runtime_env: str  # of its replicas, as Ray writes it


class StartHosts(StrictConfig):
    """The start hosts of an application."""

    per_node: int
    pools: tuple[HostPool, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Short:
    """The hosts of a kind on a node: how many wait, since when, and how long to wait before more are started."""

    count: int
    since_s: float
    wait_s: float = _SETTLE_S


class HostCount:
    """The hosts that wait, and since when a node has had too few (pure)."""

    def __init__(self, per_node: int) -> None:
        self._per_node = per_node
        self._notes: dict[Host, tuple[bytes, float]] = {}  # latest note of a host, and when it was new
        self._short: dict[tuple[str, str], _Short] = {}  # by kind and node

    def lost(self, notes: Mapping[Host, bytes], now_s: float) -> list[Host]:
        """Take in the latest notes. Returns the hosts that have died: their note has not changed for long."""
        known = self._notes
        self._notes = {
            host: known[host] if host in known and known[host][0] == note else (note, now_s)
            for host, note in notes.items()
        }
        return [host for host, (_, since_s) in self._notes.items() if now_s - since_s > _LOST_S]

    def missing(self, wanted: Sequence[tuple[str, str]], now_s: float) -> dict[tuple[str, str], int]:
        """How many hosts to start now, by kind and node; ``wanted``: all kinds and nodes that should have hosts."""
        alive = Counter(host[:2] for host, (_, since_s) in self._notes.items() if now_s - since_s <= _LOST_S)
        missing = {}
        for place in wanted:
            short = self._short.get(place)
            if short is None:
                short = _Short(count=alive[place], since_s=now_s - _SETTLE_S)
            elif short.count != alive[place]:
                short = _Short(count=alive[place], since_s=now_s)
            if alive[place] < self._per_node and now_s - short.since_s >= short.wait_s:
                missing[place] = self._per_node - alive[place]
                # Twice the wait: hosts whose environment takes long to make would pile up.
                short = _Short(count=alive[place], since_s=now_s, wait_s=min(2.0 * short.wait_s, _MOST_WAIT_S))
            self._short[place] = short
        return missing


async def keep_start_hosts(app: str, hosts: StartHosts) -> None:
    """Start hosts where they are missing, for ever.

    An error is logged once for each cause, and the next round tries again.
    """
    counts, beat, logged = HostCount(hosts.per_node), 0, ""
    while True:
        try:
            await asyncio.to_thread(_round, app, hosts.pools, counts, beat)
            logged = ""
        except Exception as error:  # of gRPC, Ray or a node; without this loop no host is ever replaced
            if logged != (logged := f"{type(error).__name__}: {error}"):
                logger.warning("start hosts are not kept: %s", logged)
        beat += 1
        await asyncio.sleep(BEAT_S)


def _round(app: str, pools: Sequence[HostPool], counts: HostCount, beat: int) -> None:
    for host_kind in {pool.kind for pool in pools}:
        ray_kv.put(keeper_key(host_kind), str(beat).encode())
    now_s = time.monotonic()
    for host in counts.lost(waiting_hosts(), now_s):
        logger.warning("the start host %s on node %s has died", host[2], host[1])
        ray_kv.delete(host_key(host))
    nodes = {node["NodeID"]: node for node in ray.nodes() if node.get("Alive")}
    wanted = {(pool.kind, name): pool for pool in pools for name, node in nodes.items() if fits(pool, node)}
    errors = []
    for place, number in counts.missing(list(wanted), now_s).items():
        logger.info("%d start hosts start on node %s", number, place[1])
        # The environment of a replica, as Ray has made it, is surer than the one that the build has computed.
        observed = ray_kv.get(environment_key(app, place[0]))
        environment = wanted[place].runtime_env if observed is None else observed.decode()
        try:
            prestart(nodes[place[1]], environment, number, _KEEP_S)
        except grpc.RpcError as error:  # the other nodes get theirs
            errors.append(error)
    if errors:
        raise errors[0]


def fits(pool: HostPool, node: Mapping[str, Any]) -> bool:
    """Whether a node, as ``ray.nodes()`` describes it, could run an engine's worker of this pool."""
    has_room = all(node["Resources"].get(name, 0.0) >= amount for name, amount in pool.resources.items())
    labels = node.get("Labels") or {}
    return has_room and all(matches(labels.get(name), selector) for name, selector in pool.node_labels.items())
