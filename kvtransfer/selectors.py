"""Ray's label selectors: ``v``, ``!v``, ``in(a,b)`` and ``!in(a,b)`` (pure)."""

import re

_FORM = re.compile(r"(?P<not>!?)(?:in\((?P<list>[^()]*)\)|(?P<one>[^()!]*))")


def values(selector: str) -> tuple[frozenset[str], bool]:
    """The values that a selector names, and whether it wants one of them (or none).

    Raises:
        ValueError: it is none of the four forms.
    """
    found = _FORM.fullmatch(selector.strip())
    if found is None:
        raise ValueError(f"{selector!r} is no label selector: give 'v', '!v', 'in(a,b)' or '!in(a,b)'")
    listed = found["one"] if found["list"] is None else found["list"]
    return frozenset(listed.split(",")), not found["not"]


def matches(value: str | None, selector: str) -> bool:
    """Whether a node with this value of a label may take what demands the selector; ``None``: it has no such label.

    As in Ray, a label that is not there satisfies only a negation, and a space in a list belongs to its value.
    """
    named, is_wanted = values(selector)
    return (value in named) == is_wanted
