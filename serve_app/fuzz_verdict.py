"""What is wrong with an answer to a bad request, how often, and with how little of the request."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from serve_app.fuzz_wire import METRICS_PORT, OTHER_ROUTE, Ask, Reply

_KEYED = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{model}", "/metrics")
_JSON_ROUTES = _KEYED[:4]
_DONE = "data: [DONE]"
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
            request = {name: getattr(ask, name) for name in ("kind", "route", "header", "has_key", "body")}
            sent = b"".join(ask.parts)[:_SENT_CHARS].decode("latin-1")
            self.findings[key] |= {**request, "sent": sent}


def verdict(ask: Ask, reply: Reply) -> str | None:
    """What is wrong with an answer; ``None`` where nothing is.

    ``five_xx``: a server's error; ``hang``: no answer, or the endpoint's own that it took too long; ``cut``: part of an
    answer; ``auth``: let in without a key or refused with one; ``refused``: for want of room, though there is room;
    ``shape``: neither what was asked for nor an error in OpenAI's words.
    """
    if reply.why == "hang":
        return "hang"
    if reply.status is None:
        return "cut" if reply.why == "cut" and ask.is_http else None
    if reply.status >= 500:
        return "five_xx"
    if reply.status >= 400:
        return _of_refusal(ask, reply)
    if ask.is_http and not ask.has_key and ask.route in _KEYED:
        return "auth"
    if reply.text.startswith("data: "):
        return _of_stream(reply.text)
    return _of_answer(ask, reply) if ask.is_http and not _is_head(ask) else None


def _of_refusal(ask: Ask, reply: Reply) -> str | None:
    error = _error(reply.text)
    # Of what was wholly sent; others may be waited for in vain.
    if reply.status == 408 and (ask.is_http or _is_timeout(error)):
        return "hang"
    # No limit of admission is in the way.
    if reply.status == 429 and "ingress.max_bodies_bytes" not in str(error.get("message")):
        return "refused"
    if reply.status == 401 and ask.is_http and ask.has_key:
        return "auth"
    has_words = ask.is_http and not _is_head(ask) and ask.route != METRICS_PORT
    return "shape" if has_words and not (_is_openai_error(error) and len(reply.text) < _MOST_ERROR_CHARS) else None


def _of_stream(text: str) -> str | None:
    """A server's error in it, that it took too long, or no end."""
    events = [event for event in text.split("\n\n") if event]
    found = {_of_event(event) for event in events if event != _DONE}
    found.add(None if events[-1] == _DONE else "shape")
    return next((what for what in ("five_xx", "hang", "shape") if what in found), None)


def _of_event(event: str) -> str | None:
    said = _object(event.removeprefix("data: "))
    error = _error(event.removeprefix("data: "))
    if error.get("type") == "server_error":
        return "five_xx"
    if _is_timeout(error):
        return "hang"
    return "shape" if said is None or (error and not _is_openai_error(error)) else None


def _of_answer(ask: Ask, reply: Reply) -> str | None:
    """Of what is no refusal and no stream."""
    if reply.status != 200:
        is_slash = reply.status == 307 and ask.route == OTHER_ROUTE  # FastAPI's own, to the path without its last one
        return None if is_slash else "shape"
    if ask.route in ("/metrics", METRICS_PORT):
        return None if "# TYPE tandem_" in reply.text else "shape"
    if ask.route in _JSON_ROUTES:
        said = _object(reply.text)
        return "shape" if not said or "error" in said else None
    return None


def _is_head(ask: Ask) -> bool:
    return ask.parts[0].startswith(b"HEAD")


def _object(text: str) -> dict[str, Any] | None:
    """The JSON object that a text is, if it is one."""
    try:
        said = json.loads(text)
    except ValueError:
        return None
    return said if isinstance(said, dict) else None


def _error(text: str) -> dict[str, Any]:
    """The error that a text tells of; empty if it does of none."""
    error = (_object(text) or {}).get("error")
    return error if isinstance(error, dict) else {}


def _is_openai_error(error: dict[str, Any]) -> bool:
    return bool(error.get("message")) and {"type", "param", "code"} <= error.keys()


def _is_timeout(error: dict[str, Any]) -> bool:
    """Whether the endpoint says that an answer took longer than it may; in a stream there is no status to say so."""
    return error.get("code") == "timeout" or "ingress.request_timeout_s" in str(error.get("message"))


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
