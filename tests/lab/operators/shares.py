"""Times by share of the SMs (Fig. 8): a process for each share, under MPS or else in a green context."""

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from typing import IO, Any

import torch

from deployments.operator_profiler.meter import Meter
from deployments.operator_profiler.timing import TIMING_COLUMNS, CudaTimer, HostTimer, Timer
from tests.lab.operators.layer import Layer
from tests.lab.operators.mps import SharesError, mps_daemon
from tests.lab.operators.shapes import Point
from tests.lab.operators.tables import POINT_COLUMNS, Skipped, Table, point_cells

SHARE_COLUMNS = (*POINT_COLUMNS, "share_percent", "sms", "share_method", *TIMING_COLUMNS)
SHARES_PERCENT = (10, 20, 30, 40, 50, 60, 70, 80, 90, 100)
# Green contexts of Hopper come in steps of eight SMs.
_GREEN_STEP_SMS = 8
_START_S = 45.0
# With less time than this a way of sharing is not tried, in seconds.
_LEAST_S = 10.0
_QUIT_S = 15.0


def green_sms(percent: int, sms: int) -> int:
    """SMs of a green context of about this share: a multiple of eight, or all."""
    wanted = round(sms * percent / 100 / _GREEN_STEP_SMS) * _GREEN_STEP_SMS
    return sms if percent >= 100 else max(_GREEN_STEP_SMS, min(wanted, sms))


