"""The measured points of a run, stored as they come, so that an interrupted run goes on where it ended."""

import json
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any


class Points:
    """Seconds by place, in memory and in a file of JSON lines, of which the first one names the engines.

    A place is what was measured, such as ``decode``, and where, such as batch and context.
    """

    def __init__(self, path: Path, engines: Mapping[str, Any]) -> None:
        """Read the points of an earlier run.

        Args:
            path: the file; it may not exist yet.
            engines: what makes the engines what they are; points of other engines are not used.

        Raises:
            ValueError: the file cannot be read, is none of this kind, or has points of other engines.
        """
        self.path = path
        self.seconds: dict[tuple[Any, ...], float] = {}
        first = json.loads(json.dumps({"engines": dict(engines)}))
        try:
            text = path.read_text(encoding="utf-8") if path.exists() else ""
            # The last line may be half written.
            rows = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
            if rows:
                before = rows[0]["engines"]
                changed = sorted(name for name, value in first["engines"].items() if before.get(name) != value)
                if changed:
                    raise ValueError(f"it has points of other engines ({', '.join(changed)} differ)")
            self.seconds = {tuple(row["at"]): float(row["seconds"]) for row in rows[1:]}
            self.reused = len(self.seconds)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(json.dumps(row) + "\n" for row in rows or [first]), encoding="utf-8")
        except (OSError, KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{path}: {error}: remove the file, or give another --out") from None

    async def measured(self, place: tuple[Any, ...], measure: Callable[[], Awaitable[float]]) -> float:
        """The seconds at a place, measured now if they are not stored yet."""
        if place not in self.seconds:
            self.seconds[place] = round(await measure(), 7)
            with self.path.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps({"at": list(place), "seconds": self.seconds[place]}) + "\n")
        return self.seconds[place]
