"""The requests that Tandem is fuzzed with: HTTP that is well-formed or not, with API keys that are right or wrong."""

import json
from collections.abc import Mapping
from dataclasses import replace

from hypothesis import strategies as st

from tests.lab.fuzz.hostile import HOSTILE, hostile
from tests.lab.fuzz.raw_bodies import bulk, raw_bodies
from tests.lab.fuzz.raw_wires import END, HOST, raw_wires
from tests.lab.fuzz.routes import API_ROUTES, METRICS_PORT, OTHER_ROUTE, POOLING_ROUTES, Body, route_of, valid_body
from tests.lab.fuzz.wire import Request, post

Requests = st.SearchStrategy[Request]
# A header line with an API key, and whether the endpoint accepts it.
Authorization = tuple[str, bool]
Authorizations = st.SearchStrategy[Authorization]

# Nearly all clients call these routes: a large share of the requests goes there. The others have vLLM's own code.
_MAIN_ROUTES = ("/v1/chat/completions", "/v1/completions")
# A page of this site may call the endpoint that is fuzzed.
PAGE_ORIGIN = "https://pages.example"
# Methods and hosts that well-formed HTTP may have here; the endpoint must answer these in OpenAI's shape.
_PLAIN_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})
_PLAIN_HOSTS = ("127.0.0.1", "127.0.0.1:0")
# Share of requests that carry a right key; the others test the refusals.
_RIGHT_KEY_FRAC = 0.9
_WRONG_KEY_LINES = ["", "Authorization: \r\n", "Authorization: Bearer\r\n", "Authorization: Bearer \xff\r\n",
                    "Authorization: Basic eDp5\r\n", f"Authorization: Bearer {'k' * 1000}\r\n",
                    "Authorization: Bearer tk-\r\n"]  # fmt: skip
_CODING_LINES = ["", "Content-Encoding: gzip\r\n", "Content-Encoding: br\r\n", "Accept: image/png\r\n",
                 "Accept-Encoding: *;q=0\r\n"]  # fmt: skip


def requests(
    model: str, bodies: Mapping[str, st.SearchStrategy[Body]], *, key: str | None, is_deep: bool, max_bulk_bytes: int
) -> Requests:
    """Requests of every kind.

    Args:
        model: the name that the endpoint serves.
        bodies: by the path of a route.
        key: an API key that the endpoint knows; ``None``: the endpoint needs none.
        is_deep: nearly all of the requests are JSON bodies.
        max_bulk_bytes: length of the longest bodies.
    """
    authorizations = _authorizations(key)
    valid = {route: json.dumps(valid_body(route, model, "x", 4)).encode() for route in bodies}
    headers = st.sampled_from([""] * 30 + HOSTILE["post_header"])
    kinds: list[Requests] = []
    for route, drawn in bodies.items():
        raws = drawn.map(lambda body: json.dumps(body, default=str).encode())  # schemathesis marks some bytes
        kinds += [_posts(route, raws, authorizations, headers, kind="json")] * _share(route, is_deep=is_deep)
    for routes, share in ((_MAIN_ROUTES, 2), (tuple(bodies.keys() - set(_MAIN_ROUTES)), 5)):
        kinds += _broken([(route, valid[route]) for route in sorted(routes)], authorizations, max_bulk_bytes) * share
    # The other kinds of requests reach the routes with bodies only. Hypothesis varies the bodies that it has drawn, so
    # these are more than their share.
    without_body = [route for route in API_ROUTES if route not in bodies]
    own_paths = st.sampled_from([*API_ROUTES, *without_body * 2]).flatmap(lambda route: _filled(route, model))
    kinds += [_gets(own_paths, authorizations)] * (10 if is_deep else 40)
    kinds += [_preflights(own_paths, has_key=key is None)] * (2 if is_deep else 8)
    kinds += [_to_metrics_port(_gets(st.just("/metrics"), authorizations))] * (1 if is_deep else 6)
    kinds.append(_to_metrics_port(_hostile("/metrics", b"{}", authorizations)))
    return st.sampled_from(kinds).flatmap(lambda kind: kind)


