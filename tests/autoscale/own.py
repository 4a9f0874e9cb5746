"""Policies and a collector of one's own, right and wrong, which tests name by their import path."""

import sys
import threading
import time
from asyncio import CancelledError
from collections.abc import Iterator
from itertools import repeat
from typing import Any

from pydantic import Field, field_validator

from autoscale.engines.profile import ProfileRef
from autoscale.observe.collected import Collected
from autoscale.observe.collectors import Collector, SourceConfig
from autoscale.policies.policy import Policy, ProfiledConfig
from autoscale.ratio import PdRatio
from autoscale.types import Decision, Shown, Snapshot
from kvtransfer.strict_config import StrictConfig
from kvtransfer.topology import Role

NAN = float("nan")
GOOD = {Role.PREFILL: 2.0, Role.DECODE: 2.0}


class FixedConfig(StrictConfig):
    """Counts, and a way to fail."""

    kind: str
    decode: float = Field(2.0, gt=0.0)
    fault: str = ""


class Fixed(Policy[FixedConfig]):
    """Wants fixed counts, or fails in the configured way."""

    config_class = FixedConfig

    def decide(self, snapshot: Snapshot) -> Decision:
        """The configured counts."""
        if self._config.fault:
            return FAULTS[self._config.fault](snapshot)
        wanted = dict.fromkeys(Role, self._config.decode)
        return Decision(wanted=wanted, reason="as configured", is_step=True, memory={"ticks": (snapshot.now_s,)})


class Blocking(Fixed):
    """Waits until it may go on, and counts its calls."""

    may_go_on = threading.Event()
    calls = 0
    most_at_once = 0
    _at_once = 0

    def decide(self, snapshot: Snapshot) -> Decision:
        """The configured counts."""
        Blocking.calls += 1
        Blocking._at_once += 1
        Blocking.most_at_once = max(Blocking.most_at_once, Blocking._at_once)
        self.may_go_on.wait(60)
        Blocking._at_once -= 1
        return super().decide(snapshot)


class AggregatedFixed(Fixed):
    """The same for groups without prefill."""

    is_fit_for_aggregated = True


class Profiled(Policy["Profiled.Config"]):
    """Sizes by profiles."""

    class Config(ProfiledConfig):
        """Two profiles."""

        kind: str

    config_class = Config

    def decide(self, snapshot: Snapshot) -> Decision:
        """One replica."""
        return Decision(wanted=dict.fromkeys(Role, 1.0), reason=f"start {self._config.start_s(Role.DECODE):g}")


class OneProfileConfig(StrictConfig):
    """One profile."""

    kind: str
    engine: ProfileRef


class OneProfile(Fixed):
    """A policy whose settings name a file."""

    config_class = OneProfileConfig


class NoConfigClass(Policy[FixedConfig]):
    """Lacks ``config_class``."""

    def decide(self, snapshot: Snapshot) -> Decision:
        """Is never called."""
        raise NotImplementedError


class Undecided(Policy[FixedConfig]):
    """Lacks ``decide``."""

    config_class = FixedConfig


class NoJson(Fixed):
    """Its settings are no plain values."""

    class Config(StrictConfig):
        """A field that JSON does not have."""

        kind: str
        field: Any = object()

    config_class = Config


class ConstantKind(Fixed):
    """Its config class accepts one kind alone."""

    class Config(StrictConfig):
        """Has no ``kind``."""

    config_class = Config


class RaisingConfig(Fixed):
    """Its config class has a fault of its own."""

    class Config(StrictConfig):
        """Raises what pydantic does not expect."""

        kind: str
        field: int = 1

        @field_validator("field")
        @classmethod
        def _break(cls, value: int) -> int:
            raise KeyError("no such thing")

    config_class = Config


