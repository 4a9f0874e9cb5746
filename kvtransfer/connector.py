"""The KV connector of each role: Tandem's settings -> vLLM's ``kv_transfer_config``."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvtransfer.topology import Role

# A wrong role is not a label only: the consumer defers freeing freshly loaded blocks while a step runs, the
# producer recomputes a preempted prompt instead of handing off freed blocks (vllm/v1/core/sched/scheduler.py:160).
_VLLM_ROLE = {Role.PREFILL: "kv_producer", Role.DECODE: "kv_consumer"}


# Half of a lease is left at least when heartbeats, six to a lease, no longer extend it by two thirds.
_PULL_LEASE_FRAC = 0.4


# The lease ends what nobody pulls; an extension by a heartbeat adds two thirds of it.
LEASES = 2.0


class ConnectorConfig(BaseModel):
    """How KV blocks travel from prefill to decode; one instance serves both roles."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    connector: Literal["NixlConnector"] = Field(
        "NixlConnector",
        description="vLLM's pull connector over NIXL; the push variant gets no port and host under Ray 2.60.",
    )
    backends: tuple[str, ...] = Field(("UCX",), min_length=1, description="NIXL transports, in order.")
    num_threads: int = Field(
        2, ge=1, le=64, description="UCX progress threads per engine; vLLM's default of 4 only contends on few cores."
    )
    lease_s: int = Field(
        60,
        ge=6,
        le=3600,
        description="How long prefill keeps finished, unread KV. vLLM derives the heartbeat (lease // 6) and the "
        "extension (2/3 lease) from it; choose at least the longest queueing time on decode.",
    )
    pull_timeout_s: float = Field(
        15.0,
        gt=0.0,
        le=3600.0,
        description="KV that decode has not pulled so long after it began is not waited for: the link has fallen "
        "silent. Choose more than the longest prompt takes over a full link; two fifths of lease_s at most count.",
    )
    load_failure_policy: Literal["recompute", "fail"] = Field(
        "recompute",
        description="What decode does when a transfer fails: prefill the prompt itself, or end the request with an "
        "error (vLLM's own default). Recompute is right for dense full-attention models only (vllm issue 52234).",
    )

    @property
    def safe_pull_timeout_s(self) -> float:
        """How long a pull may take: a silent link carries no heartbeats, and half of a lease is left when it breaks."""
        return min(self.pull_timeout_s, _PULL_LEASE_FRAC * self.lease_s)

    def kv_transfer_config(self, role: Role) -> dict[str, Any]:
        """vLLM's ``kv_transfer_config`` for an engine of this role."""
        config: dict[str, Any] = {
            "kv_connector": self.connector,
            "kv_role": _VLLM_ROLE[role],
            "kv_connector_extra_config": {
                "backends": list(self.backends),
                "num_threads": self.num_threads,
                "kv_lease_duration": self.lease_s,
            },
        }
        if role is Role.DECODE:
            config["kv_load_failure_policy"] = self.load_failure_policy
        return config


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
