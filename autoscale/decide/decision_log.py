"""The decision log: JSON lines of (snapshot, plan), from which every plan can be computed again (pure).

Only decisions that are news have a line. Traffic has a line of its own if the service had no other line for a minute:
so a log shows the traffic of a whole day, also while the counts stay.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from autoscale.decide.config import AutoscaleConfig
from autoscale.decide.controller import Controller
from autoscale.documents import first_fault
from autoscale.types import (
    Decision,
    Note,
    NoteKind,
    Plan,
    PolicyFault,
    PoolKey,
    PoolLimits,
    Snapshot,
    Traffic,
)

# Longest time without the traffic of a service, seconds. A line has 0.2 kB: 0.3 MB a day, of the log's 64 MB.
_TRAFFIC_S = 60.0

_SNAPSHOT = TypeAdapter(Snapshot)
_TRAFFIC = TypeAdapter(Traffic)
PLAN = TypeAdapter(Plan)
_LIMITS = tuple(field.name for field in fields(PoolLimits))


def config_line(service: str, config: AutoscaleConfig, now_s: float, why: str) -> str:
    """The line with the configuration that holds for the service's lines after it; ``why``: the cause of its change."""
    return json.dumps({"service": service, "at_s": now_s, "why": why, "config": config.model_dump(mode="json")})


def decision_line(service: str, snapshot: Snapshot, plan: Plan) -> str:
    """The line of one changed decision about a service; the limits of a pool are beside its counts, not nested."""
    document = _SNAPSHOT.dump_python(snapshot, mode="json")
    for pool in document["pools"]:
        pool |= pool.pop("limits")  # changes the pool inside the document
    return json.dumps({"service": service, "snapshot": document, "plan": PLAN.dump_python(plan, mode="json")})


def traffic_line(service: str, now_s: float, traffic: Traffic) -> str:
    """The line with the traffic of a service whose decisions are no news."""
    return json.dumps({"service": service, "at_s": now_s, "traffic": _TRAFFIC.dump_python(traffic, mode="json")})


def is_traffic_due(now_s: float, logged_s: float | None) -> bool:
    """Whether a service needs a line with its traffic; ``logged_s``: time of its last line, ``None``: it has none."""
    return logged_s is None or now_s - logged_s >= _TRAFFIC_S


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One line of a log. Of the values, a line has ``config``, or ``traffic``, or all but ``config``.

    Attributes:
        at_s: wall-clock time.
        config: the service's configuration from this line on.
        traffic: the service's traffic of the last window.
        pools: limits of the service's pools.
    """

    service: str
    at_s: float
    config: AutoscaleConfig | None = None
    traffic: Traffic | None = None
    pools: Mapping[PoolKey, PoolLimits] | None = None


def parse_line(line: str) -> LogLine:
    """Read a line of a log; raises ValueError if it is none, or if this version cannot read it."""
    try:
        record = json.loads(line)
        service = str(record.get("service", ""))
        if "config" in record:
            config = AutoscaleConfig.model_validate(record["config"])
            return LogLine(service=service, at_s=float(record["at_s"]), config=config)
        if "traffic" in record:
            traffic = _TRAFFIC.validate_python(record["traffic"])
            return LogLine(service=service, at_s=float(record["at_s"]), traffic=traffic)
        snapshot = _SNAPSHOT.validate_python(_nested(record["snapshot"]))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"no line of a decision log: {error}") from None
    pools = {pool.key: pool.limits for pool in snapshot.pools}
    return LogLine(service=service, at_s=snapshot.now_s, traffic=snapshot.traffic, pools=pools)


def _nested(snapshot: dict[str, Any]) -> dict[str, Any]:
    """A snapshot of a log, with the limits of each pool nested again: the inverse of ``decision_line``."""
    pools = []
    for pool in snapshot["pools"]:
        limits = {name: pool[name] for name in _LIMITS if name in pool}
        pools.append({"limits": limits, **{name: pool[name] for name in pool if name not in limits}})
    return {**snapshot, "pools": pools}


def is_news(plan: Plan, last: Plan | None) -> bool:
    """Whether a plan has other decisions than the last one; times and figures alone are no news."""
    return last is None or _decided(plan) != _decided(last)


def _decided(plan: Plan) -> tuple[object, ...]:
    """The parts of a plan that are news.

    Texts that change in each tick are left out: the time left of a cooldown, the age of a report.
    """
    notes = tuple(note for note in plan.held_back if note.kind is not NoteKind.COOLDOWN)
    followed = plan.state.followed
    decision = plan.decision.wanted is None, plan.decision.fault, followed and followed.ratio
    return plan.counts, plan.admitted, plan.withdrawn, plan.victims, notes, decision, plan.pending, plan.passed_over


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A plan of the log that differs from the controller's present plan for the same snapshot.

    ``line``: its number in the log, from 1. ``fields``: for each field that differs, the logged value and the present
    one.
    """

    line: int
    service: str
    now_s: float
    fields: dict[str, tuple[Any, Any]]


def replay(lines: Iterable[str], config: AutoscaleConfig | None = None) -> Iterator[Difference | None]:
    """Compute every plan of a log again; yields ``None`` for each plan that is the same.

    ``config`` replaces all configurations of the log.

    Raises:
        ValueError: a line is no line of a decision log, or a decision comes before any configuration.
    """
    controllers: dict[str, Controller] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            service = record.get("service", "")
            if "config" in record:
                controllers[service] = Controller(AutoscaleConfig.model_validate(record["config"]))
                continue
            if "traffic" in record:
                continue
            snapshot = _SNAPSHOT.validate_python(_nested(record["snapshot"]))
            # Read and written again, so that an older log has the fields that it lacks.
            logged_plan = PLAN.validate_python(record["plan"])
            logged = PLAN.dump_python(logged_plan, mode="json")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            cause = first_fault(error) if isinstance(error, ValidationError) else error
            raise ValueError(f"line {number} is no line of a decision log: {cause}") from None
        controller = controllers.get(service) if config is None else Controller(config)
        if controller is None:
            raise ValueError(f"line {number} is a decision before any configuration: give one with --config")
        plan = _repeated(controller, logged_plan.decision).tick(snapshot)
        again = PLAN.dump_python(plan, mode="json")
        if _are_alike(plan.held_back, logged_plan.held_back):  # only texts may differ, and these are not compared
            logged["held_back"] = again["held_back"]
        differing = {name: (logged[name], again[name]) for name in again if again[name] != logged[name]}
        yield Difference(line=number, service=service, now_s=snapshot.now_s, fields=differing) if differing else None


def _repeated(controller: Controller, logged: Decision) -> Controller:
    """The controller that computes a logged decision again; that of a late policy is repeated: time is not logged."""
    if logged.fault is not PolicyFault.LATE:
        return controller
    return Controller(controller.config, lambda call: logged)


def _are_alike(notes: Sequence[Note], logged: Sequence[Note]) -> bool:
    """Whether notes have the same kinds, whatever their texts; notes of older logs are of unknown kind."""
    return len(notes) == len(logged) and all(
        old.kind in (NoteKind.UNKNOWN, new.kind) for new, old in zip(notes, logged, strict=True)
    )


def load_lines(path: Path) -> list[str]:
    """The lines of a log file; a ValueError if the file cannot be read."""
    try:
        return path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
