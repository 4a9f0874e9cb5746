"""The table of the differential test, and every difference by its cause."""

import datetime
import re
import subprocess
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
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

    def used(self) -> list[Expected]:
        """Rules that explain something."""
        rules = [rule for _, found in self.rows for _, rule in found]
        return [rule for rule in EXPECTED if rule in rules]

    def is_failed(self) -> bool:
        """Whether a difference has no reason."""
        return any(counts["unexplained"] for counts in self.counts().values())

    def causes(self) -> list["Cause"]:
        """The unexplained differences that are alike; those of the most shapes first."""
        causes: dict[tuple[str, ...], Cause] = {}
        for shape, found in self.rows:
            for each, rule in found:
                if rule is None:
                    key = each.kind, each.where, *_general(each)
                    causes.setdefault(key, Cause(first=each)).shapes.append(shape)
        return sorted(causes.values(), key=lambda cause: -len(cause.shapes))

    def unexplained_rows(self) -> list[dict[str, Any]]:
        """The unexplained differences as JSON."""
        return [
            {**asdict(cause.first), "routes": cause.routes, "shapes": [shape.name for shape in cause.shapes]}
            for cause in self.causes()
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Differences that are alike: the first of them, and the shapes that show one."""

    first: Difference
    shapes: list[Shape] = field(default_factory=list)

    @property
    def routes(self) -> list[str]:
        """The routes of the shapes, each once."""
        return [*dict.fromkeys(shape.route for shape in self.shapes)]


def _general(each: Difference) -> tuple[str, str]:
    """What both servers have, without what differs from shape to shape.

    Of a status of vLLM only the number counts, and of a message of vLLM nothing: Tandem's tells the cause.
    """
    vllm = each.vllm[:3] if each.kind == "status" else "" if each.where.endswith(".message") else _plain(each.vllm)
    return vllm, _plain(each.tandem)


def _plain(text: str) -> str:
    """A text without numbers, names in quotes, methods and paths."""
    return re.sub(r"'[^']*'|\"[^\"]*\"|[A-Z]+ /\S*|<id \d+>|-?\d+(\.\d+)?", "#", text)


def compared(shapes: Sequence[Shape], vllm: Mapping[str, Answer], tandem: Mapping[str, Answer]) -> Comparison:
    """Compare the answers to all shapes."""
    rows = []
    for shape in shapes:
        one, other = normal(vllm[shape.name]), normal(tandem[shape.name])
        found = differences(one, other, is_determined=shape.is_determined)
        rows.append((shape, [(each, rule_of(shape, each)) for each in found]))
    return Comparison(rows=rows)


def markdown(results: Mapping[str, Comparison], *, is_whole: bool) -> str:
    """The report: counts by route, and the reasons of the expected differences.

    ``is_whole``: whether every shape went to every kind of server, so that each rule must explain something.
    """
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    lines = [
        "# Answers of Tandem and of plain vLLM",
        "",
        f"`make compat-diff` wrote this page on {datetime.date.today()}, commit `{commit}`.",
        "It sends each request to both servers, with the tiny model in float32.",
        "*remote*: a prefill engine computes every prompt. *local*: decode does.",
        "*equal*: status, headers, keys, types, events and all determined values are equal.",
        "Not compared: ids, times, cuts between the pieces of a stream, and `X-Request-Id`, which Tandem alone has.",
        "*expected*: each difference has a reason, see below. *unexplained*: a difference has none.",
    ]
    for kind, result in results.items():
        lines += ["", f"## Prompts: {kind}", "", "| route | shapes | equal | expected | unexplained |"]
        lines.append("|---|---:|---:|---:|---:|")
        counts = result.counts()
        total = sum(counts.values(), Counter[str]())
        for route, count in [*sorted(counts.items()), ("**all**", total)]:
            numbers = (count.total(), count["equal"], count["expected"], count["unexplained"])
            lines.append(f"| {route} | {' | '.join(map(str, numbers))} |")
    lines += ["", "## Expected differences", "", f"| reason | what differs | {' | '.join(results)} |"]
    lines.append(f"|---|---|{'---:|' * len(results)}")
    for rule in EXPECTED:
        used = [sum(rule in [each for _, each in found] for _, found in result.rows) for result in results.values()]
        cells = (rule.reason, f"{rule.kind} {rule.where}".strip(), *map(str, used))
        lines.append(f"| {' | '.join(map(_cell, cells))} |")
    if is_whole:
        lines += ["", *(f"Explains nothing any more, remove the rule: {rule.reason}" for rule in unused(results))]
    return "\n".join(lines).rstrip() + "\n"


def unused(results: Mapping[str, Comparison]) -> list[Expected]:
    """Rules that explain nothing any more, for any kind of server."""
    used = [rule for result in results.values() for rule in result.used()]
    return [rule for rule in EXPECTED if rule not in used]


def unexplained(results: Mapping[str, Comparison]) -> str:
    """The unexplained differences by their causes, with what both servers have."""
    lines = []
    for kind, result in results.items():
        lines += ["", f"## Unexplained, prompts {kind}", "", "| shapes | what | vLLM | Tandem | routes | such as |"]
        lines.append("|---:|---|---|---|---|---|")
        for cause in result.causes():
            named = [shape.name for shape in cause.shapes[:_NAMED]]
            each = cause.first
            cells = (f"{each.kind} {each.where}", each.vllm, each.tandem, ", ".join(cause.routes), "; ".join(named))
            lines.append(f"| {len(cause.shapes)} | {' | '.join(map(_cell, cells))} |")
    return "\n".join(lines).strip() + "\n"


def _cell(text: str) -> str:
    return re.sub(r"[^\x20-\U0010ffff]", " ", text).replace("|", "\\|")[:_CELL]
