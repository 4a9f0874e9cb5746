"""An application on real engines: on which addresses it listens, and that its logs contain no text of a request."""

from ipaddress import ip_address
from typing import Any

import psutil
import pytest

from tests.engines.endpoint import keeps_to_itself

pytestmark = [pytest.mark.ray, pytest.mark.vllm]

# Ports of Ray's workers: each worker has one, on which it demands the cluster's token.
RAYS_PORTS = range(10002, 20000)
OURS = ("ray::ServeReplica", "VLLM::")
ACTORS = ("ray::Coordinator", "ray::HealthBoard")


def listening(app: Any, kind: str = "tcp") -> list[tuple[str, str, int]]:
    """Title of the process, address and port of each socket of a kind that takes connections or packets."""
    found = []
    for process in app.processes():
        try:
            title, connections = process.cmdline(), process.net_connections(kind)
        except psutil.Error:
            continue
        found += [
            (title[0], one.laddr.ip, one.laddr.port)
            for one in connections
            if title and (one.status == psutil.CONN_LISTEN if kind == "tcp" else not one.raddr)
        ]
    return found


def _is_loopback(ip: str) -> bool:
    return ip_address(ip.removeprefix("::ffff:")).is_loopback  # so an IPv6 socket gives an IPv4 address


def test_replicas_and_engines_listen_on_no_interface_but_loopback(app: Any) -> None:
    sockets = listening(app)
    for kind in OURS:
        assert [port for title, _, port in sockets if title.startswith(kind)], f"no socket of {kind} was found"
    exposed = [one for one in sockets if not _is_loopback(one[1])]
    datagrams = [one for one in listening(app, "udp") if not _is_loopback(one[1])]
    ours = [one for one in (*exposed, *datagrams) if one[0].startswith((*OURS, *ACTORS))]
    assert not [one for one in ours if one[2] not in RAYS_PORTS]
    # HAProxy's two pages about itself; the endpoint is a third socket.
    assert len([one for one in exposed if "haproxy" in one[0]]) <= 2
    ports = {int(url.split(":")[2].split("/")[0]) for url in (app.url, app.metrics_url)}
    assert {ip for _, ip, port in sockets if port in ports} == {"127.0.0.1"}


def test_no_log_contains_text_of_a_request(app: Any) -> None:
    keeps_to_itself(app, "tiny")