def _share(route: str, *, is_deep: bool) -> int:
    """How many of the requests are JSON bodies of this route."""
    if route in _MAIN_ROUTES:
        return 36 if is_deep else 12
    return 1 if route in POOLING_ROUTES else 6 if is_deep else 2


def _broken(places: list[tuple[str, bytes]], authorizations: Authorizations, max_bulk_bytes: int) -> list[Requests]:
    """Bodies and HTTP that are wrong as bytes; ``places``: routes, each with a valid body."""
    place = st.sampled_from(places)
    coding_lines, no_line = st.sampled_from(_CODING_LINES), st.just("")
    return [
        *[place.flatmap(lambda at: _posts(at[0], raw_bodies(at[1]), authorizations, coding_lines, kind="bytes"))] * 4,
        *[place.flatmap(lambda at: _hostile(*at, authorizations))] * 3,
        place.flatmap(lambda at: _posts(at[0], bulk(at[1], max_bulk_bytes), authorizations, no_line, kind="bulk")),
        place.flatmap(lambda at: _of_no_json(*at, authorizations)),
    ]


def _filled(route: str, model: str) -> st.SearchStrategy[str]:
    """Paths of a route, with good and bad names in the place of its parameter."""
    name, _, rest = route.partition("{")[2].partition("}")
    before = route.partition("{")[0]
    if not name:
        return st.just(route)
    names = st.just(model) | hostile("id") if name == "model" else hostile("id")
    return names.map(lambda value: before + value.partition("?")[0] + rest + "".join(value.partition("?")[1:]))


def bearer(key: str | None) -> str:
    """The header line that carries a key; empty without one."""
    return "" if key is None else f"Authorization: Bearer {key}\r\n"


def _authorizations(key: str | None) -> Authorizations:
    """Mostly the right key. An endpoint that needs none accepts every line."""
    wrong: list[Authorization] = [(line, key is None) for line in _WRONG_KEY_LINES]
    right: list[Authorization] = [(bearer(key), True)]
    if key is not None:
        values = [key, f"Basic {key}", f"Bearer {key[:-1]}", f"Bearer {key} {key}"]
        wrong += [(f"Authorization: {value}\r\n", False) for value in values] + [(f"X-Api-Key: {key}x\r\n", False)]
        right += [(f"authorization:bearer   {key} \r\n", True), (f"X-Api-Key: {key}\r\n", True)]
    copies = round(len(wrong) * _RIGHT_KEY_FRAC / (1.0 - _RIGHT_KEY_FRAC) / len(right))
    return st.sampled_from(right * copies + wrong)


def _posts(
    route: str,
    raws: st.SearchStrategy[bytes],
    authorizations: Authorizations,
    headers: st.SearchStrategy[str],
    *,
    kind: str,
) -> Requests:
    def one(raw: bytes, authorization: Authorization, header: str) -> Request:
        line, has_key = authorization
        return post(route, raw, kind=kind, header=line + header, has_key=has_key)

    return st.builds(one, raws, authorizations, headers)


def _of_no_json(route: str, valid: bytes, authorizations: Authorizations) -> Requests:
    """A valid body that says that it is no JSON: a page of another site could send it without being asked."""

    def one(authorization: Authorization, content_type: str) -> Request:
        line, has_key = authorization
        return post(route, valid, kind="media", header=line, has_key=has_key, content_type=content_type)

    return st.builds(one, authorizations, hostile("media"))


def _preflights(paths: st.SearchStrategy[str], *, has_key: bool) -> Requests:
    """What a browser asks before a page of another site may call the endpoint; it never sends a key."""

    def one(path: str, origin: str, method: str, headers: str) -> Request:
        asked = f"Access-Control-Request-Headers: {headers}\r\n" if headers else ""
        line = (
            f"OPTIONS {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nOrigin: {origin}\r\n"
            f"Access-Control-Request-Method: {method}\r\n{asked}\r\n"
        )
        parts = (line.encode("latin-1"),)
        is_http = _is_plain(path) and line.isascii()
        return Request(route=route_of(path), kind="preflight", parts=parts, is_http=is_http, has_key=has_key)

    return st.builds(one, paths, hostile("origin"), hostile("requested_method"), hostile("requested_headers"))


