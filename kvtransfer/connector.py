"""The KV connector of each role: Tandem's settings as vLLM's ``kv_transfer_config``."""

from typing import Any, Literal

from pydantic import Field

from kvtransfer.strict_config import StrictConfig
from kvtransfer.topology import Role

# The role changes what vLLM does: the consumer defers freeing freshly loaded blocks while a step runs, and the
# producer recomputes a preempted prompt instead of handing off freed blocks (vllm/v1/core/sched/scheduler.py:160).
_VLLM_ROLE = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer"}

# Share of a lease that a pull may take. When heartbeats (six per lease) stop, at least half of the lease remains.
_PULL_LEASE_FRAC = 0.4
# Longest time that prefill keeps unread KV, in leases: one lease and a heartbeat's extension by two thirds, rounded up.
MAX_KV_KEEP_LEASES = 2.0


class ConnectorConfig(StrictConfig):
    """How KV blocks travel from prefill to decode; one instance serves both roles."""

    connector: Literal["NixlConnector"] = "NixlConnector"
    """vLLM's connector: the one that pulls over NIXL. The variant that pushes gets no port and host under Ray 2.60."""
    backends: tuple[str, ...] = Field(("UCX",), min_length=1, description="NIXL transports, in order of preference.")
    num_threads: int = Field(2, ge=1, le=64)
    """UCX progress threads per engine. On few cores, vLLM's default of 4 only adds contention."""
    lease_s: int = Field(60, ge=6, le=3600)
    """Time, seconds, for which prefill keeps finished KV that is not pulled yet. vLLM derives the heartbeat (lease //
    6) and the extension (2/3 lease) from it. Choose at least the longest queueing time on decode."""
    pull_timeout_s: float = Field(15.0, gt=0.0, le=3600.0)
    """Time, seconds, after which decode stops waiting for KV that it pulls: the link is silent. Choose more than the
    longest prompt takes over a full link. Cut to 0.4 x lease_s."""
    load_failure_policy: Literal["recompute", "fail"] = "recompute"
    """What decode does when a transfer fails: compute the prompt itself, or end the request with an error (vLLM's own
    default). recompute is right for dense full-attention models only (vllm issue 52234)."""

    @property
    def safe_pull_timeout_s(self) -> float:
        """Longest time of a pull, seconds: a silent link carries no heartbeats, so the lease must outlast the pull."""
        return min(self.pull_timeout_s, _PULL_LEASE_FRAC * self.lease_s)

    def kv_transfer_config(self, role: Role) -> dict[str, Any]:
        """vLLM's ``kv_transfer_config`` for an engine of this role."""
        on_decode = {"kv_load_failure_policy": self.load_failure_policy} if role is Role.DECODE else {}
        return {
            "kv_connector": self.connector,
            "kv_role": _VLLM_ROLE[role],
            "kv_connector_extra_config": {
                "backends": list(self.backends),
                "num_threads": self.num_threads,
                "kv_lease_duration": self.lease_s,
            },
            **on_decode,
        }


def prefill_request_params() -> dict[str, Any]:
    """``kv_transfer_params`` that tell a prefill engine to keep a prompt's KV for a remote decode."""
    return {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
