"""The P/D ratio at which both roles are busy, from their engines' profiles (DOPD section IV-B, Eq. 11-14; pure)."""

from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field, model_validator

from autoscale.capacity import decode_batch
from autoscale.profile import EngineProfile


class DecodeMemoryConfig(BaseModel):
    """What bounds the KV of one decode replica: room in its GPUs, and how fast they read it."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    gpu_bytes: float = Field(gt=0.0, description="Memory of one GPU (M_gpu).")
    other_bytes: float = Field(
        ge=0.0,
        description="Of one GPU for what is neither weights nor KV, such as activations (M'); vLLM leaves a "
        "tenth by default.",
    )
    model_bytes: float = Field(gt=0.0, description="Weights of the model (M_model).")
    gpus: int = Field(1, ge=1, description="GPUs that share them (TP).")
    bytes_per_s: float = Field(gt=0.0, description="Memory bandwidth of one GPU, as its data sheet says (BW).")
    read_frac: float = Field(
        gt=0.0, le=1.0, description="The share of it that decode steps reach (alpha): DOPD's Table I shows 0.25 to 0.5."
    )

    @model_validator(mode="after")
    def _check_room(self) -> "DecodeMemoryConfig":
        if self.room_bytes <= 0.0:
            raise ValueError(
                f"{self.gpus} GPUs with {self.gpu_bytes - self.other_bytes:.3g} bytes each leave no KV beside "
                f"{self.model_bytes:.3g} bytes of weights: raise gpus"
            )
        return self

    @property
    def room_bytes(self) -> float:
        """KV that fits: ``V_mem = (M_gpu - M') TP - M_model`` (Eq. 11)."""
        return (self.gpu_bytes - self.other_bytes) * self.gpus - self.model_bytes

    def readable_bytes(self, tpot_s: float) -> float:
        """KV that a step reads within the objective: ``V_BW = t_d_SLO alpha TP BW - M_model`` (Eq. 12).

        As printed, without the last term, although the text says that weights and KV are read: a step that only has
        the time to read its weights would be allowed a batch.

        Raises:
            ValueError: not even the weights are.
        """
        weights_s = self.model_bytes / (self.read_frac * self.gpus * self.bytes_per_s)
        if tpot_s <= weights_s:
            raise ValueError(
                f"tpot_s is {tpot_s:g}, and to read the weights alone takes {weights_s:.3g} s: raise it, or gpus"
            )
        return (tpot_s - weights_s) * self.read_frac * self.gpus * self.bytes_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimalRatio:
    """At which ratio prefill just keeps every decode replica at its highest concurrency.

    ``prefill_s`` and ``decode_step_s``: of one prompt alone (t_p), and of one step at that concurrency (t_d).
    ``decode_concurrency``: requests in the batch of one decode replica (cc_d). ``prefill_per_decode``: n_p / n_d, not
    rounded. ``is_extrapolated``: a profile does not cover what was read from it.
    """

    prefill_s: float
    decode_concurrency: int
    decode_step_s: float
    output_tokens: float
    prefill_per_decode: float
    is_extrapolated: bool

    @property
    def prefill_requests_per_s(self) -> float:
        """What one prefill replica serves: ``1 / t_p``."""
        return 1.0 / self.prefill_s

    @property
    def decode_requests_per_s(self) -> float:
        """What one decode replica serves: ``cc_d / (t_d OSL)``."""
        return self.decode_concurrency / (self.decode_step_s * self.output_tokens)


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

    Args:
        prefill_profile: of one prefill replica.
        decode_profile: of one decode replica.
        input_tokens: mean prompt (ISL).
        output_tokens: mean answer (OSL).
        tpot_s: time per output token that must be kept, seconds.
        memory: what bounds a decode replica's KV, for the paper's estimate; without it, the profile says what fits and
            which batch still keeps the objective.

    Raises:
        ValueError: a length is not above 0, the profile's prefill takes no time, or the weights cannot be read in time.
    """
    if not (input_tokens > 0.0 and output_tokens > 0.0):
        raise ValueError(f"{input_tokens:g} input and {output_tokens:g} output tokens: both must be above 0")
    # Where Algorithm 2 departs, Eq. 13 and 14 hold. Line 30 reads a step at (ISL + OSL)/2, but KV is ISL + OSL/2 on
    # average, and like line 31 for all the requests there are, where Eq. 14 has those of one decode replica, r / n_d.
    context_tokens = input_tokens + output_tokens / 2
    if memory is None:
        concurrency = decode_batch(decode_profile, context_tokens, tpot_s)
    else:
        # Eq. 13: cc_d = min(V_mem, V_BW) / ((ISL + OSL/2) M_token).
        request_bytes = context_tokens * decode_profile.handoff.kv_bytes_per_token
        fits = int(min(memory.room_bytes, memory.readable_bytes(tpot_s)) / request_bytes)
        concurrency = max(1, min(fits, decode_profile.max_running))
    prefill_s = prefill_profile.prefill.seconds_for(input_tokens)
    if prefill_s <= 0.0:
        raise ValueError(f"profile {prefill_profile.name}: {input_tokens:g} tokens take no time: measure it again")
    step_s = decode_profile.decode.seconds_for(concurrency, context_tokens)
    return OptimalRatio(
        prefill_s=prefill_s,
        decode_concurrency=concurrency,
        decode_step_s=step_s,
        output_tokens=output_tokens,
        prefill_per_decode=concurrency * prefill_s / (step_s * output_tokens),
        is_extrapolated=not (
            prefill_profile.prefill.covers(input_tokens) and decode_profile.decode.covers(concurrency, context_tokens)
        ),
    )
