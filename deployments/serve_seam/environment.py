"""Environment variables of Ray, Serve, vLLM and UCX that Tandem sets for the processes of a cluster (pure)."""

import math
from pathlib import Path

from deployments.serve_seam.controller_hook import IMPORT_PATH
from deployments.serve_seam.http_headers import IMPORT_PATH as HEADERS_IMPORT_PATH

# Lines of HAProxy's configuration for which Serve has no setting. They follow the value of ``retry-on``, which Serve
# writes into the configuration unchanged. HAProxy can retry only a request that it has whole. So it waits for the whole
# request (or a full buffer) before it sends it to a replica, at most 30 s: a client could send one byte a minute.
_HAPROXY_LINES = ("    option http-buffer-request", "    timeout http-request 30s")
_MIN_HARD_STOP_S = 600  # shortest life of a replaced HAProxy, seconds; shorter ones cut streams off (DECISIONS 131)


def cluster_environment(folder: Path, *, cache: Path, ports: tuple[int, int, int]) -> dict[str, str]:
    """Variables for every Ray process of a local cluster.

    Ray Serve reads them at import, so they must be set before its processes start. ``folder``: for files of this
    cluster. ``cache``: a folder that outlives the cluster. ``ports``: free ports for HAProxy's statistics page, its
    metrics page and Serve's fallback proxy; none can be switched off, and their defaults are equal for every cluster.

    Needs: Serve's HAProxy (its files, ports and metrics have these variables), and Ray's ``RAY_event_stats`` and
    ``RAY_task_events_report_interval_ms``.
    Without it: two clusters of one machine disturb each other's HAProxy, and Ray's GCS grows by 1 MiB a minute.
    """
    return {
        **serve_environment(),
        # vLLM leaves sockets and rendezvous files in the temporary folder; here they are removed with the cluster.
        "TMPDIR": str(folder),
        # Keeps what torch compiles; otherwise every start compiles vLLM's sampler again (11 s of a CPU core).
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "torchinductor"),
        # Off: torch compiles its headers into TMPDIR, 10 s of a core, even if all kernels are in the cache.
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
        # Off: Ray would join or start a cluster at a process's first call of its API.
        "RAY_ENABLE_AUTO_CONNECT": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        # Off: Serve's gauges of HAProxy. HAProxy's own metrics page listens nevertheless.
        "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
        "RAY_SERVE_HAPROXY_STATS_PORT": str(ports[0]),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(ports[1]),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(ports[2]),
        # Off: Ray's statistics of the event loop of every process; Tandem does not read them.
        "RAY_event_stats": "0",
        # Off: records of actor calls in Ray's GCS, up to 100,000; the GCS grew by 1 MiB a minute.
        "RAY_task_events_report_interval_ms": "0",
        # KV moves between engines of one machine; otherwise UCX listens on every interface.
        "UCX_NET_DEVICES": "lo",
    }


def hard_stop(request_timeout_s: float = 0.0) -> dict[str, str]:
    """How long a replaced HAProxy goes on serving its streams: the time of the longest request, at least 600 s.

    Serve's default is 120 s. Serve replaces HAProxy whenever an ingress replica starts or ends. It also reserves the
    port of an ended replica for this time.
    """
    return {"RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(max(_MIN_HARD_STOP_S, math.ceil(request_timeout_s)))}


def serve_environment(request_timeout_s: float = 0.0) -> dict[str, str]:
    """Variables that make Serve's request path short (DECISIONS 5), for every Ray process of any cluster.

    On your own cluster, set them in the environment of the container or of the service manager, as the rendered
    RayService does. ``request_timeout_s``: timeout of the longest request.

    Needs: these variables of Ray Serve; ``RAY_SERVE_HAPROXY_RETRY_ON``, which Serve writes into HAProxy's configuration
    unchanged, newlines included.
    Without it: requests pass Serve's Python proxy, are not retried after a lost ingress replica, and slow clients are
    not cut off.
    """
    return {
        # HAProxy in front of the ingress replicas instead of Serve's Python proxy.
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        # HAProxy does not notice that a client has disconnected if the body fills one to two of its buffers, so such a
        # request would run to its end. The default of 16 KiB is 3,000 token ids.
        "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(1 << 20),
        # A client that stops sending its request, or reading its answer, is cut off after this time. Serve's default is
        # an hour, with 4,096 connections. A client that waits for its answer is not cut off.
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": "60",
        # A request whose ingress replica ended without an answer is computed again on another one. Serve's default
        # retries only failed connections, and answers 500 for the rest.
        "RAY_SERVE_HAPROXY_RETRY_ON": "\n".join(["conn-failure empty-response", *_HAPROXY_LINES]),
        **hard_stop(request_timeout_s),
        # gRPC, routing and user code share one event loop, so a request changes threads less often.
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        # Serve replaces a dead proxy after three failed checks; its default is a check every ten seconds.
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "2",
        # Largest gRPC message; the default of 4 MiB is less than a prompt of a million token ids.
        "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(64 << 20),
        # Ray lowers its workers' priority (nice 15); then any other work on the machine stalls token streams.
        "RAY_worker_niceness": "0",
        # Serve exports its counters ten times a second by default: an idle replica took 0.019 of a core, now 0.016.
        "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "5000",
        # A replica reports all points that it recorded within look_back_period_s, and the policy reads only the last
        # one: two points in each report are enough.
        "RAY_SERVE_AUTOSCALING_METRIC_RECORD_INTERVAL_FACTOR": "0.4",
        # Serve's controller runs four loops a second, not ten: 0.03 of a core less with twelve idle replicas.
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",
        # A replica whose process hangs cannot drain; Serve would wait for the whole time of a drain.
        "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
        # Lets the joint policy choose which replica stops, and proxies start with their routes.
        "RAY_SERVE_CONTROLLER_CALLBACK_IMPORT_PATH": IMPORT_PATH,
        # Serve answers 500 for a header that is not UTF-8, and obeys headers that clients must not set.
        "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": HEADERS_IMPORT_PATH,
    }
