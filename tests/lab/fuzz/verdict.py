"""What is wrong with the answer to a bad request, and how often."""

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from deployments.endpoint.routes import error_form
from tests.lab.fuzz.errors import error_of, json_object
from tests.lab.fuzz.requests import PAGE_ORIGIN
from tests.lab.fuzz.routes import JSON_ROUTES, KEYED_ROUTES, METRICS_PORT, OTHER_ROUTE
from tests.lab.fuzz.streams import is_stream, of_stream
from tests.lab.fuzz.wire import Reply, Request

# Names that only messages between prefill and decode have, and values that no answer may have. An answer may repeat
# what its client has sent.
_INNER = re.compile(
    r'"(?:kv|ec)_transfer_params"\s*:(?!\s*null)|remote_(?:engine_id|block_ids|request_id|host|port)|do_remote_\w+'
    r"|Traceback \(most recent|site-packages/"
)
# Ids of requests and responses.
_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{16,}")
_ALLOWED = "access-control-allow-origin"
_NAME = re.compile(r"\w[\w -]+\w")
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
        """Add a finding; those whose texts differ in ids, numbers and quotations only are one."""
        gist = "".join(char for char in _ID.sub("", new.text[:200])[:120] if char.isalpha() or char == " ")[:60]
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
    room. ``leak``: it has what only Tandem's own processes may see. ``cors``: a page of another site may read it.
    ``media``: a body was accepted that is no JSON by its own words. ``shape``: neither what was requested nor an error
    in the form of its API.
    """
    if reply.why == "hang":
        return "hang"
    if reply.status is None:
        return "cut" if reply.why == "cut" and request.is_http else None
    if reply.status >= 500:
        return "five_xx"
    if _is_leak(request, reply):
        return "leak"
    origin = PAGE_ORIGIN if f"Origin: {PAGE_ORIGIN}\r\n".encode() in request.parts[0] else None
    if reply.headers.get(_ALLOWED, origin) != origin:
        return "cors"
    if request.is_http and request.kind == "preflight":
        return _of_preflight(reply, origin)
    if reply.status >= 400:
        return _of_refusal(request, reply)
    return _of_success(request, reply)


def _is_leak(request: Request, reply: Reply) -> bool:
    """Whether an answer has a name of Tandem's inner messages that its request does not have."""
    sent = b"".join(request.parts).decode("latin-1")
    names = {match[0] for found in _INNER.findall(reply.text) if (match := _NAME.search(found))}
    return any(name not in sent for name in names)


def _of_preflight(reply: Reply, origin: str | None) -> str | None:
    """The verdict on an answer to a browser; ``origin``: the page that may call the endpoint, if it has asked."""
    if reply.headers.get(_ALLOWED) != origin:
        return "cors"
    return (
        None if reply.status == 200 or (reply.status == 400 and reply.text.startswith("Disallowed CORS")) else "shape"
    )


def _of_refusal(request: Request, reply: Reply) -> str | None:
    error = error_of(reply.text, error_form(request.route))
    # The server may wait in vain for the rest of a request that was sent in part.
    if reply.status == 408 and (request.is_http or (error is not None and error.is_late)):
        return "hang"
    # Admission has no limit here that could refuse a request.
    if reply.status == 429 and (error is None or "ingress.max_bodies_bytes" not in error.message):
        return "refused"
    if reply.status == 401 and request.is_http and request.has_key:
        return "auth"
    has_form = request.is_http and not request.is_head and request.route != METRICS_PORT
    is_right = error is not None and error.is_right and len(reply.text) < _MAX_ERROR_CHARS
    return "shape" if has_form and not is_right else None


def _of_success(request: Request, reply: Reply) -> str | None:
    if request.is_http and not request.has_key and request.route in KEYED_ROUTES:
        return "auth"
    if request.kind == "media":
        return "media"
    if is_stream(reply.text):
        return of_stream(reply.text, error_form(request.route))
    return _of_answer(request, reply) if request.is_http and not request.is_head else None


def _of_answer(request: Request, reply: Reply) -> str | None:
    """The verdict on an answer that is neither a refusal nor a stream."""
    is_right = True
    if reply.status != 200:
        # FastAPI redirects to the path without its last slash.
        is_right = reply.status == 307 and request.route == OTHER_ROUTE
    elif request.route in ("/metrics", METRICS_PORT):
        is_right = "# TYPE tandem_" in reply.text
    elif request.route in JSON_ROUTES:
        answer = json_object(reply.text)
        # A response of the Responses API has an ``error`` of its own.
        is_right = bool(answer) and not (answer or {}).get("error")
    return None if is_right else "shape"