def _gets(own_paths: st.SearchStrategy[str], authorizations: Authorizations) -> Requests:
    """Requests without a body, of any method, most of them to the server's own paths."""

    def one(method: str, path: str, authorization: Authorization, header: str, host: str) -> Request:
        key, has_key = authorization
        line = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{key}{header}\r\n"
        is_http = (
            method in _PLAIN_METHODS
            and _is_plain(path)
            and host in _PLAIN_HOSTS
            and "Expect" not in header
            and line.isascii()
            and "\x7f" not in line
        )
        parts = (line.encode("latin-1"),)
        return Request(route=route_of(path), kind="get", parts=parts, is_http=is_http, has_key=has_key)

    # Hosts that no URL can have are tested too; HAProxy refuses those that are no host at all.
    hosts = st.sampled_from([_PLAIN_HOSTS[0]] * 20 + HOSTILE["host"])
    methods = st.sampled_from(["GET"] * 12 + HOSTILE["method"])
    paths = st.sampled_from([own_paths] * 6 + [hostile("path")]).flatmap(lambda kind: kind)
    return st.builds(one, methods, paths, authorizations, _headers(), hosts)


def _is_plain(path: str) -> bool:
    """Whether HTTP may have this path, and the endpoint gets it: paths below ``/-/`` are Serve's own."""
    return path.startswith("/") and not path.startswith("/-/") and not set(path) & set(" #")


def _headers() -> st.SearchStrategy[str]:
    return st.just("") | hostile("post_header") | hostile("header")


def _hostile(route: str, valid: bytes, authorizations: Authorizations) -> Requests:
    """Bytes that are no HTTP or contradict themselves; and clients that leave, or send a valid request in pieces."""

    def broken(wire: bytes, authorization: Authorization, header: str) -> Request:
        line, has_key = authorization
        wire = wire.replace(HOST, HOST + line.encode("latin-1"))
        wire = wire.replace(END, header.encode("latin-1") + END, 1)
        return Request(route=route, kind="wire", parts=(wire,), is_http=False, has_key=has_key)

    def noise(raw: bytes) -> Request:
        return Request(route=OTHER_ROUTE, kind="wire", parts=(raw,), is_http=False)

    def half(whole: Request, frac: float) -> Request:
        (raw,) = whole.parts
        part = raw[: 1 + int(frac * (len(raw) - 1))]
        return replace(whole, kind="half", parts=(part,), is_abandoned=True, is_http=False)

    def abandoned(whole: Request, wait_s: float) -> Request:
        return replace(whole, kind="gone", parts=(*whole.parts, b""), pause_s=wait_s, is_abandoned=True)

    def slow(whole: Request, pieces: int) -> Request:
        (raw,) = whole.parts
        width = -(-len(raw) // pieces)
        parts = tuple(raw[at : at + width] for at in range(0, len(raw), width))
        return replace(whole, kind="slow", parts=parts, pause_s=0.05)

    wholes = _posts(route, st.just(valid), authorizations, st.just(""), kind="whole")
    wires: Requests = st.builds(broken, st.sampled_from(raw_wires(route, valid)), authorizations, _headers())
    others: list[Requests] = [
        st.builds(noise, st.binary(min_size=1, max_size=300)),
        st.builds(half, wholes, st.floats(0.0, 1.0, exclude_max=True)),
        st.builds(abandoned, wholes, st.sampled_from([0.0, 0.0, 0.02, 0.1])),
        st.builds(slow, wholes, st.integers(2, 12)),
    ]
    return st.sampled_from([wires] * 6 + others).flatmap(lambda kind: kind)


def _to_metrics_port(requests: Requests) -> Requests:
    return requests.map(lambda request: replace(request, route=METRICS_PORT))
