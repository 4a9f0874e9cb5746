"""The measured points of a run, stored as they come, so that an interrupted run goes on where it ended."""

import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple


class Timing(NamedTuple):
    """One measurement.

    Attributes:
        seconds: what was measured.
        pace_s: seconds that the engine took for its reference prompts beside it; ``None``: that was not measured.
    """

    seconds: float
    pace_s: float | None = None


class Points:
    """Timings by place, in memory and in a file of JSON lines, of which the first one names the engines.

    A place is what was measured, such as ``decode``, and where, such as batch and context.
    """

    def __init__(self, path: Path, engines: Mapping[str, Any], of: str = "other engines") -> None:
        """Read the points of an earlier run.

        Args:
            path: the file; it may not exist yet.
            engines: what makes the engines what they are; points of other engines are not used.
            of: what points that are refused are of, for the message.

        Raises:
            ValueError: the file cannot be read, is none of this kind, or has points of other engines.
        """
        self.path = path
        self.timings: dict[tuple[Any, ...], Timing] = {}
        first = json.loads(json.dumps({"engines": dict(engines)}))
        try:
            text = path.read_text(encoding="utf-8") if path.exists() else ""
            # The last line may be half written.
            rows = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
            if rows:
                before = rows[0]["engines"]
                now = first["engines"]
                changed = [name for name in sorted(now) if before.get(name) != now[name]]
                if changed:
                    texts = ", ".join(_text(name, before.get(name), now[name]) for name in changed)
                    raise ValueError(f"it has points of {of} (differ: {texts})")
            self.timings = {tuple(row["at"]): _timing(row) for row in rows[1:]}
            self.reused = len(self.timings)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows or [first]), encoding="utf-8")
        except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{path}: {error}: remove the file, or give another --out") from None

    async def measured(self, place: tuple[Any, ...], measure: Callable[[], Awaitable[Timing]]) -> Timing:
        """The timing at a place, measured now if it is not stored yet."""
        if place not in self.timings:
            self.add(place, await measure())
        return self.timings[place]

    def add(self, place: tuple[Any, ...], timing: Timing) -> None:
        """Store a timing, to a tenth of a nanosecond."""
        seconds, pace_s = timing
        timing = Timing(round(seconds, 10), None if pace_s is None else round(pace_s, 10))
        self.timings[place] = timing
        with self.path.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"at": list(place), **timing._asdict()}) + "\n")


def _text(name: str, before: Any, now: Any) -> str:
    """What differs; its values where they are short."""
    return f"{name}, {before} then and {now} now" if isinstance(now, str | int) else name


def _timing(row: Mapping[str, Any]) -> Timing:
    """The timing in a line of the file."""
    pace_s = row.get("pace_s")
    return Timing(float(row["seconds"]), None if pace_s is None else float(pace_s))
