"""The same rise and fall of load for every policy, on one application of emulated engines under real Ray Serve.

The application has two variants: a few fast replicas, and slow ones that compute half as fast. Each policy is tuned
into it while it runs. The load rises to four times the base, Serve's controller is killed meanwhile, and the load falls
again. Admission is on: at the endpoint requests wait or are refused until enough replicas serve.
"""

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from autoscale.decide.status import PlanRecord
from autoscale.headcount import standard_of
from autoscale.report import RequestRecord
from autoscale.traces.trace import TraceRequest
from autoscale.types import PoolKey
from deployments.actors.scaling_metrics import serving_replicas
from deployments.machine.claims import free_ports
from kvtransfer.topology import Role
from serve_app.load.generator import LoadGenerator
from serve_app.local.cluster import DeployError
from tests.lab.stand.processes import title

ROOT = Path(__file__).parents[3]
APP, MODEL = "policies", "llama-70b"
PROFILE = str(ROOT / "configs" / "profiles" / "h100_llama70b_fp8_tp1.json")
BASE_PER_S, RISE_PER_S = 1.0, 4.0
INPUT_TOKENS, OUTPUT_TOKENS = 3000, 30
TTFT_S, TPOT_S = 3.0, 0.1
_START_S = 5.0
_PART_S = 2.5  # length of a part of the load, seconds
_ANSWER_S = 5.0  # time after which a request that is sent in time has ended, seconds
# Most replicas of each role in the fast group, which serves the base alone, and in the slow one.
_MOST = {"fast": {"prefill": 2, "decode": 1}, "slow": {"prefill": 2, "decode": 2}}
# Speed of the engines and links of each group; 1 is that of the profile.
SPEEDS = {"fast": 1.0, "slow": 0.5}
# What one fast emulated H100 replica serves of these requests: 3,000 tokens take 0.54 s of prefill.
_PREFILL_PER_S, _DECODE_PER_S = 1.6, 6.0
_PROFILES = {"prefill": PROFILE, "decode": PROFILE, "prefill_start_s": _START_S, "decode_start_s": _START_S}
_QUEUE = {"kind": "queue_depth", "prefill_requests_per_s": _PREFILL_PER_S, "decode_requests_per_s": _DECODE_PER_S}
# Every policy that sizes a live application by its load, with each live signal of HeteroScale. GPU utilisation and SM
# activity need GPUs.
POLICIES: dict[str, dict[str, Any]] = {
    "queue_depth reactive": {"policy": {**_QUEUE, "burn_down_s": 5.0}},
    "queue_depth headroom": {"policy": {**_QUEUE, "burn_down_s": 5.0, "headroom_frac": 0.4}},
    "queue_depth predictive": {"policy": {**_QUEUE, "burn_down_s": 5.0, "lead_s": _START_S, "trend_s": 12.0}},
    "dopd": {
        "policy": {"kind": "dopd", "interval_s": 5.0, **_PROFILES},
        "forecast": {"method": {"kind": "last_value"}, "step_s": 5.0, "season_s": None},
    },
    "wva": {"policy": {"kind": "wva"}},
    "token_velocity": {"policy": {"kind": "token_velocity", **_PROFILES}},
    "default": {
        "policy": {"kind": "default", "history_s": 60.0, "memory_s": 10.0, "stay_starts": 1.0, **_PROFILES},
        "gate": {"is_enabled": False},
    },
    "heteroscale decode_tps": {"policy": {"kind": "heteroscale", "signal": "decode_tps", "target": 100.0}},
    "heteroscale prefill_tps": {"policy": {"kind": "heteroscale", "signal": "prefill_tps", "target": 4000.0}},
    "heteroscale ttft": {"policy": {"kind": "heteroscale", "signal": "ttft"}},
    "heteroscale tpot": {"policy": {"kind": "heteroscale", "signal": "tpot"}},
    # Each minute has other counts, whatever the load is.
    "periodic": {
        "policy": {
            "kind": "periodic",
            "periods": [
                {"begins": "*/2 * * * *", "prefill": 3, "decode": 1, "pd_ratio": "3:1"},
                {"begins": "1-59/2 * * * *", "decode": 1},
            ],
        }
    },
}


