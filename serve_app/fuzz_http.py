"""Which requests Tandem is fuzzed with: well-formed HTTP and not, with API keys that are right and not."""

import json
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from serve_app.fuzz_wire import API_ROUTES, METRICS_PORT, OTHER_ROUTE, Ask, post

# A header line, and whether the endpoint lets in whoever sends it.
Authorization = tuple[str, bool]
Authorizations = st.SearchStrategy[Authorization]

_RIGHT_FRAC = 0.9
_NO_KEYS = ["", "Authorization: \r\n", "Authorization: Bearer\r\n", "Authorization: Bearer \xff\r\n",
            "Authorization: Basic eDp5\r\n", "Authorization: Bearer " + "k" * 1000 + "\r\n",
            "Authorization: Bearer tk-\r\n"]  # fmt: skip


def bearer(key: str | None) -> str:
    """The header line of a key, if there is one."""
    return "" if key is None else f"Authorization: Bearer {key}\r\n"


def _authorizations(key: str | None) -> Authorizations:
    """Mostly the right key; where none is asked for, whatever is sent is right."""
    wrong: list[Authorization] = [(line, key is None) for line in _NO_KEYS]
    right: list[Authorization] = [(bearer(key), True)]
    if key is not None:
        lines = [key, f"Basic {key}", f"Bearer {key[:-1]}", f"Bearer {key} {key}"]
        wrong += [(f"Authorization: {line}\r\n", False) for line in lines] + [(f"X-Api-Key: {key}\r\n", False)]
        right += [(f"authorization:bearer   {key} \r\n", True)]
    rights = round(len(wrong) * _RIGHT_FRAC / (1.0 - _RIGHT_FRAC) / len(right))
    return st.sampled_from(right * rights + wrong)


def _post(route: str, raw: bytes, authorization: Authorization, header: str = "", *, kind: str, **fields: Any) -> Ask:
    line, has_key = authorization
    return post(route, raw, kind=kind, header=line + header, has_key=has_key, **fields)


def _other_json(route: str, valid: bytes, authorizations: Authorizations) -> st.SearchStrategy[Ask]:
    """Bodies that are no JSON, or JSON that no text can be."""
    cut = st.integers(0, len(valid) - 1).map(lambda at: valid[:at])
    flipped = st.builds(
        lambda at, byte: valid[:at] + bytes([byte]) + valid[at + 1 :],
        st.integers(0, len(valid) - 1),
        st.integers(0, 255),
    )

    def nested(opening: bytes, depth: int, key: bytes) -> bytes:
        closing = b"]" if opening == b"[" else b"}"
        return valid[:-1] + b', "%s": ' % key + opening * depth + b"0" + closing * depth + b"}"

    deep = st.builds(
        nested,
        st.sampled_from([b"[", b'{"a":']),
        st.sampled_from([50, 99, 150, 2000, 200_000]),
        st.sampled_from([b"x", b"logit_bias", b"stop", b"tools", b"vllm_xargs", b"chat_template_kwargs"]),
    )
    key = st.sampled_from(["user", "stop", "cache_salt", "messages", "prompt", "model", "seed", "max_tokens", "x"])
    value = st.sampled_from(
        [rb'"\ud800"', rb'"a\udFFFb"', b'"\xed\xa0\x80"', b'"\xff"', b'"\xc0\x80"', b"NaN", b"-Infinity", b"1e999",
        b"-1e999", b"9" * 5000,
         b"1" * 4000, b"01", b"0x1", b"'x'", b"undefined", b'"\x00"', b'"\n"', b"1.", b"[1,]", b'{"a":1,"a":2}',
         b'"\\u0000"', b"/**/1", b""]
    )  # fmt: skip
    put = st.builds(lambda k, v: valid[:-1] + b', "%s": %s}' % (k.encode(), v), key, value)
    coded = st.builds(
        lambda how, text: (valid[:-1].decode() + ', "user": "' + text + '"}').encode(how, "surrogatepass"),
        st.sampled_from(["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be",
            "utf-7"]),
        st.sampled_from(["x", "é", "\ud800", "\udfff", "👩"]),
    )  # fmt: skip
    whole = st.sampled_from(
        [
            b"",
            b"null",
            b"1",
            b'"x"',
            b"[]",
            b"[1]",
            b"{}",
            b"\x00",
            b"\xff\xfe",
            b"[" * 100_000,
            b" " * 70_000,
            b"{" * 9,
        ]
    )
    raws = cut | flipped | deep | put | coded | whole | st.binary(max_size=200)
    types = st.sampled_from(
        [
            "",
            "Content-Encoding: gzip\r\n",
            "Content-Encoding: br\r\n",
            "Accept: image/png\r\n",
            "Accept-Encoding: *;q=0\r\n",
        ]
    )
    return st.builds(
        lambda raw, authorization, header: _post(route, raw, authorization, header, kind="bytes"),
        raws,
        authorizations,
        types,
    )


