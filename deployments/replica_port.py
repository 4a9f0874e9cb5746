"""Serve's gRPC between replicas listens on the node's own address only.

Serve binds it to every interface, and it unpickles what it is sent: whoever reaches it can run code in the replica.
Callers use the node's address, which in a cluster that Tandem starts on one machine is of the loopback interface.
"""

import logging
from typing import Any

import ray

logger = logging.getLogger("ray.serve")


def listen_on_node_address() -> None:
    """Before the replica is ready, which is when Serve binds the port."""
    try:
        from ray._common.network_utils import build_address
        from ray.serve._private import replica

        add_port, address = replica.add_port_to_grpc_server, build_address(ray.util.get_node_ip_address(), 0)

        def add_here(server: Any, asked: str) -> int:
            return int(add_port(server, address if asked == "[::]:0" else asked))

        replica.add_port_to_grpc_server = add_here
    except Exception:  # another Serve: it then listens where that does
        logger.exception("the gRPC port of this replica stays on every interface")
