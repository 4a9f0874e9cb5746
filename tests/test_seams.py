"""Every use of a private part is on docs/seams.md and has its contract test."""

import re
from pathlib import Path

from tests.seams import PAGE, page, registries, seams

TESTS = Path(__file__).parent


def test_page_agrees_with_the_docstrings() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "write it again: make docs"


def test_every_seam_has_its_contract_test() -> None:
    tests = {
        name
        for path in TESTS.rglob("test_*.py")
        for name in re.findall(r"^(?:async )?def (test_contract_\w+)\(", path.read_text(encoding="utf-8"), re.M)
    }
    names = [seam.test for seam in seams()]
    assert len(names) > 20
    assert sorted(names) == sorted(tests)


def test_module_level_state_says_what_it_holds_and_why() -> None:
    found = list(registries())
    assert {"_LOGGERS", "VICTIMS", "_ROUTERS", "CURRENT_TRACE"} <= {one.name for one in found}
    assert [one.name for one in found if not one.reason] == []
