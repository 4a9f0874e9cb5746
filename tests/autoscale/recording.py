"""The log of a virtual day."""

from typing import Any

from autoscale.config import AutoscaleConfig
from autoscale.controller import Controller
from autoscale.decision_log import config_line, decision_line, is_news
from autoscale.types import Latency, Plan, Snapshot, Traffic
from kvtransfer.topology import Role
from tests.autoscale.virtual_serve import VirtualServe


class Recorder(Controller):
    """A controller that keeps the log of what it was shown."""

    def __init__(self, config: AutoscaleConfig, start_s: float) -> None:
        super().__init__(config)
        self.lines = [config_line(config, start_s, "start")]
        self._last: Plan | None = None

    def tick(self, snapshot: Snapshot) -> Plan:
        plan = super().tick(snapshot)
        if is_news(plan, self._last):
            self.lines.append(decision_line(snapshot, plan))
        self._last = plan
        return plan


def recorded(config: AutoscaleConfig) -> list[str]:
    """Rise, peak with a dead decode replica, fall with a late spell."""
    recorder = Recorder(config, 1000.0)
    cluster = VirtualServe(recorder, {Role.PREFILL: 8.0, Role.DECODE: 20.0})
    for tick in range(120):
        if tick == 70:
            cluster.lose(Role.DECODE)
        load = [250.0, 550.0, 880.0, 300.0][tick // 30]
        fields: dict[str, Any] = {
            "latency": Latency(ttft_s=2.0 if 95 < tick < 100 else 0.5, tpot_s=0.02),
            "traffic": Traffic(requests_per_s=load / 60.0, input_tokens_mean=1000.0, output_tokens_mean=60.0),
        }
        cluster.tick(load, **fields)
    return recorder.lines
