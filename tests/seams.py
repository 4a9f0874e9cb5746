"""The table of docs/seams.md, from the docstrings of the functions that touch private parts: ``make docs`` writes it.

Such a docstring has a paragraph "Needs: ..." and a line "Without it: ...". Its contract test is named after the module
and the function: ``test_contract_<module>_<function>``.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("kvtransfer", "router", "autoscale", "deployments", "serve_app")
PAGE = ROOT / "docs" / "seams.md"

_HEAD = """# Seams

Tandem uses and replaces private parts of Ray Serve {ray}, vLLM {vllm} and NIXL {nixl}. The versions are pinned, since
any release may move these parts. Each use is one function; its contract test fails when the private part moves. This
page is written from the docstrings of those functions (`make docs`).

| function | needs | without it |
|---|---|---|
"""


_REGISTRIES = """
## Registries of a process

Code that runs in a process of Ray, Serve or vLLM cannot always be handed what it needs. These module-level names hold
it instead; a test finds all of them. Prometheus' own registry holds the metrics of `deployments/metrics.py`.

| name | what it holds, and why |
|---|---|
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seam:
    """One function that touches private parts.

    Attributes:
        path: its file, from the root.
        name: the function, with its class if it has one; empty for a module.
        needs: the private parts.
        without: what happens when they have moved.
    """

    path: str
    name: str
    needs: str
    without: str

    @property
    def test(self) -> str:
        """The name of its contract test."""
        parts = [Path(self.path).stem, *(part.strip("_") for part in self.name.split("."))]
        words = "_".join(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", part).lower() for part in parts if part)
        return f"test_contract_{words}"


def seams() -> Iterator[Seam]:
    """Every seam, by file and line."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield from _seams_of(path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8")), "")


def _seams_of(path: str, node: ast.Module | ast.ClassDef, owner: str) -> Iterator[Seam]:
    if isinstance(node, ast.Module):
        yield from _seam_in(path, "", ast.get_docstring(node))
    for child in node.body:
        if isinstance(child, ast.ClassDef):
            yield from _seam_in(path, child.name, ast.get_docstring(child))
            yield from _seams_of(path, child, child.name)
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _seam_in(path, f"{owner}.{child.name}".lstrip("."), ast.get_docstring(child))


def _seam_in(path: str, name: str, docstring: str | None) -> Iterator[Seam]:
    text = docstring or ""
    needs = re.search(r"^Needs: (.*?)(?=^Without it:)", text, re.M | re.S)
    if needs is None:
        return
    without = re.search(r"^Without it: (.*?)(?=\n\n|\Z)", text, re.M | re.S)
    assert without is not None, f"{path}: {name} says what it needs, but not what happens without it"
    yield Seam(path=path, name=name, needs=_one_line(needs[1]), without=_one_line(without[1]))


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("``", "`").replace("|", "\\|")


@dataclass(frozen=True, slots=True, kw_only=True)
class Registry:
    """Module-level state of a process; ``reason``: the comment above it, empty if there is none."""

    path: str
    name: str
    reason: str


def registries() -> Iterator[Registry]:
    """All module-level state of the product: empty containers, context variables, objects that can change."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            yield from _registries_of(path.relative_to(ROOT).as_posix(), ast.parse(text), text.splitlines())


def _registries_of(path: str, module: ast.Module, lines: list[str]) -> Iterator[Registry]:
    changing = {
        node.name
        for node in module.body
        if isinstance(node, ast.ClassDef)
        and not node.bases
        and "frozen=True" not in "".join(map(ast.unparse, node.decorator_list))
    }
    for node in module.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        value = node.value
        is_empty = isinstance(value, ast.Dict | ast.List) and not ast.unparse(value).strip("[]{}")
        made_by = ast.unparse(value.func) if isinstance(value, ast.Call) else None
        if is_empty or made_by in {"ContextVar", *changing}:
            above = node.lineno - 1
            while lines[above - 1].startswith("# "):
                above -= 1
            comment = " ".join(line.removeprefix("# ") for line in lines[above : node.lineno - 1])
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            reason = comment.removeprefix("Registry: ") if comment.startswith("Registry: ") else ""
            yield Registry(path=path, name=ast.unparse(target), reason=reason)


def page() -> str:
    """The whole page."""
    pins = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    versions = {name: re.search(rf'"{dist}==([\d.]+)"', pins) for name, dist in _PINS.items()}
    head = _HEAD.format(**{name: match[1] for name, match in versions.items() if match is not None})
    rows = (
        f"| `{seam.path}` {f'`{seam.name}`' if seam.name else ''} | {seam.needs} | {seam.without} |" for seam in seams()
    )
    states = (f"| `{one.path}` `{one.name}` | {_one_line(one.reason)} |" for one in registries())
    return "\n".join([head + "\n".join(rows), _REGISTRIES + "\n".join(states), ""])


_PINS = {"ray": r"ray\[serve\]", "vllm": "vllm", "nixl": "nixl"}

if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
