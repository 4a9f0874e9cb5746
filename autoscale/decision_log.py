"""The decision log: JSON lines of (snapshot, plan) from which every plan can be worked out again (pure)."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from autoscale.config import AutoscaleConfig
from autoscale.controller import Controller
from autoscale.types import ControllerState, Plan, Snapshot
from kvtransfer.topology import Node

_SNAPSHOT = TypeAdapter(Snapshot)
PLAN = TypeAdapter(Plan)
STATE = TypeAdapter(ControllerState)
NODES = TypeAdapter(tuple[Node, ...])


def config_line(service: str, config: AutoscaleConfig, now_s: float, why: str) -> str:
    """The line that says which configuration of a service holds from here on."""
    return json.dumps({"service": service, "at_s": now_s, "why": why, "config": config.model_dump(mode="json")})


def decision_line(service: str, snapshot: Snapshot, plan: Plan) -> str:
    """The line of one changed decision about a service."""
    return json.dumps(
        {
            "service": service,
            "snapshot": _SNAPSHOT.dump_python(snapshot, mode="json"),
            "plan": PLAN.dump_python(plan, mode="json"),
        }
    )


def is_news(plan: Plan, last: Plan | None) -> bool:
    """Whether a plan differs from the one before in anything but its clock and its figures."""
    return last is None or _news(plan) != _news(last)


def _news(plan: Plan) -> tuple[object, ...]:
    # A cooldown's text counts down, a hold's names ages: neither is another decision.
    notes = tuple(note for note in plan.held_back if not note.startswith("cooldown"))
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

    Args:
        lines: a decision log.
        config: to be used instead of the logged ones.

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
            snapshot = _SNAPSHOT.validate_python(record["snapshot"])
            logged = record["plan"]
        except (ValueError, KeyError, TypeError, AttributeError, ValidationError) as error:
            raise ValueError(f"line {number} is no line of a decision log: {error}") from None
        controller = controllers.get(service) if config is None else Controller(config)
        if controller is None:
            raise ValueError(f"line {number} is a decision before any configuration: give one with --config")
        again = PLAN.dump_python(controller.tick(snapshot), mode="json")
        fields = {name: (logged.get(name), again[name]) for name in again if again[name] != logged.get(name)}
        yield Difference(line=number, service=service, now_s=snapshot.now_s, fields=fields) if fields else None


def load_lines(path: Path) -> list[str]:
    """The lines of a log file.

    Raises:
        ValueError: it cannot be read.
    """
    try:
        return path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from None