_BULK = (
    ("prompt", b"[1e9", b",1e9", 4), ("prompt", b"[[1]", b",[1]", 4), ("prompt", b'["x"', b',"x"', 4), ("stop",
    b'["x"', b',"x"', 4),
    ("bad_words", b'["x"', b',"x"', 4), ("stop_token_ids", b"[1", b",1", 2), ("allowed_token_ids", b"[1", b",1", 2),
    ("user", b'["', b"x", 1),
    ("messages", b'[{"role":"user","content":"x"}', b',{"role":"user","content":"x"}', 31), ("tools", b"[{}", b",{}",
    3),
    ("logprob_token_ids", b"[7", b",7", 2),
)  # fmt: skip


def _bulk(route: str, valid: bytes, authorizations: Authorizations, most_bytes: int) -> st.SearchStrategy[Ask]:
    """Lists of many small things, up to the largest body and beyond."""

    def one(what: tuple[str, bytes, bytes, int], authorization: Authorization, size: int) -> Ask:
        name, first, more, width = what
        text = first + more * (size // width)
        end = b'"]' if name == "user" else b"]"
        return _post(route, valid[:-1] + b', "%s": ' % name.encode() + text + end + b"}", authorization, kind="bulk")

    sizes = st.sampled_from(
        [size for size in (2_000, 20_000, 200_000, 2 << 20, 8 << 20, 31 << 20, 40 << 20) if size <= most_bytes]
    )
    return st.builds(one, st.sampled_from(_BULK), authorizations, sizes)


_PATHS = ["/", "//", "/v1", "/v1/", "/v1/models/", "/v1/models/nobody", "/v1/models/a/b/../c", "/v1/models/%00",
    "/v1/models/%ff%fe", "/v1/models/%",
          "/v1/models/%ed%a0%80", "/v1/models/" + "a" * 5000, "/v1/models?x=" + "y" * 9000, "/health?%", "/health/",
          "/metrics/", "/metrics?name[]=x",
          "/v1/completions/", "/V1/COMPLETIONS", "/v1/embeddings", "/v1/responses", "/docs", "/openapi.json",
          "/../etc/passwd", "/%2e%2e/", "/-/routes",
          "/-/healthz", "/v1/chat/completions/x", "/favicon.ico", "/;x", "/v1/models#x", "*",
          "http://127.0.0.1/v1/models", "http://[/health",
          "127.0.0.1:80", "/health health"]  # fmt: skip
_METHODS = [
    "GET",
    "POST",
    "PUT",
    "PATCH",
    "DELETE",
    "HEAD",
    "OPTIONS",
    "TRACE",
    "CONNECT",
    "PROPFIND",
    "get",
    "G",
    "X" * 200,
]
_POST_HEADERS = [
    "X-Request-Id: same\r\n", "X-Request-Id: \r\n", "X-Request-Id: a b\r\n", "X-Request-Id: " + "i" * 5000 + "\r\n",
    "X-Request-Id: \xe9\xff\r\n",
    "X-Request-Id: ../../x\r\n",
    "X-Tandem-Priority: high\r\n", "X-Tandem-Priority: low\r\n", "x-tandem-priority: NORMAL\r\n",
    "X-Tandem-Priority: \r\n", "X-Tandem-Priority: urgent\r\n", "X-Tandem-Priority: 0\r\n",
    "X-Tandem-Priority: high, low\r\n", "X-Tandem-Priority: \xff\r\n", "X-Tandem-Priority: " + "p" * 5000 + "\r\n",
]  # fmt: skip
_HEADERS = [
    *_POST_HEADERS, "X-Request-Id: a\r\nX-Request-Id: b\r\n", "serve_multiplexed_model_id: x\r\n",
    "serve-multiplexed-model-id: x\r\n",
    "Cookie: " + "a=b; " * 3000 + "\r\n",
    "X-Junk: " + "j" * 60_000 + "\r\n",
    "".join(f"X-{n}: {n}\r\n" for n in range(90)), "Expect: 100-continue\r\n", "Expect: nonsense\r\n", "Accept: \r\n",
    "Content-Type: text/xml\r\n",
    "Content-Type: multipart/form-data; boundary=\r\n", "Range: bytes=0-\r\n", "If-None-Match: *\r\n",
    "X-Forwarded-For: ::::\r\n", "Via: 1.1 x\r\n",
    "X-Forwarded-Proto: \x7f\r\n", "traceparent: 00-zz-zz-00\r\n", "traceparent: " + "0" * 999 + "\r\n",
    "Te: trailers\r\n", "Max-Forwards: 0\r\n",
    "X-Data-Parallel-Rank: -1\r\n", "X-Request-Timeout-Seconds: 0.001\r\n", "X-Request-Timeout-Seconds: nan\r\n",
    "X-Request-Disconnect-Disabled: ?1\r\n", "X-Session-ID: \xff\r\n", "X-Correlation-ID: x\r\n",
    "Upgrade-Insecure-Requests: 1\r\n", "Origin: null\r\n",
]  # fmt: skip
# Some name a host that no URL has; HAProxy refuses those that are none at all.
_HOSTS = [
    "127.0.0.1",
    "127.0.0.1:0",
    "x:99999",
    "[::1",
    "[",
    "]",
    "a b",
    "",
    "\xff",
    "%",
    "/",
    "?",
    "evil/../..",
    "h" * 300,
]


def _gets(own: list[str], authorizations: Authorizations) -> st.SearchStrategy[Ask]:
    """Requests without a body, however, half of them to the server's own paths."""

    def one(method: str, path: str, authorization: Authorization, header: str, host: str) -> Ask:
        key, has_key = authorization
        line = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{key}{header}\r\n"
        is_http = (
            method in _METHODS[:7]
            and path.startswith("/")
            and not path.startswith("/-/")  # Serve's own
            and not set(path) & set(" #")
            and host in _HOSTS[:2]
            and "Expect" not in header
            and line.isascii()
            and "\x7f" not in line
        )
        parts = (line.encode("latin-1"),)
        return Ask(route=_route(path), kind="get", parts=parts, is_http=is_http, has_key=has_key)

    hosts = st.sampled_from([_HOSTS[0]] * 20 + _HOSTS)
    methods = st.sampled_from(["GET"] * 12 + _METHODS)
    paths, headers = st.sampled_from(own * 6 + _PATHS), st.just("") | st.sampled_from(_HEADERS)
    return st.builds(one, methods, paths, authorizations, headers, hosts)


def _route(path: str) -> str:
    plain = path.partition("?")[0]
    if plain in API_ROUTES:
        return plain
    return "/v1/models/{model}" if plain.startswith("/v1/models/") else OTHER_ROUTE


def _hostile(route: str, valid: bytes, authorizations: Authorizations) -> st.SearchStrategy[Ask]:
    """Bytes that are no HTTP, or HTTP that contradicts itself."""
    line = f"POST {route} HTTP/1.1\r\nHost: x\r\n".encode()
    size, chunked = b"Content-Length: %d\r\n", b"Transfer-Encoding: chunked\r\n"
    end = b"Connection: close\r\n\r\n"
    length = len(valid)
    chunk = b"%x\r\n%s\r\n0\r\n\r\n" % (length, valid)
    wires = [
        line + size % length + size % (length + 9) + end + valid, line + size % length + chunked + end + chunk,
        line + end + valid,
        line + b"Content-Length: -1\r\n" + end + valid, line + b"Content-Length: 1e3\r\n" + end + valid,
        line + b"Content-Length: \r\n" + end + valid,
        line + b"Content-Length: 99999999999999999999\r\n" + end + valid,
        line + b"Content-Length: +5\r\n" + end + valid,
        line + size % 3 + end + valid, line + chunked + end + b"zz\r\n" + valid,
        line + chunked + end + b"-1\r\n" + valid,
        line + chunked + end + b"ffffffffffffffffff\r\n" + valid,
        line + chunked + end + b"5;" + b"x" * 9000 + b"\r\nabcde\r\n0\r\n\r\n",
        line + chunked + chunked + end + chunk, line + b"Transfer-Encoding: gzip, chunked\r\n" + end + chunk,
        line + b"Transfer-Encoding: xx\r\n" + end + chunk,
        line + b"Transfer-Encoding : chunked\r\n" + end + chunk, line + b" folded: x\r\n" + end,
        line + b"NoColon\r\n" + end, line + b": empty\r\n" + end,
        line + b"X: \x00\r\n" + end, line + b"X: " + b"h" * 300_000 + b"\r\n" + end,
        line + b"X: " + b"h" * 1_500_000 + b"\r\n" + end,
        line + b"".join(b"X-%d: y\r\n" % n for n in range(5000)) + end,
        b"\r\n\r\n" + line + size % length + end + valid, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET /health\r\n\r\n", b"GET /health HTTP/0.9\r\n\r\n", b"GET /health HTTP/9.9\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.0\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n", b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n" + end,
        b"GET /\xff\xfe HTTP/1.1\r\nHost: x\r\n" + end,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00" * 90,
        b"GET / HTTP/1.1\nHost: x\n\n", b"\x00" * 500, b"GET " + b"a" * 2_000_000,
        b"GET /health HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nUpgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\n"
        b"HTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n",
        line + size % length + b"Expect: 100-continue\r\n" + end + valid,
        line + size % length + b"Connection: close, x, \r\n\r\n" + valid,
        (b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n" * 30) + b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + end,
        (line + size % length + b"\r\n" + valid) * 5 + line + size % length + end + valid,
        (line + size % length + b"\r\n" + valid) * 3 + b"garbage\r\n\r\n",
    ]  # fmt: skip
    host = b"Host: x\r\n"

    def broken(wire: bytes, authorization: Authorization, header: str) -> Ask:
        wire = wire.replace(host, host + authorization[0].encode("latin-1"))
        raw = wire.replace(end, header.encode("latin-1") + end, 1)
        return Ask(route=route, kind="wire", parts=(raw,), is_http=False, has_key=authorization[1])

    def half_of(whole: Ask, frac: float) -> Ask:
        raw = whole.parts[0]
        parts = (raw[: 1 + int(frac * (len(raw) - 1))],)
        return replace(whole, kind="half", parts=parts, leaves=True, is_http=False)

    headers = st.just("") | st.just("") | st.sampled_from(_HEADERS)
    odd = st.builds(broken, st.sampled_from(wires), authorizations, headers)
    noise = st.binary(min_size=1, max_size=300).map(
        lambda raw: Ask(route=OTHER_ROUTE, kind="wire", parts=(raw,), is_http=False)
    )
    wholes = authorizations.map(lambda authorization: _post(route, valid, authorization, kind="whole"))
    half = st.builds(half_of, wholes, st.floats(0.0, 1.0, exclude_max=True))
    gone = st.builds(
        lambda whole, wait_s: replace(whole, kind="gone", parts=(*whole.parts, b""), pause_s=wait_s, leaves=True),
        wholes,
        st.sampled_from([0.0, 0.0, 0.02, 0.1]),
    )
    slow = st.builds(
        lambda whole, count: replace(whole, kind="slow", parts=tuple(_pieces(whole.parts[0], count)), pause_s=0.05),
        wholes,
        st.integers(2, 12),
    )
    return st.sampled_from([odd] * 6 + [noise, half, gone, slow]).flatmap(lambda kind: kind)


def _pieces(raw: bytes, count: int) -> list[bytes]:
    width = -(-len(raw) // count)
    return [raw[at : at + width] for at in range(0, len(raw), width)]


def _of_metrics_port(asks: st.SearchStrategy[Ask]) -> st.SearchStrategy[Ask]:
    return asks.map(lambda ask: replace(ask, route=METRICS_PORT))


def asks(
    model: str,
    bodies: dict[str, st.SearchStrategy[dict[str, Any]]],
    *,
    key: str | None,
    is_deep: bool,
    most_bulk_bytes: int,
) -> st.SearchStrategy[Ask]:
    """Requests of every kind.

    Args:
        model: the name that the endpoint serves.
        bodies: by endpoint, ``chat`` and ``completions``.
        key: an API key that the endpoint knows; ``None`` where it asks for none.
        is_deep: nearly all of them JSON bodies.
        most_bulk_bytes: the longest bodies, to both sides of the limit.
    """
    kinds: list[st.SearchStrategy[Ask]] = []
    authorizations = _authorizations(key)
    headers = st.sampled_from([""] * 30 + _POST_HEADERS)
    for endpoint, drawn in bodies.items():
        route = "/v1/chat/completions" if endpoint == "chat" else "/v1/completions"
        prompt: dict[str, Any] = (
            {"messages": [{"role": "user", "content": "x"}]} if endpoint == "chat" else {"prompt": "x"}
        )
        valid = json.dumps({"model": model, "max_tokens": 4, **prompt}).encode()
        of_schema = st.builds(
            lambda body, authorization, header, route=route: _post(
                route, json.dumps(body).encode(), authorization, header, kind="json", body=body
            ),
            drawn,
            authorizations,
            headers,
        )
        kinds += [of_schema] * (36 if is_deep else 12)
        kinds += [_other_json(route, valid, authorizations)] * 4 + [_hostile(route, valid, authorizations)] * 3
        if most_bulk_bytes:
            kinds.append(_bulk(route, valid, authorizations, most_bulk_bytes))
    own = ["/v1/models", f"/v1/models/{model}", "/health", "/metrics", "/v1/chat/completions", "/v1/completions"]
    kinds += [_gets(own, authorizations)] * (2 if is_deep else 10)
    kinds += [_of_metrics_port(_gets(["/metrics"] * len(own), authorizations))] * (1 if is_deep else 3)
    kinds.append(_of_metrics_port(_hostile("/metrics", b"{}", authorizations)))
    return st.sampled_from(kinds).flatmap(lambda kind: kind)
