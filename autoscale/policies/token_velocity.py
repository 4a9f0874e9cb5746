"""Token velocity: sizes each role by arriving tokens; spare decode replicas compute bursts of prompts (TokenScale).

A *velocity* is the tokens per second of one replica: what it computes (V_P, V_D) or what its link moves (V_N). A
*burst* is the part of the arriving prompt tokens that exceeds the lowest arrival rate within the last start of prefill.
*Convertible* decode replicas are the spare ones that compute prompts in a burst.
"""

import math
from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from autoscale.engines.capacity import decode_tokens_per_s
from autoscale.engines.profile import EngineProfile
from autoscale.policies.policy import (
    ProfiledConfig,
    ProfiledPolicy,
    admitted_replicas,
    present_replicas,
    ratio_of,
    weight_of,
    weighted_replicas,
    without_blind_removal,
)
from autoscale.types import Decision, Shown, Snapshot
from kvtransfer.topology import Role

# Least measured velocity that is used, as a share of the profile's. Prefill may also be slow because it waits for
# decode, and then more prefill replicas would not help.
_LEAST_VELOCITY_FRAC = 0.5
# Largest number of points within one start that the memory holds; with more ticks, some are left out.
_MOST_POINTS = 64


class TokenVelocityConfig(ProfiledConfig):
    """The spare of both roles, and the share of decode's spare that may compute prompts."""

    kind: Literal["token_velocity"] = "token_velocity"
    headroom_frac: float = Field(0.25, ge=0.0, le=10.0)
    """Standing spare of both roles: 0.25 adds 25 %, so replicas are 80 % full, as on llm-d's token-aware path."""
    convertible_frac: float = Field(0.5, ge=0.0, le=1.0)
    """Share of decode's spare replicas that compute prompts in a burst, a rise that is shorter than a start of prefill.
    Set 0 if prompts are longer than the router's local_cap_tokens: then decode computes no prompts."""
    busy_s: float = Field(20.0, ge=0.0)
    """Time for which prompts must wait at every prefill replica until the measured velocity is used, seconds."""


def prefill_velocity(profile: EngineProfile, input_tokens: float) -> float:
    """Prompt tokens per second that one replica computes (V_P); ``input_tokens``: mean prompt length, above 0.

    Source: TokenScale, prefill velocity V_P.
    """
    seconds = profile.prefill.chunk_s(0.0, input_tokens)
    return input_tokens / seconds if seconds else math.inf


def network_velocity(profile: EngineProfile) -> float:
    """Prompt tokens per second whose KV one link moves to decode. The base time keeps no link busy.

    Source: TokenScale, network velocity V_N.
    """
    return profile.handoff.bytes_per_s / profile.handoff.kv_bytes_per_token


