"""The requests that Tandem is fuzzed with: HTTP that is well-formed or not, with API keys that are right or wrong."""

import json
from collections.abc import Mapping
from dataclasses import replace

from hypothesis import strategies as st

from tests.lab.fuzz.bodies import Body
from tests.lab.fuzz.hostile import HOSTILE, hostile
from tests.lab.fuzz.raw_wires import END, HOST, raw_wires
from tests.lab.fuzz.wire import API_ROUTES, METRICS_PORT, OTHER_ROUTE, Request, post

Requests = st.SearchStrategy[Request]
# A header line with an API key, and whether the endpoint accepts it.
Authorization = tuple[str, bool]
Authorizations = st.SearchStrategy[Authorization]

_ROUTES = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
# Methods and hosts that well-formed HTTP may have here; the endpoint must answer these in OpenAI's shape.
_PLAIN_METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})
_PLAIN_HOSTS = ("127.0.0.1", "127.0.0.1:0")
# Share of requests that carry a right key; the others test the refusals.
_RIGHT_KEY_FRAC = 0.9
_WRONG_KEY_LINES = ["", "Authorization: \r\n", "Authorization: Bearer\r\n", "Authorization: Bearer \xff\r\n",
                    "Authorization: Basic eDp5\r\n", f"Authorization: Bearer {'k' * 1000}\r\n",
                    "Authorization: Bearer tk-\r\n"]  # fmt: skip
# Bodies that are no JSON object.
_NO_OBJECTS = [b"", b"null", b"1", b'"x"', b"[]", b"[1]", b"{}", b"\x00", b"\xff\xfe", b"[" * 100_000, b" " * 70_000,
               b"{" * 9]  # fmt: skip
# Values that JSON, UTF-8 or a double cannot have, or only just.
_ODD_VALUES = [rb'"\ud800"', rb'"a\udFFFb"', b'"\xed\xa0\x80"', b'"\xff"', b'"\xc0\x80"', b"NaN", b"-Infinity",
               b"1e999", b"-1e999", b"9" * 5000, b"1" * 4000, b"01", b"0x1", b"'x'", b"undefined", b'"\x00"', b'"\n"',
               b"1.", b"[1,]", b'{"a":1,"a":2}', b'"\\u0000"', b"/**/1", b""]  # fmt: skip
_ODD_KEYS = [b"user", b"stop", b"cache_salt", b"messages", b"prompt", b"model", b"seed", b"max_tokens", b"x"]
_DEEP_KEYS = [b"x", b"logit_bias", b"stop", b"tools", b"vllm_xargs", b"chat_template_kwargs"]
_CODINGS = ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be", "utf-7"]
_CODING_LINES = ["", "Content-Encoding: gzip\r\n", "Content-Encoding: br\r\n", "Accept: image/png\r\n",
                 "Accept-Encoding: *;q=0\r\n"]  # fmt: skip
# Fields that can be long lists of small things: the key, the opening, one more of them, the closing.
_BULK = [(b"prompt", b"[1e9", b",1e9", b"]"), (b"prompt", b"[[1]", b",[1]", b"]"), (b"prompt", b'["x"', b',"x"', b"]"),
         (b"stop", b'["x"', b',"x"', b"]"), (b"bad_words", b'["x"', b',"x"', b"]"), (b"user", b'["', b"x", b'"]'),
         (b"stop_token_ids", b"[1", b",1", b"]"), (b"allowed_token_ids", b"[1", b",1", b"]"),
         (b"logprob_token_ids", b"[7", b",7", b"]"), (b"tools", b"[{}", b",{}", b"]"),
         (b"messages", b'[{"role":"user","content":"x"}', b',{"role":"user","content":"x"}', b"]")]  # fmt: skip
# Lengths of bulk bodies, to both sides of the endpoint's limit of 32 MiB.
_BULK_BYTES = (2_000, 20_000, 200_000, 2 << 20, 8 << 20, 31 << 20, 40 << 20)


def requests(
    model: str, bodies: Mapping[str, st.SearchStrategy[Body]], *, key: str | None, is_deep: bool, max_bulk_bytes: int
) -> Requests:
    """Requests of every kind.

    Args:
        model: the name that the endpoint serves.
        bodies: by endpoint, ``chat`` and ``completions``.
        key: an API key that the endpoint knows; ``None``: the endpoint needs none.
        is_deep: nearly all of the requests are JSON bodies.
        max_bulk_bytes: length of the longest bodies.
    """
    authorizations = _authorizations(key)
    kinds: list[Requests] = []
    for endpoint, drawn in bodies.items():
        route = _ROUTES[endpoint]
        prompt: Body = {"messages": [{"role": "user", "content": "x"}]} if endpoint == "chat" else {"prompt": "x"}
        valid = json.dumps({"model": model, "max_tokens": 4, **prompt}).encode()
        raws = drawn.map(lambda body: json.dumps(body, default=str).encode())  # schemathesis marks some bytes
        headers = st.sampled_from([""] * 30 + HOSTILE["post_header"])
        kinds += [_posts(route, raws, authorizations, headers, kind="json")] * (36 if is_deep else 12)
        coding_lines = st.sampled_from(_CODING_LINES)
        kinds += [_posts(route, _raw_bodies(valid), authorizations, coding_lines, kind="bytes")] * 4
        kinds += [_hostile(route, valid, authorizations)] * 3
        kinds.append(_posts(route, _bulk(valid, max_bulk_bytes), authorizations, st.just(""), kind="bulk"))
    own_paths = ["/v1/models", f"/v1/models/{model}", "/health", "/metrics", *_ROUTES.values()]
    kinds += [_gets(own_paths, authorizations)] * (2 if is_deep else 10)
    kinds += [_to_metrics_port(_gets(["/metrics"] * len(own_paths), authorizations))] * (1 if is_deep else 3)
    kinds.append(_to_metrics_port(_hostile("/metrics", b"{}", authorizations)))
    return st.sampled_from(kinds).flatmap(lambda kind: kind)


