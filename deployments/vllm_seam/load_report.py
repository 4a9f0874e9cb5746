"""The load of this process's engine as a header of its answer, in the ORCA format that load balancers read."""

from collections.abc import Iterable

from vllm.entrypoints.serve.utils.orca_metrics import metrics_header

from deployments.wire.messages import LOAD_FORMAT

_FORMATS = ("json", "text")


def load_headers(http_headers: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """The header that a client asks for with ``endpoint-load-metrics-format``; empty: it asks for none.

    ``http_headers``: the client's headers. A format that vLLM does not know is ignored here, since vLLM logs a warning
    for each such request.

    Needs: ``vllm.entrypoints.serve.utils.orca_metrics.metrics_header``, and vLLM's own metrics in this process.
    Without it: no decode replica starts; the error names the function.
    """
    wanted = next((value for name, value in http_headers if name == LOAD_FORMAT), "")
    if wanted.lower() not in _FORMATS:
        return ()
    return tuple((metrics_header(wanted) or {}).items())