class RaisingConstructor(Fixed):
    """Cannot be built."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise OSError("no database")


class UnprintableError(Exception):
    """An error whose message fails."""

    def __str__(self) -> str:
        raise ValueError


class FiguresConfig(SourceConfig):
    """One figure, and a way to fail."""

    kind: str
    requests_per_s: float = 1.0
    ahead_s: float = 0.0
    replica: str = ""
    fault: str = ""


class Figures(Collector[FiguresConfig]):
    """Gives its figure once it may."""

    config_class = FiguresConfig
    may_go_on = threading.Event()
    calls = 0

    def collect(self) -> Collected:
        """The configured figure."""
        Figures.calls += 1
        self.may_go_on.wait(60)
        faults = {"raise": lambda: _raises(OSError("no meter")), "exit": lambda: sys.exit(1), "none": lambda: None}
        if self._config.fault:
            return faults[self._config.fault]()  # type: ignore[return-value]
        observed_s = time.time() + self._config.ahead_s
        service = {"requests_per_s": self._config.requests_per_s}
        replicas = {self._config.replica: {"kv_usage_frac": 0.5}} if self._config.replica else {}
        return Collected(service=service, replicas=replicas, observed_s=observed_s)


def _raises(error: BaseException) -> Any:
    raise error


def _wants(prefill: Any, decode: Any) -> Any:
    return Decision(wanted={Role.PREFILL: prefill, Role.DECODE: decode}, reason="wrong")


def _slowly() -> Iterator[Shown]:
    time.sleep(1.0)
    yield Shown(name="x", value=1.0, target=1.0)


def _vandal(snapshot: Snapshot) -> Decision:
    desired: Any = snapshot.state.desired
    desired.clear()
    places: Any = snapshot.pools[0].on
    places["x"] = ()
    return Decision(wanted=None, reason="changed what it got")


# By name: what the policy does in place of a decision. The second item is in the reason of the plan.
CAUSES: dict[str, tuple[Any, str]] = {
    "zero": (lambda _: _raises(ZeroDivisionError("division by zero")), "raised ZeroDivisionError: division by zero"),
    "exit": (lambda _: sys.exit(3), "raised SystemExit: 3"),
    "recursion": (lambda snapshot: FAULTS["recursion"](snapshot), "raised RecursionError"),
    "unprintable": (lambda _: _raises(UnprintableError()), "UnprintableError"),
    "long": (lambda _: _raises(ValueError("x" * 10_000)), "raised ValueError: "),
    "none": (lambda _: None, "returned None, which is no Decision"),
    "dict": (lambda _: {"decode": 3}, "returned {'decode': 3}, which is no Decision"),
    "nan": (lambda _: _wants(2.0, NAN), "wants nan decode replicas; a count must be finite and at least 0"),
    "infinite": (lambda _: _wants(float("inf"), 2.0), "wants inf prefill replicas"),
    "negative": (lambda _: _wants(2.0, -1), "wants -1 decode replicas"),
    "text": (lambda _: _wants("2", 2.0), "wants '2' prefill replicas"),
    "true": (lambda _: _wants(True, 2.0), "wants True prefill replicas"),
    "list": (lambda _: Decision(wanted=[2, 2], reason=""), "wants [2, 2]; it must give a count of each role"),  # type: ignore[arg-type]
    "one role": (lambda _: Decision(wanted={Role.DECODE: 2.0}, reason=""), "it must give a count of each role"),
    "role": (lambda _: Decision(wanted={**GOOD, "x": 1.0}, reason=""), "it must give a count of each role"),  # type: ignore[dict-item]
    "reason": (lambda _: Decision(wanted=GOOD, reason=None), "gave a reason that is no text: None"),  # type: ignore[arg-type]
    "ratio": (lambda _: Decision(wanted=GOOD, reason="", ratio=PdRatio(0, 3)), "gave the ratio 0:3"),
    "no ratio": (lambda _: Decision(wanted=GOOD, reason="", ratio=0.5), "gave the ratio 0.5"),  # type: ignore[arg-type]
    "shown": (
        lambda _: Decision(wanted=GOOD, reason="", shown=(Shown(name="x", value=NAN, target=1.0),)),
        "which is no signal with finite numbers",
    ),
    "memory": (
        lambda _: Decision(wanted=GOOD, reason="", memory={"a": (1.0, NAN)}),
        "remembers a number that is not finite in its series 'a'",
    ),
    "memory text": (lambda _: Decision(wanted=GOOD, reason="", memory={"a": "xy"}), "raised ValueError"),  # type: ignore[dict-item]
    "memory list": (lambda _: Decision(wanted=GOOD, reason="", memory=[1.0]), "remembers [1.0]"),  # type: ignore[arg-type]
    "much memory": (
        lambda _: Decision(wanted=GOOD, reason="", memory={"a": (0.0,) * 60_000}),
        "remembers more than 50000 numbers and names",
    ),
    "many names": (
        lambda _: Decision(wanted=GOOD, reason="", memory={f"a{number}": () for number in range(60_000)}),
        "remembers more than 50000 numbers and names",
    ),
    "endless signals": (
        lambda _: Decision(wanted=GOOD, reason="", shown=repeat(Shown(name="x", value=1.0, target=1.0))),  # type: ignore[arg-type]
        "shows more than 100 signals",
    ),
    "cancelled": (lambda _: _raises(CancelledError()), "raised asyncio.exceptions.CancelledError"),
    "half a character": (lambda _: _raises(ValueError("caf\udce9.json")), "raised ValueError: caf\\udce9.json"),
    "huge": (lambda _: _wants(sys.float_info.max, 1.0), "prefill replicas; a count must be at most 1e+06"),
    "steep ratio": (
        lambda _: Decision(wanted=GOOD, reason="", ratio=PdRatio(5e-324, 1.0)),
        "one part of which is more than 1e+06",
    ),
}
FAULTS: dict[str, Any] = {name: answer for name, (answer, _) in CAUSES.items()} | {
    "vandal": _vandal,
    "interrupt": lambda _: _raises(KeyboardInterrupt()),
    "slow answer": lambda _: Decision(wanted=GOOD, reason="", shown=_slowly()),  # type: ignore[arg-type]
}
