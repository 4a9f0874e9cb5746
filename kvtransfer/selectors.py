"""Ray's label selectors: which values of a node label ``v``, ``!v``, ``in(a,b)`` and ``!in(a,b)`` allow (pure)."""

import re

# The syntax of a Kubernetes label value, which Ray shares.
_LABEL_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
# One of the four forms.
_SELECTOR = re.compile(r"(?P<not>!?)(?:in\((?P<list>[^()]*)\)|(?P<one>[^()!]*))")


def values(selector: str) -> tuple[frozenset[str], bool]:
    """The values that a selector names, and whether a node must have one of them (``True``) or none (``False``).

    Raises:
        ValueError: the selector has none of the four forms.
    """
    match = _SELECTOR.fullmatch(selector.strip())
    if match is None:
        raise ValueError(f"{selector!r} is no label selector: give 'v', '!v', 'in(a,b)' or '!in(a,b)'")
    listed = match["one"] if match["list"] is None else match["list"]
    return frozenset(listed.split(",")), not match["not"]


def matches(value: str | None, selector: str) -> bool:
    """Whether a node with this value of a label satisfies the selector; ``None``: the node has no such label.

    As in Ray, a node without the label satisfies only a negation, and a space in a list is part of a value.
    """
    named, is_wanted = values(selector)
    return (value in named) == is_wanted


def is_plain_label(selector: str) -> bool:
    """Whether a selector is one value, and not an expression such as ``!v`` or ``in(a,b)``."""
    return _LABEL_VALUE.fullmatch(selector) is not None
