"""Label selectors match the same values as in Ray."""

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
def test_a_selector_matches_the_values_that_it_allows(value: str | None, selector: str, is_match: bool) -> None:
    assert matches(value, selector) is is_match


@pytest.mark.parametrize("selector", ["in(a", "a)", "in(in(a))", "!!a"])
def test_an_invalid_selector_is_refused_by_name(selector: str) -> None:
    with pytest.raises(ValueError, match="is no label selector: give 'v', '!v'"):
        matches("a", selector)
