"""One request on its way through a virtual cluster (pure)."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from autoscale.engines.engine_step import ModelRequest
from autoscale.observe.request_stats import RequestTimer
from autoscale.report import RequestRecord
from autoscale.sim.replica import VirtualReplica
from autoscale.traces.trace import TraceRequest
from kvtransfer.topology import Role
from router.pool_router import PoolRouter
from router.prompt_keys import PromptKeys


@dataclass(slots=True, eq=False)
class Journey:
    """One request, from its arrival to its last token.

    Attributes:
        number: its place among all arrivals, from 0.
        block_hashes: hashes of the prompt's full blocks.
        prompt: these as keys for routers; ``None``: routers do not route by them.
        to_decode: the endpoint's router that has it.
        expected_tokens: cached tokens that the router to the replica of each role expected there.
        decode: its decode replica, once it has one.
        timer: counts its tokens and their times for the decode replica's report.
        local_tokens: prompt tokens that the decode replica computes by itself.
        prefilled_s: end of the computation on a prefill replica; ``None``: there was none.
        first_s: time of the first token.
        kv_source: the prefill replica that keeps the prompt's KV until decode has pulled it.
        engine_requests: the request as the engine of each role knows it; prefill's is removed when its KV is released.
        is_lost: whether the decode replica has died.
    """

    number: int
    request: TraceRequest
    block_hashes: Sequence[int]
    prompt: PromptKeys | None = None
    to_decode: PoolRouter = field(init=False)
    expected_tokens: dict[Role, int] = field(default_factory=dict)
    decode: VirtualReplica = field(init=False)
    timer: RequestTimer = field(init=False)
    local_tokens: int = 0
    prefilled_s: float | None = None
    first_s: float | None = None
    kv_source: VirtualReplica | None = None
    engine_requests: dict[Role, ModelRequest] = field(default_factory=dict)
    is_lost: bool = False

    @property
    def name(self) -> str:
        """Its id in routers and engines, as text."""
        return str(self.number)

    def model_request(self, role: Role, kv_ready_s: float | None = None) -> ModelRequest:
        """The request for an engine of one role; ``kv_ready_s``: arrival of its KV from another engine, seconds."""
        is_prefill = role is Role.PREFILL
        self.engine_requests[role] = ModelRequest(
            request_id=self.name,
            input_tokens=self.request.input_tokens,
            output_tokens=1 if is_prefill else self.request.output_tokens,
            block_hashes=self.block_hashes,
            kv_ready_s=kv_ready_s,
            keeps_kv=is_prefill,
        )
        return self.engine_requests[role]

    def release_kv(self, prefill: VirtualReplica) -> None:
        """Free the prompt's KV on the replica that computed it."""
        prefill.engine.release(self.engine_requests.pop(Role.PREFILL))

    def record(self, *, last_s: float | None = None, error: str | None = None) -> RequestRecord:
        """Its timeline; it ended at ``last_s``, or failed with ``error``."""
        return RequestRecord(
            sent_s=self.request.at_s,
            first_token_s=self.first_s,
            last_token_s=last_s,
            input_tokens=self.request.input_tokens,
            output_tokens=self.request.output_tokens,
            error=error,
            prefilled_s=self.prefilled_s,
        )
