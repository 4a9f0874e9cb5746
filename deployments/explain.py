"""Text of a configuration's errors, in one line: each field, its value and the fix (pure)."""

from typing import Any

from pydantic import ValidationError

from autoscale.policies import POLICIES

# Parts of pydantic's locations that name a member of the union of policies; no configuration contains them.
_TAGS = {("policy", kind) for kind in POLICIES}


def explain(error: ValidationError, root: tuple[str | int, ...] = ()) -> str:
    """Every problem of a configuration, separated by semicolons; ``root`` is left out of each location."""
    items = error.errors(include_url=False)
    problems = []
    for item in items:
        loc = item["loc"]
        # pydantic also counts a list's valid items only: one wrong group would make the list "too short".
        if item["type"] == "too_short" and any(other["loc"][: len(loc)] == loc for other in items if other is not item):
            continue
        if loc[: len(root)] == root:
            loc = loc[len(root) :]
        loc = tuple(part for before, part in zip(("", *loc), loc, strict=False) if (before, part) not in _TAGS)
        where = ".".join(str(part) if str(part).isprintable() else repr(part) for part in loc) or "args"
        message = str(item["msg"]).removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            message = "no such field; remove it or check its spelling"
        elif item["type"] == "union_tag_not_found":
            message = f"kind is missing: give one of {', '.join(POLICIES)}"
        elif item["type"] == "union_tag_invalid":
            message = f"kind {item['ctx']['tag']!r} is unknown: give one of {item['ctx']['expected_tags']}"
        elif item["type"] == "missing":
            message = "is required; add it"
        elif not isinstance(item["input"], dict) or item["type"].endswith("_type"):
            message = f"{message}, got {_shown(item['input'])}"
        problems.append(f"{where}: {message}")
    return "; ".join(problems)


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.80}"
    except (RecursionError, ValueError):  # nested too deeply, or an integer of more than 4300 digits
        return f"an unprintable {type(value).__name__}"