def bearer(key: str | None) -> str:
    """The header line that carries a key; empty without one."""
    return "" if key is None else f"Authorization: Bearer {key}\r\n"


def _authorizations(key: str | None) -> Authorizations:
    """Mostly the right key. An endpoint that needs none accepts every line."""
    wrong: list[Authorization] = [(line, key is None) for line in _WRONG_KEY_LINES]
    right: list[Authorization] = [(bearer(key), True)]
    if key is not None:
        values = [key, f"Basic {key}", f"Bearer {key[:-1]}", f"Bearer {key} {key}"]
        wrong += [(f"Authorization: {value}\r\n", False) for value in values] + [(f"X-Api-Key: {key}\r\n", False)]
        right += [(f"authorization:bearer   {key} \r\n", True)]
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


def _raw_bodies(valid: bytes) -> st.SearchStrategy[bytes]:
    """Bodies that are no JSON, or JSON that no text can be; ``valid``: a valid body."""

    def with_field(key: bytes, value: bytes) -> bytes:
        return valid[:-1] + b', "%s": %s}' % (key, value)

    def nested(key: bytes, depth: int, opening: bytes, closing: bytes) -> bytes:
        return with_field(key, opening * depth + b"0" + closing * depth)

    positions, depths = st.integers(0, len(valid) - 1), st.sampled_from([50, 99, 150, 2000, 200_000])
    return st.one_of(
        st.sampled_from(_NO_OBJECTS),
        st.binary(max_size=200),
        positions.map(lambda at: valid[:at]),
        st.builds(lambda at, byte: valid[:at] + bytes([byte]) + valid[at + 1 :], positions, st.integers(0, 255)),
        st.builds(with_field, st.sampled_from(_ODD_KEYS), st.sampled_from(_ODD_VALUES)),
        st.builds(nested, st.sampled_from(_DEEP_KEYS), depths, st.just(b"["), st.just(b"]")),
        st.builds(nested, st.sampled_from(_DEEP_KEYS), depths, st.just(b'{"a":'), st.just(b"}")),
        st.builds(
            lambda coding, text: (valid[:-1].decode() + f', "user": "{text}"}}').encode(coding, "surrogatepass"),
            st.sampled_from(_CODINGS),
            st.sampled_from(["x", "é", "\ud800", "\udfff", "👩"]),
        ),
    )


def _bulk(valid: bytes, max_bytes: int) -> st.SearchStrategy[bytes]:
    """Bodies with a list of many small things."""

    def one(field: tuple[bytes, bytes, bytes, bytes], size_bytes: int) -> bytes:
        key, opening, more, closing = field
        return valid[:-1] + b', "%s": ' % key + opening + more * (size_bytes // len(more)) + closing + b"}"

    sizes = st.sampled_from([size for size in _BULK_BYTES if size <= max_bytes])
    return st.builds(one, st.sampled_from(_BULK), sizes)


def _gets(own_paths: list[str], authorizations: Authorizations) -> Requests:
    """Requests without a body, of any method, most of them to the server's own paths."""

    def one(method: str, path: str, authorization: Authorization, header: str, host: str) -> Request:
        key, has_key = authorization
        line = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{key}{header}\r\n"
        is_http = (
            method in _PLAIN_METHODS
            and path.startswith("/")
            and not path.startswith("/-/")  # Serve's own
            and not set(path) & set(" #")
            and host in _PLAIN_HOSTS
            and "Expect" not in header
            and line.isascii()
            and "\x7f" not in line
        )
        parts = (line.encode("latin-1"),)
        return Request(route=_route(path), kind="get", parts=parts, is_http=is_http, has_key=has_key)

    # Hosts that no URL can have are tested too; HAProxy refuses those that are no host at all.
    hosts = st.sampled_from([_PLAIN_HOSTS[0]] * 20 + HOSTILE["host"])
    methods = st.sampled_from(["GET"] * 12 + HOSTILE["method"])
    return st.builds(one, methods, st.sampled_from(own_paths * 6 + HOSTILE["path"]), authorizations, _headers(), hosts)


def _route(path: str) -> str:
    plain = path.partition("?")[0]
    if plain in API_ROUTES:
        return plain
    return "/v1/models/{model}" if plain.startswith("/v1/models/") else OTHER_ROUTE


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
