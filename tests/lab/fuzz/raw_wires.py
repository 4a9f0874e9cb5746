"""Raw wires: bytes that no client library would send, since they are no HTTP or HTTP that contradicts itself."""

_CHUNKED = b"Transfer-Encoding: chunked\r\n"
# Every wire names this host, and ends its headers so; both places are where more headers are put.
HOST = b"Host: x\r\n"
END = b"Connection: close\r\n\r\n"


def raw_wires(route: str, body: bytes) -> list[bytes]:
    """The wires, most of them POSTs of this body to this route."""
    line = f"POST {route} HTTP/1.1\r\n".encode() + HOST
    size = b"Content-Length: %d\r\n"
    sized, chunk = line + size % len(body), b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    get = b"GET /v1/models HTTP/1.1\r\n" + HOST
    return [
        # The length of the body: twice, beside chunks, missing, or no length at all.
        sized + size % (len(body) + 9) + END + body,
        sized + _CHUNKED + END + chunk,
        line + END + body,
        *(
            line + b"Content-Length: " + length + b"\r\n" + END + body
            for length in (b"-1", b"1e3", b"", b"9" * 20, b"+5", b"3")
        ),
        # Chunks and their coding.
        *(line + _CHUNKED + END + wrong + b"\r\n" + body for wrong in (b"zz", b"-1", b"f" * 18)),
        line + _CHUNKED + END + b"5;" + b"x" * 9000 + b"\r\nabcde\r\n0\r\n\r\n",
        line + _CHUNKED + _CHUNKED + END + chunk,
        *(
            line + b"Transfer-Encoding" + coding + b"\r\n" + END + chunk
            for coding in (b": gzip, chunked", b": xx", b" : chunked")
        ),
        # Header lines.
        *(line + header + b"\r\n" + END for header in (b" folded: x", b"NoColon", b": empty", b"X: \x00")),
        *(line + b"X: " + b"h" * length + b"\r\n" + END for length in (300_000, 1_500_000)),
        line + b"".join(b"X-%d: y\r\n" % n for n in range(5000)) + END,
        b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n" + END,
        b"GET /\xff\xfe HTTP/1.1\r\n" + HOST + END,
        # First lines and versions; no HTTP/1 at all.
        b"\r\n\r\n" + sized + END + body,
        *(
            b"GET /health" + version + b"\r\n\r\n"
            for version in (b"", b" HTTP/0.9\r\nHost: x", b" HTTP/9.9\r\nHost: x", b" HTTP/1.0", b" HTTP/1.1")
        ),
        b"GET / HTTP/1.1\nHost: x\n\n",
        b"GET " + b"a" * 2_000_000,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\x00" * 500,
        *(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frames for frames in (b"", b"\x00" * 90)),
        # Upgrades and expectations.
        get + b"Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
        b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
        get + b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n",
        sized + b"Expect: 100-continue\r\n" + END + body,
        sized + b"Connection: close, x, \r\n\r\n" + body,
        # Several requests over one connection.
        (get + b"\r\n") * 30 + get + END,
        (sized + b"\r\n" + body) * 5 + sized + END + body,
        (sized + b"\r\n" + body) * 3 + b"garbage\r\n\r\n",
    ]