@dataclass(slots=True, kw_only=True)
class Child:
    """A process that measures all points in its share when it is told to."""

    percent: int
    process: subprocess.Popen[str]
    errors: IO[str]
    pending: str = field(default="")

    def read(self, deadline_s: float) -> dict[str, Any] | None:
        """Its next line, None at its end.

        Raises:
            SharesError: Nothing came in time.
        """
        assert self.process.stdout is not None
        while "\n" not in self.pending:
            left_s = max(0.0, deadline_s - time.monotonic())  # what has come already is read also when time is over
            if not select.select([self.process.stdout], [], [], left_s)[0]:
                raise SharesError(f"share {self.percent} %: no answer in time{self.last_error()}")
            read = os.read(self.process.stdout.fileno(), 65536).decode(errors="replace")
            if not read:
                return None
            self.pending += read
        line, _, self.pending = self.pending.partition("\n")
        found: dict[str, Any] = json.loads(line) if line.startswith("{") else {"note": line}
        return found

    def wait_ready(self, deadline_s: float) -> None:
        """Wait until it has its context.

        Raises:
            SharesError: It ended, or nothing came in time.
        """
        while (found := self.read(deadline_s)) is not None:
            if "ready" in found:
                return
        raise SharesError(f"share {self.percent} %: ended at its start{self.last_error()}")

    def last_error(self) -> str:
        """The last line that it wrote to its standard error."""
        if self.errors.closed:
            return ""
        self.errors.seek(0)
        lines = self.errors.read().strip().splitlines()
        return f": {lines[-1]}" if lines else ""

    def start(self) -> None:
        """Tell it to measure."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def release(self) -> None:
        """Let it end: without an order it measures nothing."""
        with suppress(OSError):
            if self.process.stdin is not None:
                self.process.stdin.close()

    def end(self) -> None:
        """End it: by itself, since MPS dislikes clients that are killed at work; by force where it does not."""
        self.release()
        try:
            self.process.wait(timeout=_QUIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for pipe in (self.process.stdout, self.errors):
            if pipe is not None:
                pipe.close()


@dataclass(slots=True, kw_only=True)
class SharesRoom:
    """What the runs by share need; `script` is the file that a child runs, with its first arguments."""

    script: Sequence[str]
    device: str
    sms: int
    table: Table
    skipped: Skipped
    deadline_s: float
    shares_percent: Sequence[int]
    say: Callable[[str], None]


def _child(room: SharesRoom, percent: int, method: str, environment: dict[str, str]) -> Child:
    own = {"PYTHONUNBUFFERED": "1"}
    command = [sys.executable, *room.script, "--device", room.device, "--share-child"]
    if method == "mps" and percent < 100:
        own["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = str(percent)
    if method == "green context" and percent < 100:
        command += ["--green-sms", str(green_sms(percent, room.sms))]
    errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (Child.end closes it)
    process = subprocess.Popen(
        command,
        env=environment | own,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
    )
    return Child(percent=percent, process=process, errors=errors)


def _run(room: SharesRoom, points: Sequence[Point], method: str, environment: dict[str, str]) -> None:
    with ExitStack() as stack:
        children = [_child(room, percent, method, environment) for percent in room.shares_percent]
        for end in (Child.end, Child.release):  # called from the last to the first
            for child in children:
                stack.callback(end, child)
        ready = _ready(room, children)
        room.say(f"shares: {len(ready)} processes are ready, {method}")
        # The whole GPU first, then the small shares, where the curve bends.
        for child in sorted(ready, key=lambda one: (one.percent != 100, one.percent)):
            if time.monotonic() > room.deadline_s:
                room.skipped.note("shares", None, f"no time left for {child.percent} % of the SMs")
                continue
            try:
                child.start()
                _collect(room, child, points, method)
            except (SharesError, OSError) as error:
                room.skipped.note("shares", None, error)
            child.end()
            room.say(f"shares: {child.percent} % of the SMs, {method}")


def _ready(room: SharesRoom, children: Sequence[Child]) -> list[Child]:
    """The children that have their context.

    Raises:
        SharesError: None has; the message is the first one's.
    """
    ready_s = min(room.deadline_s, time.monotonic() + _START_S)
    ready, errors = [], []
    for child in children:
        try:
            child.wait_ready(ready_s)
        except SharesError as error:
            errors.append(error)
        else:
            ready.append(child)
    if not ready:
        raise errors[0]
    for reason in errors:
        room.skipped.note("shares", None, reason)
    return ready


def _collect(room: SharesRoom, child: Child, points: Sequence[Point], method: str) -> None:
    """The rows of one child, in the order of the points."""
    while (found := child.read(room.deadline_s)) is not None:
        if "done" in found:
            return
        if "index" not in found:
            continue
        point = points[found.pop("index")]
        if "reason" in found:
            room.skipped.note("shares", point, f"share {child.percent} %: {found['reason']}")
            continue
        room.table.add(point_cells(point) | found | {"share_percent": child.percent, "share_method": method})
    raise SharesError(f"share {child.percent} %: ended early{child.last_error()}")


def measure_shares(room: SharesRoom, points: Sequence[Point]) -> str:
    """Measure under MPS, else in green contexts; says which it was, or why neither works."""
    if room.device == "cpu":
        _run(room, points, "host, no share", dict(os.environ))
        return "host, no share: a dry run"
    reasons = []
    for method in ("mps", "green context"):
        rows = room.table.rows
        if time.monotonic() > room.deadline_s - _LEAST_S:
            reasons.append(f"{method}: no time left")
            continue
        try:
            if method == "mps":
                with mps_daemon() as environment:
                    _run(room, points, method, environment)
            else:
                _run(room, points, method, dict(os.environ))
        except SharesError as error:
            reasons.append(f"{method}: {error}")
            room.skipped.note("shares", None, reasons[-1])
            room.say(f"shares: {reasons[-1]}")
        if room.table.rows > rows:
            return "; ".join([*reasons, f"{method} was used"])
    return "; ".join(reasons)


def _green_stream(sms: int) -> tuple[Any, torch.cuda.Stream]:
    """A green context of this many SMs and a stream in it; the context must outlive the stream."""
    from torch.cuda.green_contexts import GreenContext

    context: Any = GreenContext.create(num_sms=sms, device_id=0)
    if hasattr(context, "Stream"):
        return context, context.Stream()
    context.set_context()
    return context, torch.cuda.current_stream()


def serve_child(device: str, points: Sequence[Point], meter: Meter, green: int | None) -> None:
    """A child's life: get a context, say ready, wait for a line, measure each point, write a line for each."""
    layer, context = Layer(device), None
    sms = 1 if device == "cpu" else torch.cuda.get_device_properties(0).multi_processor_count
    timer: Timer = HostTimer()
    if device != "cpu":
        square = torch.randn(512, 512, device=device, dtype=torch.bfloat16)
        torch.mm(square, square)
        torch.cuda.synchronize()
        stream = None
        if green is not None:
            context, stream = _green_stream(green)
            sms = green
        timer = CudaTimer(meter, target_us=2000.0, groups=5, stream=stream)
    print(json.dumps({"ready": sms}), flush=True)
    if sys.stdin.readline().strip() != "go":
        return
    for index, point in enumerate(points):
        answer: dict[str, Any] = {"index": index, "sms": sms}
        try:
            answer |= asdict(timer.time(layer.calls(point)))
        except Exception as error:
            answer["reason"] = f"{type(error).__name__}: {error}"
        print(json.dumps(answer), flush=True)
    print(json.dumps({"done": True}), flush=True)
    layer.drop()
    del context
