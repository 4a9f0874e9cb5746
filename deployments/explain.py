"""The errors of a configuration as one line of text: each field, its value and the fix (pure)."""

import difflib
from collections.abc import Iterable

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from autoscale.policies import POLICIES

# Parts of a location that are no fields of the document, each with the part before it: pydantic adds the policy's name
# after ``policy``.
_TAGS = {("policy", kind) for kind in POLICIES}


def explain(error: ValidationError, root: tuple[str | int, ...] = ()) -> str:
    """All errors of a configuration, separated by semicolons; ``root``: beginning of a location that is not shown."""
    items = error.errors(include_url=False)
    problems = []
    for item in items:
        loc = item["loc"]
        # Pydantic counts only the valid items of a list: a wrong group also makes the list "too short".
        if item["type"] == "too_short" and any(other["loc"][: len(loc)] == loc for other in items if other is not item):
            continue
        if loc[: len(root)] == root:
            loc = loc[len(root) :]
        with_part_before = zip(("", *loc), loc, strict=False)
        shown = [part for before, part in with_part_before if (before, part) not in _TAGS]
        where = ".".join(str(part) if str(part).isprintable() else repr(part) for part in shown) or "args"
        problems.append(f"{where}: {_message(item)}")
    return "; ".join(problems)


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The end of a message about an unknown name: the most similar one of ``names``, or an empty text."""
    matches = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def _message(item: ErrorDetails) -> str:
    kind, message, value = item["type"], item["msg"].removeprefix("Value error, "), item["input"]
    if kind == "extra_forbidden":
        return "no such field; remove it or check its spelling"
    if kind == "union_tag_not_found":
        return f"kind is missing: give one of {', '.join(POLICIES)}"
    if kind == "union_tag_invalid":
        return f"kind {item['ctx']['tag']!r} is unknown: give one of {item['ctx']['expected_tags']}"
    if kind == "missing":
        return "is required; add it"
    if isinstance(value, dict) and not kind.endswith("_type"):  # a rule about several fields: the message has them
        return message
    try:
        return f"{message}, got {value!r:.80}"
    except (RecursionError, ValueError):  # nested too deeply, or an integer of more than 4300 digits
        return f"{message}, got an unprintable {type(value).__name__}"
