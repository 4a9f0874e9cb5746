"""The KV connector of each role: Tandem's settings as vLLM's ``kv_transfer_config``."""

from typing import Any, Literal

from pydantic import Field

from kvtransfer.strict_config import StrictConfig
from kvtransfer.topology import Role

# vLLM's name of each role. vLLM's behaviour depends on it. The consumer does not free freshly loaded blocks while a
# step runs. The producer recomputes a preempted prompt instead of handing off freed blocks
# (vllm/v1/core/sched/scheduler.py:160).
_VLLM_ROLE = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer"}

# Share of a lease that a pull may take. A *lease* is the time for which prefill keeps KV. Decode sends six heartbeats
# per lease, and each extends it to 2/3 of a lease from then on. When heartbeats stop, at least half of a lease remains
# (2/3 - 1/6), and this share is below that.
_PULL_LEASE_FRAC = 0.4
# Longest time for which prefill keeps KV that decode does not pull, in leases: one lease, and the extension by a last
# heartbeat (2/3 of a lease), rounded up.
MAX_KV_KEEP_LEASES = 2.0


class ConnectorConfig(StrictConfig):
    """How KV blocks travel from prefill to decode; both roles have the same settings."""

    connector: Literal["NixlConnector"] = "NixlConnector"
    """vLLM's connector, with which decode pulls KV over NIXL. The variant that pushes gets no port and host under Ray
    2.60."""
    backends: tuple[str, ...] = Field(("UCX",), min_length=1, description="NIXL transports, in order of preference.")
    num_threads: int = Field(2, ge=1, le=64)
    """UCX progress threads per engine. vLLM's default of 4 is too many on few cores."""
    lease_s: int = Field(60, ge=6, le=3600)
    """Time, seconds, for which prefill keeps finished KV that is not pulled yet. vLLM derives the heartbeat (lease //
    6) and the extension (2/3 lease) from it. Choose at least the longest queueing time on decode."""
    pull_timeout_s: float = Field(15.0, gt=0.0, le=3600.0)
    """Time, seconds, after which decode stops waiting for KV that it pulls, since the link seems broken. Choose more
    than the KV of the longest prompt takes over a busy link. More than 0.4 x lease_s counts as 0.4 x lease_s."""
    load_failure_policy: Literal["recompute", "fail"] = "recompute"
    """What decode does when a transfer fails. recompute: it computes the prompt itself, which is right for dense models
    with full attention only (vllm issue 52234). fail: the request ends with an error, as is vLLM's default."""

    @property
    def safe_pull_timeout_s(self) -> float:
        """Longest time of a pull, seconds. The lease must last longer: a broken link carries no heartbeats."""
        return min(self.pull_timeout_s, _PULL_LEASE_FRAC * self.lease_s)

    def kv_transfer_config(self, role: Role) -> dict[str, Any]:
        """vLLM's ``kv_transfer_config`` for an engine of this role."""
        decode_only = {"kv_load_failure_policy": self.load_failure_policy} if role is Role.DECODE else {}
        return {
            "kv_connector": self.connector,
            "kv_role": _VLLM_ROLE[role],
            "kv_connector_extra_config": {
                "backends": list(self.backends),
                "num_threads": self.num_threads,
                "kv_lease_duration": self.lease_s,
            },
            **decode_only,
        }


def prefill_request_params() -> dict[str, Any]:
    """``kv_transfer_params`` with which a prefill engine keeps a prompt's KV for a decode engine."""
    return {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
