"""The decision log: JSON lines of (snapshot, plan) from which every plan can be worked out again (pure)."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from autoscale.decide.config import AutoscaleConfig
from autoscale.decide.controller import Controller
from autoscale.types import ControllerState, Note, NoteKind, Plan, PoolLimits, Snapshot, StoredNote
from kvtransfer.topology import Node

_SNAPSHOT = TypeAdapter(Snapshot)
PLAN = TypeAdapter(Plan)
_NOTES = TypeAdapter(tuple[StoredNote, ...])
STATE = TypeAdapter(ControllerState)
NODES = TypeAdapter(tuple[Node, ...])
_LIMITS = tuple(field.name for field in fields(PoolLimits))


def config_line(service: str, config: AutoscaleConfig, now_s: float, why: str) -> str:
    """The line that says which configuration of a service holds from here on."""
    return json.dumps({"service": service, "at_s": now_s, "why": why, "config": config.model_dump(mode="json")})


def decision_line(service: str, snapshot: Snapshot, plan: Plan) -> str:
    """The line of one changed decision about a service."""
    flat = _flat(_SNAPSHOT.dump_python(snapshot, mode="json"))
    return json.dumps({"service": service, "snapshot": flat, "plan": PLAN.dump_python(plan, mode="json")})


def _flat(snapshot: dict[str, Any]) -> dict[str, Any]:
    """In a log, the limits of a pool lie beside its counts; ``_nested`` undoes this."""
    pools = [{**pool, **pool["limits"]} for pool in snapshot["pools"]]
    for pool in pools:
        del pool["limits"]
    return {**snapshot, "pools": pools}


def _nested(snapshot: dict[str, Any]) -> dict[str, Any]:
    pools = []
    for pool in snapshot["pools"]:
        limits = {name: pool[name] for name in _LIMITS if name in pool}
        pools.append({"limits": limits, **{name: pool[name] for name in pool if name not in limits}})
    return {**snapshot, "pools": pools}


def is_news(plan: Plan, last: Plan | None) -> bool:
    """Whether a plan differs from the one before in anything but its clock and its figures."""
    return last is None or _news(plan) != _news(last)


def _news(plan: Plan) -> tuple[object, ...]:
    # A cooldown's text counts down, a hold's names ages: neither is another decision.
    notes = tuple(note for note in plan.held_back if note.kind is not NoteKind.COOLDOWN)
    is_held = plan.decision.wanted is None
    return plan.counts, plan.admitted, plan.withdrawn, plan.victims, notes, is_held, plan.pending, plan.passed_over


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A logged plan and what the controller makes of the same snapshot now, field by field."""

    line: int
    service: str
    now_s: float
    fields: dict[str, tuple[Any, Any]]


def replay(lines: Iterable[str], config: AutoscaleConfig | None = None) -> Iterator[Difference | None]:
    """Work out every plan of a log again; ``None`` for each that comes out the same.

    ``config`` is used instead of the logged ones.

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
            snapshot = _SNAPSHOT.validate_python(_nested(record["snapshot"]))
            logged = record["plan"]
            notes = _NOTES.validate_python(logged.get("held_back", ()))
        except (ValueError, KeyError, TypeError, AttributeError, ValidationError) as error:
            raise ValueError(f"line {number} is no line of a decision log: {error}") from None
        controller = controllers.get(service) if config is None else Controller(config)
        if controller is None:
            raise ValueError(f"line {number} is a decision before any configuration: give one with --config")
        plan = controller.tick(snapshot)
        again = PLAN.dump_python(plan, mode="json")
        if _are_alike(plan.held_back, notes):
            logged["held_back"] = again["held_back"]
        fields = {name: (logged.get(name), again[name]) for name in again if again[name] != logged.get(name)}
        yield Difference(line=number, service=service, now_s=snapshot.now_s, fields=fields) if fields else None


def _are_alike(notes: Sequence[Note], logged: Sequence[Note]) -> bool:
    """Whether notes are of the same kinds: another wording is no other plan, and older logs have no kinds."""
    return len(notes) == len(logged) and all(
        old.kind in (NoteKind.UNKNOWN, new.kind) for new, old in zip(notes, logged, strict=True)
    )


def load_lines(path: Path) -> list[str]:
    """The lines of a log file; a ValueError if it cannot be read."""
    try:
        return path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
