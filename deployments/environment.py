"""The third-party environment variables that Tandem sets for the processes of a cluster it starts (pure)."""

import math
from pathlib import Path

from deployments.controller_hook import IMPORT_PATH
from deployments.http_headers import IMPORT_PATH as HEADERS_IMPORT_PATH

# Serve has no setting for these, and pastes the one before them into HAProxy's configuration as it is. A request of
# which a part was still to come when its head was sent on cannot be sent again, so it is sent on as a whole (what is
# longer than HAProxy's buffer as soon as that is full); and it must have come by then, or one byte a minute would do.
_HAPROXY_LINES = ("    option http-buffer-request", "    timeout http-request 30s")
_LEAST_HARD_STOP_S = 600


def cluster_environment(folder: Path, *, cache: Path, ports: tuple[int, int, int]) -> dict[str, str]:
    """Variables for every Ray process of a local cluster whose files live in ``folder``.

    ``cache`` is a folder that outlives it. ``ports`` are free ones for HAProxy's own statistics and metrics pages (they
    cannot be switched off) and the Python proxy that it falls back to: Serve's defaults are the same for every cluster.

    Read at import by Ray Serve, so they must be there before the processes are; on a cluster of your own put
    ``serve_environment`` into the container's or the service manager's environment (the rendered RayService does).
    """
    return {
        **serve_environment(),
        # vLLM leaves sockets and rendezvous files in the temporary folder; here they go with the cluster.
        "TMPDIR": str(folder),
        # What torch compiles is kept, or every start would compile vLLM's sampler again (11 s of a CPU core).
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "torchinductor"),
        "RAY_ENABLE_AUTO_CONNECT": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
        "RAY_SERVE_HAPROXY_STATS_PORT": str(ports[0]),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(ports[1]),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(ports[2]),
        # What Ray counts of its own event loops, in every process, for nobody here; and each call of an actor that its
        # GCS would keep, up to 100,000 of them: it grew by 1 MiB a minute.
        "RAY_event_stats": "0",
        "RAY_task_events_report_interval_ms": "0",
        # KV between the engines of one machine: UCX would listen on every interface.
        "UCX_NET_DEVICES": "lo",
    }


def hard_stop(request_timeout_s: float = 0.0) -> dict[str, str]:
    """A HAProxy that has been replaced, as whenever an ingress replica comes or goes, ends its streams only after this.

    Not before the longest request (Serve's default: 120 s). Serve keeps the ports of replicas that ended as long.
    """
    return {"RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(max(_LEAST_HARD_STOP_S, math.ceil(request_timeout_s)))}


def serve_environment(request_timeout_s: float = 0.0) -> dict[str, str]:
    """Variables that make Serve's request path short (DECISIONS 5); ``request_timeout_s`` as in ``hard_stop``."""
    return {
        # HAProxy in front of the ingress replicas instead of Serve's Python proxy.
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        # HAProxy overlooks that a client has left whose body has one to two of its buffers (16 KiB by default, and
        # that is 3,000 token ids): the request would run to its end.
        "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(1 << 20),
        # Who sends nothing of a request, or reads nothing of its answer, for so long is cut off (Serve's default: an
        # hour, and there are 4,096 connections). Waiting for an answer, at its start or within it, is neither.
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": "60",
        # A request whose ingress replica ended before a word of its answer goes to another one, and is computed again.
        # Serve's own is conn-failure alone, and a 500 where the request had been sent.
        "RAY_SERVE_HAPROXY_RETRY_ON": "\n".join(["conn-failure empty-response", *_HAPROXY_LINES]),
        **hard_stop(request_timeout_s),
        # gRPC between deployments, routing and user code on one event loop: a request changes threads less often.
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        # A proxy that has died is missed after three looks, which Serve makes every ten seconds.
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "2",
        # Of that gRPC: Ray's 4 MiB is less than a prompt of a million token ids.
        "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(64 << 20),
        # Ray lowers its workers' priority (nice 15), so anything else on the machine would stall token streams.
        "RAY_worker_niceness": "0",
        # Serve's own counters go to Ray's metrics ten times a second: an idle replica took 0.019 of a core, now 0.016.
        "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "5000",
        # A replica sends the autoscaler all that it recorded within look_back_period_s, of which the last point is
        # read: it records twice per report.
        "RAY_SERVE_AUTOSCALING_METRIC_RECORD_INTERVAL_FACTOR": "0.4",
        # Serve's controller looks at everything four times a second, not ten: with twelve replicas at rest that takes
        # 0.03 of a core less.
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",
        # A replica whose process stands still cannot end in peace; Serve would wait for that as long as a drain takes.
        "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
        # Which replica stops is the joint policy's choice, and proxies start with their routes.
        "RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH": IMPORT_PATH,
        # A header that is no UTF-8 was a 500 of Serve's, and some headers are switches of its.
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": HEADERS_IMPORT_PATH,
    }
