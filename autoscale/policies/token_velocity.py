"""Token velocity: sizes each role by arriving tokens; spare decode replicas take bursts of prompts (TokenScale)."""

import math
from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from autoscale.engines.capacity import decode_tokens_per_s
from autoscale.engines.profile import EngineProfile
from autoscale.headcount import desired_replicas
from autoscale.policies.policy import Policy, ProfiledConfig, replicas_of
from autoscale.ratio import PdRatio
from autoscale.types import Decision, Shown, Snapshot
from kvtransfer.topology import Role

# A measured velocity counts as at least this share of the profile's: prefill that decode holds up is slow too, and more
# replicas of it would not help.
_LEAST_PACE_FRAC = 0.5
# The most points of one start that are remembered.
_MOST_POINTS = 64


class TokenVelocityConfig(ProfiledConfig):
    """The spare of both roles, and how much of decode's spare may take prompts."""

    kind: Literal["token_velocity"] = "token_velocity"
    headroom_frac: float = Field(0.25, ge=0.0, le=10.0)
    """Standing spare: 0.25 fills replicas to 80 %, as llm-d's token-aware path."""
    convertible_frac: float = Field(0.5, ge=0.0, le=1.0)
    """Share of decode's spare that computes the prompts of a burst shorter than a start of prefill; 0 where prompts are
    longer than the length rule keeps on decode (local_cap_tokens)."""
    busy_s: float = Field(20.0, ge=0.0)
    """After prompts have waited at every prefill replica for this long, its measured pace is its velocity."""


def prefill_velocity(profile: EngineProfile, input_tokens: float) -> float:
    """Prompt tokens per second that one replica computes (V_P); ``input_tokens``: mean prompt length, above 0.

    Source: TokenScale, prefill velocity V_P.
    """
    seconds = profile.prefill.chunk_s(0.0, input_tokens)
    return input_tokens / seconds if seconds else math.inf


def network_velocity(profile: EngineProfile) -> float:
    """Prompt tokens per second that one link moves to decode as KV; the base time overlaps with other transfers.

    Source: TokenScale, network velocity V_N.
    """
    return profile.handoff.bytes_per_s / profile.handoff.kv_bytes_per_token


class TokenVelocity(Policy[TokenVelocityConfig]):
    """Replicas of each role: arriving tokens per second over the tokens per second of one replica (its velocity).

    Source: TokenScale (arXiv 2512.03416): the velocities, and convertible decoders for bursts.
    """

    def decide(self, snapshot: Snapshot) -> Decision:
        """Tokens that arrive over what one replica of the stage takes, with headroom.

        Prefill: lambda / min(V_P, V_N). Decode: lambda / V_D; the paper's V_D frees prompt and output tokens, ours
        produces output at the objective's TPOT, and lambda counts the same ones.
        """
        config, traffic = self._config, snapshot.traffic
        rate, inputs, outputs = traffic.requests_per_s, traffic.input_tokens_mean, traffic.output_tokens_mean
        if rate is None:
            return Decision(wanted=None, reason="no arrivals were observed")
        if rate > 0.0 and (inputs is None or outputs is None):
            return Decision(wanted=None, reason="the lengths of what arrives were not observed")
        inputs, outputs = max(1.0, inputs or 0.0), outputs or 0.0
        prompt_tokens_per_s, output_tokens_per_s = rate * inputs, rate * outputs
        own, busy = self._prefill_velocity(snapshot, inputs)
        prefill = min(own, network_velocity(config.prefill))
        decode = decode_tokens_per_s(config.decode, inputs + outputs / 2, self._slo.tpot_s)
        standing, series = self._standing(snapshot, prompt_tokens_per_s)
        now = desired_replicas(snapshot.state.desired)
        running = len(replicas_of(snapshot, Role.DECODE))
        spare = max(0.0, min(now[Role.DECODE], running) - output_tokens_per_s / decode)
        lent = config.convertible_frac * spare
        # Prompts that decode computes itself need no network.
        most = lent * prefill_velocity(config.decode, inputs) if lent else 0.0
        absorbed = min(prompt_tokens_per_s - standing, most)
        wanted = {
            Role.PREFILL: (prompt_tokens_per_s - absorbed) / prefill * (1.0 + config.headroom_frac),
            Role.DECODE: output_tokens_per_s / decode * (1.0 + config.headroom_frac),
        }
        if not traffic.is_whole:  # there may be more traffic, so no replica leaves
            wanted = {role: max(wanted[role], float(now[role])) for role in Role}
        return Decision(
            wanted=wanted,
            reason=f"{prompt_tokens_per_s:.4g} prompt tokens/s, {absorbed:.4g} of them a burst that decode takes; "
            f"{output_tokens_per_s:.4g} output tokens/s",
            ratio=PdRatio.of(wanted),
            shown=(
                Shown(name="prompt_tokens_per_s", value=prompt_tokens_per_s, target=now[Role.PREFILL] * prefill),
                Shown(name="output_tokens_per_s", value=output_tokens_per_s, target=now[Role.DECODE] * decode),
            ),
            memory={**series, **busy} if traffic.is_whole else None,
        )

    def _prefill_velocity(self, snapshot: Snapshot, inputs: float) -> tuple[float, dict[str, tuple[float, ...]]]:
        """Velocity of a prefill replica, and the policy's memory of it.

        It is measured once prompts have waited at every replica for long enough; before that it is the profile's.
        """
        profiled = prefill_velocity(self._config.prefill, inputs)
        admitted = frozenset(snapshot.state.admitted)
        serving = [r for r in replicas_of(snapshot, Role.PREFILL) if not admitted or r.replica_id in admitted]
        computed = [r.prefill_tokens_per_s for r in serving if r.prefill_tokens_per_s is not None]
        if not serving or len(computed) < len(serving) or not all(r.waiting_requests for r in serving):
            return profiled, {}
        since_s = min(snapshot.now_s, *snapshot.state.memory.get("prefill_busy_since_s", ()), math.inf)
        memory: dict[str, tuple[float, ...]] = {"prefill_busy_since_s": (since_s,)}
        if snapshot.now_s - since_s < self._config.busy_s or not math.isfinite(profiled):
            return profiled, memory
        return max(math.fsum(computed) / len(computed), profiled * _LEAST_PACE_FRAC), memory

    def _standing(self, snapshot: Snapshot, tokens_per_s: float) -> tuple[float, Mapping[str, tuple[float, ...]]]:
        """The lowest arrival rate of prompt tokens within one start of prefill, and the memory of it.

        What arrives beyond it is a burst. Only points that may still become the lowest are remembered.
        """
        memory, now_s, start_s = snapshot.state.memory, snapshot.now_s, self._config.start_s(Role.PREFILL)
        series = zip(memory.get("prompts_at_s", ()), memory.get("prompt_tokens_per_s", ()), strict=False)
        lower = [(at, rate) for at, rate in series if now_s - start_s < at < now_s and rate < tokens_per_s]
        least = lower[0][1] if lower else tokens_per_s
        if not lower or now_s - lower[-1][0] >= start_s / _MOST_POINTS:
            lower.append((now_s, tokens_per_s))
        return least, {"prompts_at_s": tuple(at for at, _ in lower), "prompt_tokens_per_s": tuple(n for _, n in lower)}
