"""Ray itself gives the same result for every selector."""

import pytest
from ray._raylet import node_labels_match_selector

from tests.kvtransfer.test_selectors import CASES

pytestmark = pytest.mark.ray


@pytest.mark.parametrize(("value", "selector", "is_match"), CASES)
def test_ray_matches_the_same_nodes(value: str | None, selector: str, is_match: bool) -> None:
    labels = {} if value is None else {"key": value}
    assert node_labels_match_selector(labels, {"key": selector}) is is_match
