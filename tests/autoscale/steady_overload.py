"""A constant load above the capacity of one service, as a fluid: queues grow until enough replicas serve."""

from dataclasses import dataclass, field

from autoscale.types import Latency, Traffic
from kvtransfer.topology import Role
from tests.autoscale.load_forecasts import forecast_of
from tests.autoscale.virtual_serve import VirtualServe

INPUT_TOKENS, OUTPUT_TOKENS = 90.0, 20.0
# One replica of ``make_profile``: 90 tokens take 0.1 s; eight answers of 20 tokens run in steps of 28 ms.
SERVED_PER_S = {Role.PREFILL: 10.0, Role.DECODE: 8 / (OUTPUT_TOKENS * 0.028)}
_WINDOW_S = 20.0


@dataclass
class SteadyOverload:
    """Requests arrive at a constant rate; each role serves what its replicas can, and the rest waits there."""

    serve: VirtualServe
    requests_per_s: float
    queue: dict[Role, float] = field(default_factory=lambda: dict.fromkeys(Role, 0.0))
    ttft_s: float = 0.0

    def replicas_that_are_enough(self) -> dict[Role, float]:
        """Replicas of each role that serve all that arrives, as a fraction."""
        return {role: self.requests_per_s / SERVED_PER_S[role] for role in Role}

    def tick(self) -> None:
        """One interval."""
        self.serve.advance()
        arriving, waits_s, load = self.requests_per_s, 0.0, {}
        busy = {}
        for role in Role:
            replicas = len(self.serve.serving(role))
            most_per_s = replicas * SERVED_PER_S[role]
            served_per_s = min(most_per_s, arriving + self.queue[role] / self.serve.interval_s)
            self.queue[role] += (arriving - served_per_s) * self.serve.interval_s
            busy[role] = served_per_s / most_per_s if most_per_s else 0.0
            waits_s += self.queue[role] / most_per_s if most_per_s else 0.0
            tokens = OUTPUT_TOKENS if role is Role.DECODE else INPUT_TOKENS
            load[role] = {
                "waiting_requests": self.queue[role],
                "running_requests": busy[role] * replicas * (8 if role is Role.DECODE else 1),
                "kv_usage_frac": 0.7 * busy[role] * replicas if not self.queue[role] > 8 else 1.0 * replicas,
                f"{role}_tokens_per_s": served_per_s * tokens,
                "gpu_utilization_frac": busy[role] * replicas,
                "sm_activity_frac": busy[role] * replicas,
            }
            if role is Role.PREFILL:
                load[role]["queued_prefill_tokens"] = self.queue[role] * INPUT_TOKENS
            arriving = served_per_s
        self.ttft_s = 0.2 + 0.3 * busy[Role.PREFILL] + waits_s
        latency = Latency(
            ttft_s=self.ttft_s,
            ttft_mean_s=0.2 + waits_s,
            tpot_s=0.02 + 0.02 * busy[Role.DECODE],
        )
        traffic = Traffic(
            requests_per_s=self.requests_per_s,
            served_per_s=arriving,
            input_tokens_mean=INPUT_TOKENS,
            input_tokens_weighted_mean=INPUT_TOKENS,
            output_tokens_mean=OUTPUT_TOKENS,
            cached_frac=0.0,
        )
        # The load is constant, so it is also what is forecast.
        forecast = forecast_of(self.requests_per_s, INPUT_TOKENS, OUTPUT_TOKENS)
        self.serve.decide(load, latency=latency, traffic=traffic, forecast=forecast)
