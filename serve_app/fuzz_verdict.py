"""What is wrong with an answer to a bad request, how often, and with how little of the request."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from serve_app.fuzz_http import Ask, Reply

_MOST_ERROR_CHARS = 16_384
_SHOWN_CHARS = 400
_SENT_CHARS = 3000
_MOST_DEPTH = 4


@dataclass(slots=True, kw_only=True)
class Tally:
    """What came of all requests so far."""

    requests: int = 0
    five_xx: int = 0
    hangs: int = 0
    crashes: int = 0
    by_route: Counter[str] = field(default_factory=Counter)
    by_status: Counter[str] = field(default_factory=Counter)
    by_kind: Counter[str] = field(default_factory=Counter)
    findings: dict[tuple[str, ...], dict[str, Any]] = field(default_factory=dict)

    def count(self, part: str, ask: Ask, reply: Reply) -> None:
        """One more request and its answer."""
        self.requests += 1
        self.by_route[ask.route] += 1
        self.by_kind[ask.kind] += 1
        self.by_status[str(reply.status or reply.why)] += 1
        what = verdict(ask, reply)
        if what is None:
            return
        self.five_xx += what == "five_xx"
        self.hangs += what == "hang"
        self.find(what, part, reply.text, ask, status=reply.status)

    def find(self, what: str, part: str, said: str, ask: Ask | None = None, **more: Any) -> None:
        """One more finding; those that say the same are one."""
        key = (what, part, ask.kind if ask else "", _gist(said))
        known = self.findings.get(key)
        if known is not None:
            known["count"] += 1
            return
        self.findings[key] = {"what": what, "part": part, "count": 1, "said": said[:_SHOWN_CHARS], **more}
        if ask is not None:
            sent = b"".join(ask.parts)[:_SENT_CHARS].decode("latin-1")
            request = {"kind": ask.kind, "route": ask.route, "header": ask.header, "body": ask.body, "sent": sent}
            self.findings[key] |= request


def verdict(ask: Ask, reply: Reply) -> str | None:
    """What is wrong with an answer: ``five_xx``, ``hang``, ``cut`` or ``shape``; ``None`` where nothing is."""
    if reply.why == "hang":
        return "hang"
    if reply.status is None:
        return "cut" if reply.why == "cut" and ask.is_http else None
    if reply.status >= 500:
        return "five_xx"
    if (
        reply.status >= 400
        and ask.is_http
        and not ask.parts[0].startswith(b"HEAD")
        and not _is_openai_error(reply.text)
    ):
        return "shape"
    if reply.status == 200 and "data: " in reply.text[:6] and _stream_fault(reply.text):
        return "five_xx" if '"server_error"' in reply.text else "shape"
    return None


def _is_openai_error(text: str) -> bool:
    try:
        error = json.loads(text)["error"]
        return len(text) < _MOST_ERROR_CHARS and bool(error["message"]) and {"type", "param", "code"} <= error.keys()
    except (ValueError, LookupError, TypeError):
        return False


def _stream_fault(text: str) -> bool:
    """Whether a stream ends with a server's error, or without its end."""
    return not text.rstrip().endswith("data: [DONE]") or '"server_error"' in text


def _gist(said: str) -> str:
    """A message without its numbers and quotations, so that equal faults are one finding."""
    return "".join(char for char in said[:120] if char.isalpha() or char == " ")[:60]


def smaller(value: Any, depth: int = 0) -> Iterator[Any]:
    """The same with one thing less, the largest first: what a body is shrunk by."""
    if depth > _MOST_DEPTH or not isinstance(value, (dict, list)):
        return
    pairs: list[tuple[Any, Any]] = list(value.items() if isinstance(value, dict) else enumerate(value))
    for gone, _ in pairs:
        yield _of(value, [pair for pair in pairs if pair[0] != gone])
    for changed, inner in pairs:
        for less in smaller(inner, depth + 1):
            yield _of(value, [(key, less if key == changed else part) for key, part in pairs])


def _of(like: Any, pairs: list[tuple[Any, Any]]) -> Any:
    return dict(pairs) if isinstance(like, dict) else [part for _, part in pairs]
