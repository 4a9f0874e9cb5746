"""What the machine gives: copies by size and direction, launch costs, and the ceilings of arithmetic."""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deployments.operator_profiler.timing import Call, Timer, new_event, new_stream
from tests.lab.operators.tables import Skipped, Table

LINK_COLUMNS = (
    "measure",
    "size_bytes",
    "median_us",
    "p10_us",
    "p90_us",
    "repeats",
    "method",
    "bytes_per_s",
    "flops_per_s",
    "sm_clock_mhz",
)
_LAUNCHES = 2000
_ROUNDS = 5


@dataclass(slots=True, kw_only=True)
class LinksRoom:
    """What the runs need; `sizes_bytes` of copies, `square` the side of the largest product."""

    device: str
    timer: Timer
    table: Table
    skipped: Skipped
    deadline_s: float
    sizes_bytes: tuple[int, ...]
    square: int
    say: Callable[[str], None]


def _copies(room: LinksRoom, size: int) -> Iterator[tuple[str, list[Call], int]]:
    """(name, calls, bytes that count) of the copies of one size; both directions at once count both."""
    is_gpu = room.device != "cpu"
    here, there = (torch.empty(size, dtype=torch.uint8, device=room.device) for _ in range(2))
    pinned, other = (torch.ones(size, dtype=torch.uint8, pin_memory=is_gpu) for _ in range(2))
    # Read and written: twice the size goes over the memory's bus.
    yield "copy_device_to_device", [_copy(there, here)], 2 * size
    yield "copy_host_to_device", [_copy(here, pinned)], size
    yield "copy_device_to_host", [_copy(pinned, here)], size
    if is_gpu:
        yield "copy_both_ways", [_both_ways(here, pinned, there, other)], 2 * size


def _copy(target: Tensor, source: Tensor) -> Call:
    return lambda: target.copy_(source, non_blocking=True)


def _both_ways(here: Tensor, pinned: Tensor, there: Tensor, other: Tensor) -> Call:
    """Up on the timed stream and down on a second one, which starts with it and is waited for."""
    second = new_stream()

    def copy() -> None:
        first = torch.cuda.current_stream()
        second.wait_stream(first)
        with torch.cuda.stream(second):
            other.copy_(there, non_blocking=True)
        here.copy_(pinned, non_blocking=True)
        first.wait_stream(second)

    return copy


def _ceilings(room: LinksRoom) -> Iterator[tuple[str, list[Call], int]]:
    """(name, calls, FLOPs) of the largest products on random data."""
    side = room.square
    left, right = (torch.randn(side, side, device=room.device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    yield "product_bf16", [lambda: torch.mm(left, right.t(), out=out)], 2 * side**3
    narrow, scale = [x.to(torch.float8_e4m3fn) for x in (left, right)], torch.ones((), device=room.device)
    yield (
        "product_fp8",
        [lambda: _scaled_product(narrow[0], narrow[1], scale)],
        2 * side**3,
    )


def _scaled_product(left: Tensor, right: Tensor, scale: Tensor) -> Tensor:
    return torch._scaled_mm(
        left, right.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _host_times(room: LinksRoom) -> Iterator[tuple[str, float, int]]:
    """(name, microseconds, repeats) of what the host spends on a launch, a graph and an event."""
    tiny = torch.ones(8, device=room.device)
    yield "host_launch", _host_us(lambda: tiny.add_(1), _LAUNCHES, room.timer), _LAUNCHES
    if room.device == "cpu":
        return
    event = new_event()
    yield "host_event_record", _host_us(event.record, _LAUNCHES, room.timer), _LAUNCHES
    burst = room.timer.burst([lambda: tiny.add_(1)])
    yield f"host_graph_launch_of_{burst.calls}", _host_us(burst.launch, 200, room.timer), 200
    pairs = [[new_event() for _ in range(2)] for _ in range(200)]
    for pair in pairs:
        for mark in pair:
            mark.record()
    room.timer.finish()
    yield "event_to_event", statistics.median(a.elapsed_time(b) for a, b in pairs) * 1e3, len(pairs)
    yield "device_time_of_tiny_kernel_in_graph", room.timer.time([lambda: tiny.add_(1)]).median_us, burst.calls


def _host_us(call: Call, count: int, timer: Timer) -> float:
    """Median over rounds of the host's time for one call, the queue being empty at the start."""
    rounds = []
    for _ in range(_ROUNDS):
        timer.finish()
        started_s = time.perf_counter()
        for _ in range(count):
            call()
        rounds.append((time.perf_counter() - started_s) * 1e6 / count)
    timer.finish()
    return statistics.median(rounds)


def _timed(room: LinksRoom, name: str, calls: list[Call], size: int | None, rate: str, work: int) -> None:
    try:
        timing = room.timer.time(calls)
    except Exception as error:
        room.timer.finish()
        room.skipped.note("links", None, f"{name} {size or ''}: {error}")
        return
    cells: dict[str, Any] = {"measure": name, "size_bytes": size, rate: work / timing.median_us * 1e6}
    room.table.add(cells | timing.cells())
    room.say(f"links: {name} {'' if size is None else size}")


def measure_links(room: LinksRoom) -> None:
    """Ceilings, launch costs, then copies from small to large; a failure is a row of skipped points."""
    for name, calls, flops in _ceilings(room):
        _timed(room, name, calls, None, "flops_per_s", flops)
    try:
        for name, value_us, repeats in _host_times(room):
            room.table.add({"measure": name, "median_us": value_us, "repeats": repeats, "method": "host clock"})
    except Exception as error:
        room.timer.finish()
        room.skipped.note("links", None, error)
    for size in room.sizes_bytes:
        if time.monotonic() > room.deadline_s:
            room.skipped.note("links", None, f"no time left for copies of {size} bytes")
            continue
        try:
            for name, calls, moved in _copies(room, size):
                _timed(room, name, calls, size, "bytes_per_s", moved)
        except Exception as error:
            room.timer.finish()
            room.skipped.note("links", None, f"copies of {size} bytes: {error}")
