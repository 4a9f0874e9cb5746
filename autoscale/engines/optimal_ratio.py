"""The P/D ratio at which both roles are busy, from their engines' profiles (DOPD section IV-B, Eq. 11-14; pure)."""

from dataclasses import dataclass

from pydantic import Field, model_validator

from autoscale.engines.capacity import decode_batch
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
        decode_concurrency: requests in the batch of one decode replica (cc_d).
        decode_step_s: time of one step at that concurrency, seconds (t_d).
        prefill_per_decode: prefill replicas per decode replica (n_p / n_d), not rounded.
        is_extrapolated: whether a value lies outside a profile's points.
    """

    decode_concurrency: int
    decode_step_s: float
    prefill_per_decode: float
    is_extrapolated: bool


def optimal_ratio(
    prefill_profile: EngineProfile,
    decode_profile: EngineProfile,
    input_tokens: float,
    output_tokens: float,
    *,
    tpot_s: float,
    memory: DecodeMemoryConfig | None = None,
) -> OptimalRatio:
    """``n_p / n_d = cc_d t_p / (t_d OSL)`` (Eq. 14), without headroom.

    ``input_tokens``: mean prompt (ISL). ``output_tokens``: mean answer (OSL). ``tpot_s``: the objective. ``memory``:
    limits from which the paper estimates decode's batch; ``None``: the batch follows from the profile.

    Raises:
        ValueError: a length is not above 0, prefill takes no time, or a step cannot read the weights in time.
    """
    if not (input_tokens > 0.0 and output_tokens > 0.0):
        raise ValueError(f"{input_tokens:g} input and {output_tokens:g} output tokens: both must be above 0")
    # Eq. 13 and 14 are used here; the paper's Algorithm 2 differs from them. Its line 30 takes a step's time at
    # (ISL + OSL)/2, but the mean KV is ISL + OSL/2. Its lines 30 and 31 count all requests, but Eq. 14 counts those of
    # one decode replica (r / n_d).
    context_tokens = input_tokens + output_tokens / 2
    if memory is None:
        concurrency = decode_batch(decode_profile, context_tokens, tpot_s)
    else:
        # Eq. 13: cc_d = min(V_mem, V_BW) / ((ISL + OSL/2) M_token).
        request_bytes = context_tokens * decode_profile.handoff.kv_bytes_per_token
        fitting = int(min(memory.room_bytes, memory.readable_bytes(tpot_s)) / request_bytes)
        concurrency = max(1, min(fitting, decode_profile.max_running))
    prefill_s = prefill_profile.prefill.seconds_for(input_tokens)
    if prefill_s <= 0.0:
        raise ValueError(f"profile {prefill_profile.name}: {input_tokens:g} tokens take no time: measure it again")
    step_s = decode_profile.decode.seconds_for(concurrency, context_tokens)
    return OptimalRatio(
        decode_concurrency=concurrency,
        decode_step_s=step_s,
        prefill_per_decode=concurrency * prefill_s / (step_s * output_tokens),
        is_extrapolated=not (
            prefill_profile.prefill.covers(input_tokens) and decode_profile.decode.covers(concurrency, context_tokens)
        ),
    )
