"""The demonstration's two services: the requests of a day, their objectives, and the sizing of each (pure)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autoscale.engines.profile import EngineProfile
from autoscale.ratio import PdRatio
from autoscale.report import Slo
from autoscale.sim.scenario import unloaded_ttft_s
from autoscale.traces.trace import TraceRequest, load_trace, scale_trace
from kvtransfer.topology import Role
from router.config import RouterConfig

_TRACES = Path(__file__).parent / "traces"
_TRACE_S = 86400.0
# Half a minute of decoding, since the day is short.
_MAX_OUTPUT_TOKENS = 1200
_MAX_TOTAL_TOKENS = 8000
# Three seconds of work of one prefill replica.
_BACKLOG_TOKENS = 20_000.0
DAY_S = 360.0
# A start takes a minute and a half while eight replicas import at once; a morning must see its end.
MORNING_SLOWER = 1.5
HIGHEST_LEADERS, LOWEST_LEADERS = 9, 3

# The objectives: fixed before anything was tuned.
TTFT_FLOOR_S, TTFT_TIMES_UNLOADED, TPOT_S = 1.0, 3.0, 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One kind of traffic over a day, with the ratio that suits it.

    Args:
        name: its name, and that of its traces.
        ratio: prefill to decode replicas.
        target: decode tokens/s of one replica that the autoscaler aims at.
        ttft_s: the p95 TTFT that the autoscaler watches; long prompts have a longer objective.
        input_factor: multiplies the trace's prompt lengths.
        output_factor: multiplies its output lengths, so that the load fills replicas at this ratio.
        surge_target_frac: share of the target on its morning, so that many replicas are wanted at once.
    """

    name: str
    ratio: PdRatio
    target: float
    ttft_s: float
    input_factor: float
    output_factor: float
    surge_target_frac: float

    def day(self, day_s: float) -> tuple[TraceRequest, ...]:
        """Its requests, with the day compressed to ``day_s``; a shorter day has fewer, at the same rate."""
        return self._compressed("day", day_s, 1.0)

    def morning(self, day_s: float) -> tuple[TraceRequest, ...]:
        """Six hours at half the rate, in which its load doubles; compressed less by ``MORNING_SLOWER``."""
        return self._compressed("morning", day_s, MORNING_SLOWER)

    def _compressed(self, part: str, day_s: float, slower: float) -> tuple[TraceRequest, ...]:
        whole = load_trace(_TRACES / f"{part}_{self.name}.csv")
        share = min(1.0, day_s / DAY_S)
        trace = [request for number, request in enumerate(whole, 1) if int(number * share) > int((number - 1) * share)]
        longer = (
            replace(
                request,
                input_tokens=round(request.input_tokens * self.input_factor),
                output_tokens=min(max(1, round(request.output_tokens * self.output_factor)), _MAX_OUTPUT_TOKENS),
            )
            for request in trace
        )
        return scale_trace(longer, time_factor=slower * day_s / _TRACE_S, max_total_tokens=_MAX_TOTAL_TOKENS)

    def counts(self, leaders: int) -> dict[Role, int]:
        """Both roles at the ratio."""
        return {self.ratio.leader: leaders, self.ratio.follower: round(leaders * self.ratio.follower_share)}

    def tuning(self, *, is_gated: bool = True, target_frac: float = 1.0) -> dict[str, Any]:
        """How it is sized, nested as ``args.autoscale``; ``target_frac`` of the target lets it scale out further."""
        lowest, highest = self.counts(LOWEST_LEADERS), self.counts(HIGHEST_LEADERS)
        return {
            "pd_ratio": str(self.ratio),
            "policy": {
                "kind": "heteroscale",
                "signal": "decode_tps",
                "target": self.target * target_frac,
                "backlog_floor_tokens": _BACKLOG_TOKENS,
            },
            "slo": {"ttft_s": self.ttft_s},
            "bounds": {
                str(role): {"lowest_replicas": lowest[role], "highest_replicas": highest[role]} for role in Role
            },
            "gate": {"is_enabled": is_gated},
        }


# 1:3 for chat (long answers), 3:1 for code completion (long prompts, short answers).
CHAT = Service(
    name="chat",
    ratio=PdRatio(1, 3),
    target=410.0,
    ttft_s=2.0,
    input_factor=0.9,
    output_factor=3.05,
    surge_target_frac=0.08,
)
CODE = Service(
    name="code",
    ratio=PdRatio(3, 1),
    target=90.0,
    ttft_s=3.0,
    input_factor=2.2,
    output_factor=1.0,
    surge_target_frac=0.2,
)


def objectives(trace: Sequence[TraceRequest], profiles: Mapping[Role, EngineProfile]) -> list[Slo]:
    """The objective of each request of a trace."""
    router = RouterConfig()
    unloaded = {tokens: unloaded_ttft_s(tokens, profiles, router) for tokens in {r.input_tokens for r in trace}}
    return [
        Slo(ttft_s=max(TTFT_FLOOR_S, TTFT_TIMES_UNLOADED * unloaded[request.input_tokens]), tpot_s=TPOT_S)
        for request in trace
    ]
