"""What is wrong with the answer to a bad request, and how often."""

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tests.lab.fuzz.wire import METRICS_PORT, OTHER_ROUTE, Reply, Request

# Routes whose answers are JSON objects, and those that need an API key.
_JSON_ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{model}")
_KEYED_ROUTES = (*_JSON_ROUTES, "/metrics")
_DONE = "data: [DONE]"
# An error may repeat a part of the request, but not a long one.
_MAX_ERROR_CHARS = 16_384
# What a finding shows of the answer, in characters, and of the request, in bytes.
_SHOWN_CHARS = 400
_SHOWN_BYTES = 3000


@dataclass(slots=True, kw_only=True)
class Finding:
    """A fault, and the first request that showed it.

    Attributes:
        what: a verdict, or ``crash``, ``memory``, ``held``, ``known`` or ``after``.
        part: the application that was fuzzed.
        text: the answer, or what was seen.
        count: how often it was seen.
        status: status of the answer.
        request: the request, of faults that one request shows.
        suspects: after a crash: the last requests; one of them caused it.
    """

    what: str
    part: str
    text: str
    count: int = 1
    status: int | None = None
    request: Request | None = None
    suspects: list[str] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        """The finding as the report has it."""
        row = {name: getattr(self, name) for name in ("what", "part", "count", "text", "status", "suspects")}
        if self.request is not None:
            row |= {name: getattr(self.request, name) for name in ("kind", "route", "has_key", "seed")}
            row["sent"] = shown(self.request)
        return row


@dataclass(slots=True, kw_only=True)
class Tally:
    """The answers to all requests so far."""

    requests: int = 0
    five_xx: int = 0
    hangs: int = 0
    crashes: int = 0
    by_route: Counter[str] = field(default_factory=Counter)
    by_status: Counter[str] = field(default_factory=Counter)
    by_kind: Counter[str] = field(default_factory=Counter)
    findings: dict[tuple[str, ...], Finding] = field(default_factory=dict)

    def count(self, part: str, request: Request, reply: Reply) -> None:
        """Count one more request and its answer."""
        self.requests += 1
        self.by_route[request.route] += 1
        self.by_kind[request.kind] += 1
        self.by_status[str(reply.status or reply.why)] += 1
        what = verdict(request, reply)
        if what is None:
            return
        self.five_xx += what == "five_xx"
        self.hangs += what == "hang"
        self.find(Finding(what=what, part=part, text=reply.text, status=reply.status, request=request))

    def find(self, new: Finding) -> None:
        """Add a finding; those whose texts differ in numbers and quotations only are one."""
        gist = "".join(char for char in new.text[:120] if char.isalpha() or char == " ")[:60]
        first = self.findings.setdefault((new.what, new.part, new.request.kind if new.request else "", gist), new)
        if first is not new:
            first.count += 1
        new.text = new.text[:_SHOWN_CHARS]


def shown(request: Request) -> str:
    """The first bytes of a request, as text."""
    return b"".join(request.parts)[:_SHOWN_BYTES].decode("latin-1")


def verdict(request: Request, reply: Reply) -> str | None:
    """What is wrong with an answer; ``None``: nothing.

    ``five_xx``: a server's error. ``hang``: no answer, or one that says that it took too long. ``cut``: a part of
    an answer. ``auth``: accepted without a key, or refused with one. ``refused``: for lack of room, though there is
    room. ``shape``: neither what was asked for nor an error in OpenAI's shape.
    """
    if reply.why == "hang":
        return "hang"
    if reply.status is None:
        return "cut" if reply.why == "cut" and request.is_http else None
    if reply.status >= 500:
        return "five_xx"
    if reply.status >= 400:
        return _of_refusal(request, reply)
    if request.is_http and not request.has_key and request.route in _KEYED_ROUTES:
        return "auth"
    if reply.text.startswith("data: "):
        return _of_stream(reply.text)
    return _of_answer(request, reply) if request.is_http and not request.is_head else None


def _of_refusal(request: Request, reply: Reply) -> str | None:
    error = _error(reply.text)
    # The server may wait in vain for the rest of a request that was sent in part.
    if reply.status == 408 and (request.is_http or _is_timeout(error)):
        return "hang"
    # Admission has no limit here that could refuse a request.
    if reply.status == 429 and "ingress.max_bodies_bytes" not in str(error.get("message")):
        return "refused"
    if reply.status == 401 and request.is_http and request.has_key:
        return "auth"
    is_openai = request.is_http and not request.is_head and request.route != METRICS_PORT
    is_right = _is_openai_error(error) and len(reply.text) < _MAX_ERROR_CHARS
    return "shape" if is_openai and not is_right else None


def _of_stream(text: str) -> str | None:
    """The worst verdict on the events of a stream, or that its end is missing."""
    events = [event for event in text.split("\n\n") if event]
    verdicts = {_of_event(event.removeprefix("data: ")) for event in events if event != _DONE}
    if events[-1] != _DONE:
        verdicts.add("shape")
    return next((what for what in ("five_xx", "hang", "shape") if what in verdicts), None)


def _of_event(text: str) -> str | None:
    error = _error(text)
    if error.get("type") == "server_error":
        return "five_xx"
    if _is_timeout(error):
        return "hang"
    return "shape" if _object(text) is None or (error and not _is_openai_error(error)) else None


def _of_answer(request: Request, reply: Reply) -> str | None:
    """The verdict on an answer that is neither a refusal nor a stream."""
    is_right = True
    if reply.status != 200:
        # FastAPI redirects to the path without its last slash.
        is_right = reply.status == 307 and request.route == OTHER_ROUTE
    elif request.route in ("/metrics", METRICS_PORT):
        is_right = "# TYPE tandem_" in reply.text
    elif request.route in _JSON_ROUTES:
        answer = _object(reply.text)
        is_right = bool(answer) and "error" not in (answer or {})
    return None if is_right else "shape"


def _object(text: str) -> dict[str, Any] | None:
    """The JSON object that a text is; ``None``: it is none."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _error(text: str) -> dict[str, Any]:
    """The ``error`` object of an answer; empty without one."""
    error = (_object(text) or {}).get("error")
    return error if isinstance(error, dict) else {}


def _is_openai_error(error: dict[str, Any]) -> bool:
    return bool(error.get("message")) and {"type", "param", "code"} <= error.keys()


def _is_timeout(error: dict[str, Any]) -> bool:
    """Whether the endpoint says that an answer took longer than it may; a stream cannot say it by its status."""
    return error.get("code") == "timeout" or "ingress.request_timeout_s" in str(error.get("message"))