def document() -> dict[str, Any]:
    """The Serve YAML of one fast replica of each role, and of a slow group without any."""
    serve = yaml.safe_load((ROOT / "configs" / "emulated.yaml").read_text())
    serve["http_options"]["port"] = free_ports(1)[0]
    application = serve["applications"][0]
    application["name"] = APP
    args = application["args"]
    args["ingress"] |= {"metrics_port": free_ports(1)[0], "admission": {"ttft_s": TTFT_S}}
    (fast,) = args["groups"]
    args["groups"] = [fast | {"name": "fast"}, deepcopy(fast) | {"name": "slow"}]
    for group, replicas in zip(args["groups"], (1, 0), strict=True):
        for role, highest in _MOST[group["name"]].items():
            emulator = {"profile": PROFILE, "start_s": _START_S, "time_factor": SPEEDS[group["name"]]}
            group[role] |= {"replicas": replicas, "max_replicas": highest, "emulator": emulator}
    args["autoscale"] = {
        "pd_ratio": "2:1",
        "policy": {"kind": "static", "prefill": 1, "decode": 1},
        "slo": {"ttft_s": TTFT_S, "tpot_s": TPOT_S},
        "guard": {"cooldown_out_s": 2.0, "cooldown_in_s": 5.0, "hysteresis_in_frac": 0.2},
        "gate": {"observation_s": 5.0},
        "interval_s": 1.0,
        "window_s": 6.0,
    }
    return serve


@dataclass(slots=True)
class Passage:
    """One policy through the rise and the fall; times in seconds from the rise.

    Attributes:
        records: every request, with the time at which it was sent.
        counts: serving prefill and decode replicas, in fast ones, at each time at which they changed.
        asked_s: when as many prefill replicas were wanted first as serve the load.
        killed_s: when Serve's controller was killed; ``None``: it was not.
        fell_s: end of the rise.
        ticked_s: time of the last decision.
        reasons: reasons of the last decisions.
        shown: figures that the last decision showed, by name.
        starts: pool and duration of each start, as the stand saw it, the oldest first.
    """

    records: list[RequestRecord] = field(default_factory=list)
    counts: list[tuple[float, float, float]] = field(default_factory=list)
    asked_s: float | None = None
    killed_s: float | None = None
    fell_s: float = 0.0
    ticked_s: float | None = None
    reasons: list[str] = field(default_factory=list)
    shown: dict[str, float] = field(default_factory=dict)
    starts: list[tuple[PoolKey, float]] = field(default_factory=list)

    def in_time_frac(self, begin_s: float, end_s: float) -> float | None:
        """Share of the requests sent in this time that met the TTFT objective; ``None``: none was sent."""
        sent = [record for record in self.records if begin_s <= record.sent_s < end_s]
        met = sum(each.error is None and each.ttft_s is not None and each.ttft_s <= TTFT_S for each in sent)
        return met / len(sent) if sent else None

    def enough_s(self, until_s: float, since_s: float = 0.0) -> float | None:
        """End of the first five seconds between both times in which 95 % of the requests were in time."""
        for end_s in range(math.ceil(since_s) + 5, int(until_s) + 1):
            if (self.in_time_frac(end_s - 5.0, end_s) or 0.0) >= 0.95:
                return float(end_s)
        return None

    @property
    def lost(self) -> list[str]:
        """Errors other than a refusal."""
        return [record.error for record in self.records if record.error not in (None, "HTTP 429")]

    @property
    def peak(self) -> tuple[float, float]:
        """The most serving replicas of each role."""
        return max(prefill for _, prefill, _ in self.counts), max(decode for _, _, decode in self.counts)


