"""Label selectors mean here what they mean to Ray."""

import pytest

from kvtransfer.selectors import matches

CASES = [
    ("a", "a", True),
    ("b", "a", False),
    (None, "a", False),
    ("a", "!a", False),
    ("b", "!a", True),
    (None, "!a", True),
    ("a", "in(a,b)", True),
    ("c", "in(a,b)", False),
    (None, "in(a,b)", False),
    ("a", "!in(a,b)", False),
    ("c", "!in(a,b)", True),
    (None, "!in(a,b)", True),
    ("b", "in(a, b)", False),
]


@pytest.mark.parametrize(("value", "selector", "is_match"), CASES)
def test_what_matches(value: str | None, selector: str, is_match: bool) -> None:
    assert matches(value, selector) is is_match


@pytest.mark.parametrize("selector", ["in(a", "a)", "in(in(a))", "!!a"])
def test_what_is_no_selector_is_named(selector: str) -> None:
    with pytest.raises(ValueError, match="is no label selector: give 'v', '!v'"):
        matches("a", selector)
