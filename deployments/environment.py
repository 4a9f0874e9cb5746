"""The third-party environment variables that Tandem sets for the processes of a cluster it starts (pure)."""

from pathlib import Path


def cluster_environment(folder: Path, *, haproxy_ports: tuple[int, int]) -> dict[str, str]:
    """Variables for every Ray process of a local cluster whose files live in ``folder``.

    ``haproxy_ports`` are those of HAProxy's own statistics and metrics pages, which cannot be switched off.

    Read at import by Ray Serve, so they must be there before the processes are; on a cluster of your own put
    ``serve_environment`` into the container's or the service manager's environment (the rendered RayService does).
    """
    return {
        **serve_environment(),
        # vLLM leaves sockets and rendezvous files in the temporary folder; here they go with the cluster.
        "TMPDIR": str(folder),
        "RAY_ENABLE_AUTO_CONNECT": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
        "RAY_SERVE_HAPROXY_STATS_PORT": str(haproxy_ports[0]),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(haproxy_ports[1]),
    }


def serve_environment() -> dict[str, str]:
    """Variables that make Serve's request path short (DECISIONS 5)."""
    return {
        # HAProxy in front of the ingress replicas instead of Serve's Python proxy.
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        # gRPC between deployments, routing and user code on one event loop: a request changes threads less often.
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        # Of that gRPC: Ray's 4 MiB is less than a prompt of a million token ids.
        "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(64 << 20),
        # Ray lowers its workers' priority (nice 15), so anything else on the machine would stall token streams.
        "RAY_worker_niceness": "0",
    }
