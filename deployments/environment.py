"""The third-party environment variables that Tandem sets for the processes of a cluster it starts (pure)."""

from pathlib import Path


def cluster_environment(folder: Path) -> dict[str, str]:
    """Variables for every Ray process of a local cluster whose files live in ``folder``.

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
    }


def serve_environment() -> dict[str, str]:
    """Variables that make Serve's request path short; measured in reports of ``make bench-peers``."""
    return {
        # HAProxy in front of the ingress replicas instead of Serve's Python proxy.
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        # gRPC between deployments, routing and user code on one event loop: a request changes threads less often.
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        # Ray lowers its workers' priority (nice 15), so anything else on the machine would stall token streams.
        "RAY_worker_niceness": "0",
    }
