"""The table of the differential test, and every difference by its cause."""

import datetime
import subprocess
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.lab.compat.answer import Answer
from tests.lab.compat.compare import Difference, differences
from tests.lab.compat.expected import EXPECTED, Expected, rule_of
from tests.lab.compat.normal import normal
from tests.lab.compat.shape import Shape

# Shapes that the report names for one cause.
_NAMED = 4
# Characters of a cell.
_CELL = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """All shapes with what differs in their answers, and the rule that explains each difference."""

    rows: Sequence[tuple[Shape, Sequence[tuple[Difference, Expected | None]]]]

    def counts(self) -> dict[str, Counter[str]]:
        """For each route the number of shapes that are equal, expected and unexplained."""
        counts: dict[str, Counter[str]] = defaultdict(Counter)
        for shape, found in self.rows:
            rules = [rule for _, rule in found]
            counts[shape.route]["unexplained" if None in rules else "expected" if rules else "equal"] += 1
        return counts

    def unused(self) -> list[Expected]:
        """Rules that explain nothing any more."""
        used = [rule for _, found in self.rows for _, rule in found]
        return [rule for rule in EXPECTED if rule not in used]

    def is_failed(self, *, is_whole: bool) -> bool:
        """Whether a difference has no reason; ``is_whole``: whether every shape was sent, so that each rule is used."""
        return any(counts["unexplained"] for counts in self.counts().values()) or bool(is_whole and self.unused())

    def causes(self) -> list[tuple[tuple[str, Difference], list[str]]]:
        """The unexplained differences that are alike, with the names of their shapes; the most frequent first."""
        causes: dict[tuple[str, Difference], list[str]] = defaultdict(list)
        for shape, found in self.rows:
            for difference, rule in found:
                if rule is None:
                    causes[shape.route, difference].append(shape.name)
        return sorted(causes.items(), key=lambda cause: -len(cause[1]))

    def unexplained_rows(self) -> list[dict[str, Any]]:
        """The unexplained differences as JSON."""
        return [
            {"route": route, "kind": each.kind, "where": each.where, "vllm": each.vllm, "tandem": each.tandem,
             "shapes": names}
            for (route, each), names in self.causes()
        ]  # fmt: skip


def compared(shapes: Sequence[Shape], vllm: Mapping[str, Answer], tandem: Mapping[str, Answer]) -> Comparison:
    """Compare the answers to all shapes."""
    rows = []
    for shape in shapes:
        one, other = normal(vllm[shape.name]), normal(tandem[shape.name])
        found = differences(one, other, is_determined=shape.is_determined)
        rows.append((shape, [(each, rule_of(shape, each)) for each in found]))
    return Comparison(rows=rows)


def markdown(results: Mapping[str, Comparison], *, is_whole: bool) -> str:
    """The whole report."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    lines = [
        "# Answers of Tandem and of plain vLLM",
        "",
        f"Written by `make compat-diff` on {datetime.date.today()}, commit {commit}.",
        "Each request goes to both servers, with the tiny model in float32.",
        "*remote*: a prefill engine computes every prompt; *local*: decode does.",
        "*equal*: status, headers, keys, types, events and all determined values are equal.",
        "*expected*: each difference has a reason, see the end. *unexplained*: a difference has none.",
    ]
    for kind, result in results.items():
        lines += ["", f"### Prompts: {kind}", "", "| route | shapes | equal | expected | unexplained |"]
        lines.append("|---|---:|---:|---:|---:|")
        counts = result.counts()
        total = sum(counts.values(), Counter[str]())
        for route, count in [*sorted(counts.items()), ("**all**", total)]:
            numbers = (count.total(), count["equal"], count["expected"], count["unexplained"])
            lines.append(f"| {route} | {' | '.join(map(str, numbers))} |")
    for kind, result in results.items():
        if causes := result.causes():
            lines += ["", f"## Unexplained, prompts {kind}", "", "| shapes | route | what | vLLM | Tandem | such as |"]
            lines.append("|---:|---|---|---|---|---|")
            for (route, each), names in causes:
                what = f"{each.kind} {each.where}"
                cells = (route, what, each.vllm, each.tandem, "; ".join(names[:_NAMED]))
                lines.append(f"| {len(names)} | {' | '.join(map(_cell, cells))} |")
    lines += ["", "## Expected differences", "", "| reason | what | shapes, by kind of prompts |", "|---|---|---|"]
    for rule in EXPECTED:
        used = {kind: sum(rule in [each for _, each in found] for _, found in result.rows)
                for kind, result in results.items()}  # fmt: skip
        lines.append(f"| {_cell(rule.reason)} | {_cell(f'{rule.kind} {rule.where}')} | {_cell(str(used))} |")
    if is_whole:
        gone = {rule.reason for result in results.values() for rule in result.unused()}
        lines += ["", *(f"No longer needed, remove the rule: {reason}" for reason in sorted(gone))]
    return "\n".join(lines).rstrip() + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")[:_CELL]
