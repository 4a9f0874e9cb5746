"""Hostile values: those of ``hostile.json``, and those that are too long to write down."""

import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

_LONG: dict[str, list[Any]] = {
    "text": ["A" * 5000],
    "regex": ["(" * 300 + ")" * 300, "|" * 999],
    "json": [{"type": "object", "properties": {str(n): {"type": "string"} for n in range(300)}}],
    "path": ["/v1/models/" + "a" * 5000, "/v1/models?x=" + "y" * 9000],
    "id": ["resp_" + "a" * 5000],
    "method": ["X" * 200],
    "host": ["h" * 300],
    "post_header": [
        f"X-Request-Id: {'i' * 5000}\r\n",
        f"X-Tandem-Priority: {'p' * 5000}\r\n",
        f"endpoint-load-metrics-format: {'JSON' * 999}\r\n",
        "Endpoint-Load-Metrics-Format: JSON\r\n",
    ],
    "header": [
        f"Cookie: {'a=b; ' * 3000}\r\n",
        f"X-Junk: {'j' * 60_000}\r\n",
        "".join(f"X-{n}: {n}\r\n" for n in range(90)),
        f"traceparent: {'0' * 999}\r\n",
    ],
}


def _load(path: Path) -> dict[str, list[Any]]:
    short: dict[str, list[Any]] = json.loads(path.read_text())
    return {name: values + _LONG.get(name, []) for name, values in short.items()}


HOSTILE = _load(Path(__file__).with_name("hostile.json"))


def hostile(name: str) -> st.SearchStrategy[Any]:
    """One of the hostile values for a place: a key of ``HOSTILE``."""
    return st.sampled_from(HOSTILE[name])
