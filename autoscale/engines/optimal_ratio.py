"""The P/D ratio at which both roles are busy, from their engines' profiles (DOPD section IV-B, Eq. 11-14; pure)."""

from dataclasses import dataclass

from pydantic import Field, model_validator

from autoscale.engines.capacity import Limit, decode_limit, handoff_engines
from autoscale.engines.lengths import Lengths, MeanRequest
from autoscale.engines.profile import EngineProfile
from kvtransfer.strict_config import StrictConfig


class DecodeMemoryConfig(StrictConfig):
    """Limits of the KV of one decode replica: GPU memory, and the speed at which its GPUs read it."""

    gpu_bytes: float = Field(gt=0.0, description="Memory of one GPU (M_gpu).")
    other_bytes: float = Field(ge=0.0)
    """Memory of one GPU for all but weights and KV, such as activations (M'); a tenth by default in vLLM."""
    model_bytes: float = Field(gt=0.0, description="Weights of the model (M_model).")
    gpus: int = Field(1, ge=1, description="GPUs that share the weights (TP).")
    bytes_per_s: float = Field(gt=0.0, description="Memory bandwidth of one GPU by its data sheet (BW).")
    read_frac: float = Field(gt=0.0, le=1.0)
    """Share of the bandwidth that decode steps reach (alpha): 0.25 to 0.5 in DOPD's Table I."""

    @model_validator(mode="after")
    def _check_room(self) -> "DecodeMemoryConfig":
        if self.room_bytes <= 0.0:
            raise ValueError(
                f"{self.gpus} GPUs with {self.gpu_bytes - self.other_bytes:.3g} bytes each leave no room for KV beside "
                f"{self.model_bytes:.3g} bytes of weights: raise gpus"
            )
        return self

    @property
    def room_bytes(self) -> float:
        """KV that fits, bytes: ``V_mem = (M_gpu - M') TP - M_model`` (Eq. 11)."""
        return (self.gpu_bytes - self.other_bytes) * self.gpus - self.model_bytes

    def readable_bytes(self, tpot_s: float) -> float:
        """KV that a step can read within the objective, bytes: ``V_BW = t_d_SLO alpha TP BW - M_model`` (Eq. 12).

        The printed equation lacks the last term, although the text says that a step reads weights and KV.

        Raises:
            ValueError: the objective is too short to read the weights.
        """
        weights_s = self.model_bytes / (self.read_frac * self.gpus * self.bytes_per_s)
        if tpot_s <= weights_s:
            raise ValueError(
                f"tpot_s is {tpot_s:g}, but reading the weights alone takes {weights_s:.3g} s: raise tpot_s or gpus"
            )
        return (tpot_s - weights_s) * self.read_frac * self.gpus * self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimalRatio:
    """The ratio at which prefill just keeps every decode replica at its highest concurrency.

    Attributes:
        request: the mean request for which it is.
        decode_concurrency: requests in the batch of one decode replica (cc_d).
        decode_step_s: time of one step at that concurrency, seconds (t_d).
        prefill_requests_per_s: requests per second of one prefill replica.
        decode_requests_per_s: requests per second of one decode replica at its limit.
        decode_limit: what limits a decode replica. A prefill replica is limited by its compute.
        is_extrapolated: whether a value lies outside a profile's points.
    """

    request: MeanRequest
    decode_concurrency: int
    decode_step_s: float
    prefill_requests_per_s: float
    decode_requests_per_s: float
    decode_limit: Limit
    is_extrapolated: bool

    @property
    def prefill_per_decode(self) -> float:
        """Prefill replicas per decode replica (n_p / n_d), not rounded, without headroom."""
        return self.decode_requests_per_s / self.prefill_requests_per_s


def optimal_ratio(
    prefill_profile: EngineProfile,
    decode_profile: EngineProfile,
    lengths: Lengths,
    *,
    tpot_s: float,
    memory: DecodeMemoryConfig | None = None,
) -> OptimalRatio:
    """The optimal ratio of two profiles for a distribution of lengths; see ``ratio_for``.

    Raises:
        ValueError: prefill takes no time, or a step cannot read the weights in time.
    """
    request = MeanRequest.of(lengths, prefill_profile)
    return ratio_for(request, decode_profile, tpot_s=tpot_s, memory=memory)


def ratio_for(
    request: MeanRequest,
    decode_profile: EngineProfile,
    *,
    tpot_s: float,
    memory: DecodeMemoryConfig | None = None,
) -> OptimalRatio:
    """``n_p / n_d = cc_d E[T_p] / (t_d OSL)`` (Eq. 14), without headroom; less if the link of decode is slower.

    ``tpot_s``: the objective. ``memory``: limits from which the paper estimates decode's batch; ``None``: the batch
    follows from the profile.

    Raises:
        ValueError: a step cannot read the weights in time.
    """
    # Eq. 13 and 14 are used here; the paper's Algorithm 2 differs from them. Its line 30 takes a step's time at
    # (ISL + OSL)/2, but the mean KV is ISL + OSL/2. Its lines 30 and 31 count all requests, but Eq. 14 counts those of
    # one decode replica (r / n_d).
    if memory is None:
        concurrency, limit = decode_limit(decode_profile, request.context_tokens, tpot_s)
    else:
        concurrency, limit = _concurrency_by_memory(request, decode_profile, tpot_s, memory)
    step_s = decode_profile.decode.seconds_for(concurrency, request.context_tokens)
    decode_requests_per_s = concurrency / (step_s * request.output_tokens)
    link_requests_per_s = 1.0 / handoff_engines(decode_profile, 1.0, request.input_tokens)
    if link_requests_per_s < decode_requests_per_s:
        decode_requests_per_s, limit = link_requests_per_s, Limit.LINK
    return OptimalRatio(
        request=request,
        decode_concurrency=concurrency,
        decode_step_s=step_s,
        prefill_requests_per_s=1.0 / request.prefill_s,
        decode_requests_per_s=decode_requests_per_s,
        decode_limit=limit,
        is_extrapolated=request.beyond_frac > 0.0
        or not decode_profile.decode.covers(concurrency, request.context_tokens),
    )


def _concurrency_by_memory(
    request: MeanRequest, profile: EngineProfile, tpot_s: float, memory: DecodeMemoryConfig
) -> tuple[int, Limit]:
    """The batch of one decode replica, and what limits it: cc_d = min(V_mem, V_BW) / (context M_token) (Eq. 13)."""
    request_bytes = request.context_tokens * profile.handoff.kv_bytes_per_token
    fitting, readable = memory.room_bytes, memory.readable_bytes(tpot_s)
    concurrency = max(1, int(min(fitting, readable) / request_bytes))
    if concurrency > profile.max_running:
        return profile.max_running, Limit.MAX_RUNNING
    return concurrency, Limit.KV_MEMORY if fitting <= readable else Limit.TPOT