class TokenVelocity(ProfiledPolicy[TokenVelocityConfig]):
    """Replicas of each role: arriving tokens per second over the tokens per second of one replica (its velocity).

    Source: TokenScale (arXiv 2512.03416): the velocities, and convertible decoders for bursts.
    """

    has_own_ratio = True

    def decide_with_observed(self, snapshot: Snapshot) -> Decision:
        """Arriving tokens per second (lambda) over the velocity of one replica, with headroom.

        Prefill: lambda / min(V_P, V_N). Decode: lambda / V_D. In the paper decode's lambda and V_D count prompt and
        output tokens. Here they count output tokens alone. V_D is that of the largest batch that meets the TPOT
        objective, at the mean context (prompt and half of the answer).
        """
        config, traffic = self._config, snapshot.traffic
        rate, inputs, outputs = traffic.requests_per_s, traffic.input_tokens_mean, traffic.output_tokens_mean
        if rate is None:
            return Decision(wanted=None, reason="no arrivals were observed")
        if rate > 0.0 and (inputs is None or outputs is None):
            return Decision(wanted=None, reason="the lengths of what arrives were not observed")
        inputs, outputs = max(1.0, inputs or 0.0), outputs or 0.0
        prompt_tokens_per_s, output_tokens_per_s = rate * inputs, rate * outputs
        compute_velocity, busy_memory = self._compute_velocity(snapshot, inputs)
        velocities = {
            Role.PREFILL: min(compute_velocity, network_velocity(config.prefill)),
            Role.DECODE: decode_tokens_per_s(config.decode, inputs + outputs / 2, self._slo.tpot_s),
        }
        present = present_replicas(snapshot)
        serving = min(present[Role.DECODE], weight_of(weighted_replicas(snapshot, Role.DECODE)))
        spare = max(0.0, serving - output_tokens_per_s / velocities[Role.DECODE])
        convertible = config.convertible_frac * spare
        # Prompts that decode computes itself need no network.
        most_absorbed = convertible * prefill_velocity(config.decode, inputs) if convertible else 0.0
        lowest, rate_memory = self._lowest_rate(snapshot, prompt_tokens_per_s)
        absorbed = min(prompt_tokens_per_s - lowest, most_absorbed)
        wanted = {
            Role.PREFILL: (prompt_tokens_per_s - absorbed) / velocities[Role.PREFILL] * (1.0 + config.headroom_frac),
            Role.DECODE: output_tokens_per_s / velocities[Role.DECODE] * (1.0 + config.headroom_frac),
        }
        wanted = without_blind_removal(wanted, snapshot)
        rates = {Role.PREFILL: prompt_tokens_per_s, Role.DECODE: output_tokens_per_s}
        names = {Role.PREFILL: "prompt_tokens_per_s", Role.DECODE: "output_tokens_per_s"}
        return Decision(
            wanted=wanted,
            reason=f"{prompt_tokens_per_s:.4g} prompt tokens/s, {absorbed:.4g} of them a burst that decode takes; "
            f"{output_tokens_per_s:.4g} output tokens/s",
            ratio=ratio_of(wanted, snapshot),
            shown=tuple(
                Shown(name=names[role], value=rates[role], target=present[role] * velocities[role]) for role in Role
            ),
            memory={**rate_memory, **busy_memory} if traffic.is_whole else None,
        )

    def _compute_velocity(self, snapshot: Snapshot, inputs: float) -> tuple[float, dict[str, tuple[float, ...]]]:
        """Prompt tokens per second that a prefill replica computes (V_P); and the memory: since when all are busy.

        V_P is the measured one once prompts have waited at every replica for ``busy_s``. Before that it is the
        profile's, since an idle replica computes fewer tokens than it could.
        """
        profiled = prefill_velocity(self._config.prefill, inputs)
        serving = admitted_replicas(snapshot, Role.PREFILL)
        measured = [each.prefill_tokens_per_s for each, _ in serving if each.prefill_tokens_per_s is not None]
        if not serving or len(measured) < len(serving) or not all(each.waiting_requests for each, _ in serving):
            return profiled, {}
        since_s = min((snapshot.now_s, *snapshot.state.memory.get("prefill_busy_since_s", ())))
        memory: dict[str, tuple[float, ...]] = {"prefill_busy_since_s": (since_s,)}
        if snapshot.now_s - since_s < self._config.busy_s:
            return profiled, memory
        mean_velocity = math.fsum(measured) / weight_of(serving)  # of a standard replica
        return max(mean_velocity, profiled * _LEAST_VELOCITY_FRAC), memory

    def _lowest_rate(self, snapshot: Snapshot, tokens_per_s: float) -> tuple[float, Mapping[str, tuple[float, ...]]]:
        """The lowest arrival rate of prompt tokens within one start of prefill, and the memory of it.

        Arrivals beyond this rate are a burst. The memory holds only points that may become the lowest later: a point is
        dropped once a later one is as low. So its rates rise, and the first one is the lowest.
        """
        memory, now_s, start_s = snapshot.state.memory, snapshot.now_s, self._config.start_s(Role.PREFILL)
        series = zip(memory.get("prompts_at_s", ()), memory.get("prompt_tokens_per_s", ()), strict=False)
        lower = [(at, rate) for at, rate in series if now_s - start_s < at < now_s and rate < tokens_per_s]
        least = lower[0][1] if lower else tokens_per_s
        if not lower or now_s - lower[-1][0] >= start_s / _MOST_POINTS:
            lower.append((now_s, tokens_per_s))
        return least, {"prompts_at_s": tuple(at for at, _ in lower), "prompt_tokens_per_s": tuple(n for _, n in lower)}
