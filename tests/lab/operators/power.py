"""Power of operators that run without pause, and by share of busy time: the coefficients of Eq. 9."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from deployments.operator_profiler.meter import Meter
from deployments.operator_profiler.timing import Burst, Timer
from tests.lab.operators.layer import Layer
from tests.lab.operators.shapes import Point
from tests.lab.operators.tables import POINT_COLUMNS, Skipped, Table, point_cells

POWER_COLUMNS = (
    "state",
    *POINT_COLUMNS,
    "wanted_busy_frac",
    "busy_frac",
    "mean_power_w",
    "sampled_power_w",
    "idle_power_w",
    "energy_mj_per_op",
    "dynamic_energy_mj_per_op",
    "op_us",
    "repeats",
    "window_s",
    "sm_clock_mhz",
    "throttle_mask",
    "power_samples",
)
# Busy and idle in turns of this length, in seconds: far below the second over which NVML may average.
_PERIOD_S = 0.1
_SAMPLE_S = 0.02
# Work that is queued ahead of the GPU, in seconds: longer than the host may pause.
_AHEAD_S = 0.03


@dataclass(slots=True, kw_only=True)
class Readings:
    """Samples of power and clock in a window, and the energy counter at its two ends."""

    power_w: list[float] = field(default_factory=list)
    clock_mhz: list[float] = field(default_factory=list)
    throttle_mask: int | None = None
    energy_mj: float | None = None
    window_s: float = 0.0

    def sampled_power_w(self) -> float | None:
        """Mean of the samples."""
        return sum(self.power_w) / len(self.power_w) if self.power_w else None

    def mean_power_w(self) -> float | None:
        """From the energy counter where it moved, else from the samples."""
        if self.energy_mj and self.window_s > 0:
            return self.energy_mj / 1e3 / self.window_s
        return self.sampled_power_w()


@contextmanager
def readings(meter: Meter) -> Iterator[Readings]:
    """Sample the meter in a thread while the body runs."""
    found, stop = Readings(), threading.Event()

    def sample() -> None:
        while not stop.wait(_SAMPLE_S):
            power_w, clock_mhz = meter.power_w(), meter.sm_clock_mhz()
            if power_w is not None:
                found.power_w.append(power_w)
            if clock_mhz is not None:
                found.clock_mhz.append(clock_mhz)
            mask = meter.throttle_mask()
            if mask is not None:
                found.throttle_mask = (found.throttle_mask or 0) | mask

    thread = threading.Thread(target=sample, daemon=True)
    before_mj, started_s = meter.energy_mj(), time.monotonic()
    thread.start()
    try:
        yield found
    finally:
        after_mj = meter.energy_mj()
        found.window_s = time.monotonic() - started_s
        stop.set()
        thread.join(timeout=5.0)
        if before_mj is not None and after_mj is not None:
            found.energy_mj = after_mj - before_mj


def bursts_of(busy_frac: float, burst_s: float) -> int:
    """Bursts in a turn: as many as fill this share of the period, or of the queue ahead at full load."""
    span_s = _AHEAD_S if busy_frac >= 1 else busy_frac * _PERIOD_S
    return max(1, round(span_s / max(burst_s, 1e-6)))


def run_for(timer: Timer, burst: Burst, duration_s: float, busy_frac: float, burst_s: float) -> tuple[int, float]:
    """Run bursts for a while at a share of busy time; (bursts, seconds that it took)."""
    started_s = time.monotonic()
    per_turn, done = bursts_of(busy_frac, burst_s), 0
    period_s = per_turn * burst_s / busy_frac
    while True:
        turn_s = time.monotonic()
        if turn_s - started_s >= duration_s:
            return done, turn_s - started_s
        timer.marks_us(burst, per_turn)  # waits for the last
        done += per_turn
        rest_s = turn_s + period_s - time.monotonic()
        if busy_frac < 1 and rest_s > 0:
            time.sleep(rest_s)


@dataclass(slots=True, kw_only=True)
class PowerRoom:
    """What the power runs need; lengths in seconds."""

    meter: Meter
    timer: Timer
    layer: Layer
    table: Table
    skipped: Skipped
    deadline_s: float
    warm_up_s: float
    window_s: float
    say: Callable[[str], None]


def measure_idle(room: PowerRoom, state: str, rest_s: float) -> float | None:
    """Power without work after a rest, in watts; a row of its own."""
    time.sleep(rest_s)
    with readings(room.meter) as found:
        time.sleep(room.window_s)
    power_w = found.mean_power_w()
    room.table.add({"state": state, "busy_frac": 0, "wanted_busy_frac": 0} | _read_cells(found))
    return power_w


def _read_cells(found: Readings) -> dict[str, Any]:
    clocks = found.clock_mhz
    return {
        "mean_power_w": found.mean_power_w(),
        "sampled_power_w": found.sampled_power_w(),
        "window_s": found.window_s,
        "sm_clock_mhz": sum(clocks) / len(clocks) if clocks else None,
        "throttle_mask": found.throttle_mask,
        "power_samples": len(found.power_w),
    }


def _measure(room: PowerRoom, point: Point, busy_frac: float, idle_w: float | None) -> dict[str, Any]:
    burst = room.timer.burst(room.layer.calls(point))
    marks = room.timer.marks_us(burst, 3)
    burst_s = (marks[-1] - marks[1]) / 2e6
    run_for(room.timer, burst, room.warm_up_s, busy_frac, burst_s)
    with readings(room.meter) as found:
        done, took_s = run_for(room.timer, burst, room.window_s, busy_frac, burst_s)
    # The time of an op under sustained load, at the clock that this load leaves.
    marks = room.timer.marks_us(burst, bursts_of(busy_frac, burst_s))
    op_us = (marks[-1] - marks[0]) / (len(marks) - 1) / burst.calls
    repeats, power_w = done * burst.calls, found.mean_power_w()
    cells: dict[str, Any] = {"state": "busy", "wanted_busy_frac": busy_frac, "op_us": op_us, "repeats": repeats}
    cells |= {"busy_frac": min(1.0, repeats * op_us / 1e6 / took_s), "idle_power_w": idle_w}
    if power_w is not None:
        cells["energy_mj_per_op"] = power_w * took_s * 1e3 / repeats
        if idle_w is not None:
            cells["dynamic_energy_mj_per_op"] = (power_w - idle_w) * took_s * 1e3 / repeats
    return point_cells(point) | _read_cells(found) | cells


def measure_power(room: PowerRoom, points: Sequence[Point], shared: Sequence[Point]) -> None:
    """Idle, each point at full load, then the `shared` points at parts of it; a failure is a row of skipped points."""
    idle_w = measure_idle(room, "idle, context open", rest_s=room.warm_up_s * 2)
    runs = [(point, 1.0) for point in points] + [(point, frac) for point in shared for frac in (0.75, 0.5, 0.25)]
    for point, busy_frac in runs:
        if time.monotonic() > room.deadline_s:
            room.skipped.note("power", point, f"no time left for busy share {busy_frac}")
            continue
        try:
            room.table.add(_measure(room, point, busy_frac, idle_w))
        except Exception as error:
            room.timer.finish()
            room.skipped.note("power", point, error)
        room.say(f"power: {point.label()} at {busy_frac:.0%}")
    measure_idle(room, "idle, just after load", rest_s=0.0)
