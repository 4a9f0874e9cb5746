"""One request on its way through a virtual cluster (pure)."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from autoscale.engines.engine_step import ModelRequest
from autoscale.observe.request_stats import RequestTimer
from autoscale.report import RequestRecord
from autoscale.sim.replica import VirtualReplica
from autoscale.traces.trace import TraceRequest
from kvtransfer.topology import Role


@dataclass(slots=True, eq=False)
class Journey:
    """One request, from its arrival to its last token.

    Attributes:
        number: its place among all arrivals.
        block_hashes: of the prompt's full blocks.
        decode: its decode replica, once it has one; ``timer``: what it waits there.
        local_tokens: prompt tokens that the decode replica computes by itself.
        prefilled_s: when a prefill replica had computed the prompt.
        first_s: when the first token came.
        kv_source: the prefill replica that keeps the prompt's KV until decode has pulled it.
        inside: the request in the engines of both roles; in prefill's until its KV is released.
        is_lost: whether the decode replica has died.
    """

    number: int
    request: TraceRequest
    block_hashes: Sequence[int]
    decode: VirtualReplica = field(init=False)
    timer: RequestTimer = field(init=False)
    local_tokens: int = 0
    prefilled_s: float | None = None
    first_s: float | None = None
    kv_source: VirtualReplica | None = None
    inside: dict[Role, ModelRequest] = field(default_factory=dict)
    is_lost: bool = False

    @property
    def name(self) -> str:
        """Its id in routers and engines."""
        return str(self.number)

    def model_request(self, role: Role, kv_ready_s: float | None = None) -> ModelRequest:
        """The request as an engine of one role sees it; ``kv_ready_s``: when its KV is there from another engine."""
        is_prefill = role is Role.PREFILL
        self.inside[role] = ModelRequest(
            request_id=self.name,
            input_tokens=self.request.input_tokens,
            output_tokens=1 if is_prefill else self.request.output_tokens,
            block_hashes=self.block_hashes,
            kv_ready_s=kv_ready_s,
            keeps_kv=is_prefill,
        )
        return self.inside[role]

    def release_kv(self, prefill: VirtualReplica) -> None:
        """Free the prompt's KV on the replica that computed it."""
        prefill.engine.release(self.inside.pop(Role.PREFILL))

    def record(self, *, last_s: float | None = None, error: str | None = None) -> RequestRecord:
        """Its timeline: ended at ``last_s``, or failed with ``error``."""
        return RequestRecord(
            sent_s=self.request.at_s,
            first_token_s=self.first_s,
            last_token_s=last_s,
            input_tokens=self.request.input_tokens,
            output_tokens=self.request.output_tokens,
            error=error,
            prefilled_s=self.prefilled_s,
        )