class Stand:
    """A running application of ``document``."""

    def __init__(self, app: Any) -> None:
        from serve_app.running.ray_control import Control

        self._app, self._control = app, Control(APP)

    def status(self) -> Any:
        """The status of the service; ``None`` while the coordinator does not answer or has no plan."""
        with suppress(DeployError):
            status = self._control.status()
            return None if status.last is None else status
        return None

    def serving(self) -> tuple[float, float] | None:
        """Serving prefill and decode replicas, in fast ones; ``None``: not known now."""
        if (status := self.status()) is None:
            return None
        ready = serving_replicas(status)
        return ready[Role.PREFILL], ready[Role.DECODE]

    def wait_until(self, holds: Callable[[], bool], within_s: float = 240.0) -> None:
        """Wait for a condition. Raises AssertionError: it does not hold in time."""
        deadline = time.monotonic() + within_s
        while not holds():
            assert time.monotonic() < deadline, self.status()
            time.sleep(0.25)

    def rest(self) -> None:
        """Return to one replica of each role, under the policy as deployed."""
        self._control.tune({}, "rest")
        self.wait_until(lambda: self.serving() == (1, 1))

    def kill_controller(self) -> None:
        """Kill Serve's controller, which starts again."""
        for process in self._app.processes():
            if "ServeController" in title(process):
                process.kill()

    async def passage(
        self,
        changes: Mapping[str, Any],
        *,
        most_rise_s: float,
        fall_s: float,
        kill_after_s: float | None,
        ends_early: bool = False,
    ) -> Passage:
        """The load's rise and fall under a policy.

        ``kill_after_s``: when Serve's controller is killed in the rise; ``None``: it is not. ``ends_early``: end the
        rise once enough replicas serve and the killed controller has a successor that decides.
        """
        self._control.tune(dict(changes), "its turn")
        passage = Passage(killed_s=kill_after_s)
        begun_s = time.monotonic()

        def is_over() -> bool:
            # Later requests may not have ended, so that their records are missing.
            now_s = time.monotonic() - begun_s - _PART_S - _ANSWER_S
            is_back = kill_after_s is None or (passage.ticked_s or 0.0) > kill_after_s + 1.0
            return ends_early and is_back and passage.enough_s(now_s, since_s=kill_after_s or 0.0) is not None

        with _watched(self, passage, begun_s):
            rise = asyncio.create_task(self._load(passage, begun_s, RISE_PER_S, most_rise_s, is_over))
            if kill_after_s is not None:
                await asyncio.sleep(kill_after_s)
                await asyncio.to_thread(self.kill_controller)
            await rise
            passage.fell_s = time.monotonic() - begun_s
            await self._load(passage, begun_s, BASE_PER_S, fall_s, lambda: False)
        return passage

    async def _load(
        self, passage: Passage, begun_s: float, per_s: float, most_s: float, is_over: Callable[[], bool]
    ) -> None:
        """Send requests at a steady rate, in parts of ``_PART_S``; the records come into the passage."""
        parts, end_s = [], time.monotonic() + most_s
        while time.monotonic() < end_s and not is_over():
            parts.append(asyncio.create_task(self._part(passage, begun_s, per_s)))
            await asyncio.sleep(_PART_S)
        await asyncio.gather(*parts)

    async def _part(self, passage: Passage, begun_s: float, per_s: float) -> None:
        later_s = time.monotonic() - begun_s
        times_s = [number / per_s for number in range(round(_PART_S * per_s))]
        trace = [TraceRequest(at_s=at_s, input_tokens=INPUT_TOKENS, output_tokens=OUTPUT_TOKENS) for at_s in times_s]
        records = await LoadGenerator(self._app.url, MODEL, seed=None).replay(trace)
        passage.records += [_later(record, later_s) for record in records]


def _later(record: RequestRecord, by_s: float) -> RequestRecord:
    """The record with its times counted from an earlier instant."""

    def later(at_s: float | None) -> float | None:
        return None if at_s is None else at_s + by_s

    return replace(
        record,
        sent_s=record.sent_s + by_s,
        first_token_s=later(record.first_token_s),
        last_token_s=later(record.last_token_s),
    )


@contextmanager
def _watched(stand: Stand, passage: Passage, begun_s: float) -> Iterator[None]:
    """Note counts, wishes and starts every half second, in a task beside the load."""
    asked_s: dict[PoolKey, list[float]] = {}  # when each replica was wanted that has not started yet
    desired_before: dict[PoolKey, int] = {}
    running_before: dict[PoolKey, set[str]] = {}

    def note_starts(record: PlanRecord, now_s: float) -> None:
        for key, count in record.plan.state.desired.items():
            more = count - desired_before.get(key, count)
            waiting = asked_s.setdefault(key, [])
            waiting += [now_s] * more
            del waiting[max(0, len(waiting) + min(0, more)) :]
            running = set(record.running.get(key, ()))
            for _ in running - running_before.get(key, running):
                if waiting:
                    passage.starts.append((key, now_s - waiting.pop(0)))
            desired_before[key], running_before[key] = count, running

    def look() -> None:
        if (status := stand.status()) is None or (serving := stand.serving()) is None:
            return
        now_s = time.monotonic() - begun_s
        if not passage.counts or passage.counts[-1][1:] != serving:
            passage.counts.append((now_s, *serving))
        desired = standard_of(status.last.plan.state.desired, status.pools.root)[Role.PREFILL]
        if passage.asked_s is None and desired * _PREFILL_PER_S >= RISE_PER_S:
            passage.asked_s = now_s
        plan = status.last.plan
        if plan.state.ticked_s is not None:
            passage.ticked_s = plan.state.ticked_s - time.time() + now_s
        passage.reasons = [*passage.reasons[-9:], plan.decision.reason]
        passage.shown = {each.name: each.value for each in plan.decision.shown}
        note_starts(status.last, now_s)

    async def watch() -> None:
        while True:
            await asyncio.to_thread(look)
            await asyncio.sleep(0.5)

    task = asyncio.get_running_loop().create_task(watch())
    try:
        yield
    finally:
        task.cancel()
