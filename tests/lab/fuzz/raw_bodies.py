"""Bodies as bytes: no JSON, JSON that no text can be, and lists of very many small things."""

from hypothesis import strategies as st

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
# Fields that can be long lists of small things: the key, the opening, one more of them, the closing.
_BULK = [(b"prompt", b"[1e9", b",1e9", b"]"), (b"prompt", b"[[1]", b",[1]", b"]"), (b"prompt", b'["x"', b',"x"', b"]"),
         (b"stop", b'["x"', b',"x"', b"]"), (b"bad_words", b'["x"', b',"x"', b"]"), (b"user", b'["', b"x", b'"]'),
         (b"stop_token_ids", b"[1", b",1", b"]"), (b"allowed_token_ids", b"[1", b",1", b"]"),
         (b"logprob_token_ids", b"[7", b",7", b"]"), (b"tools", b"[{}", b",{}", b"]"),
         (b"messages", b'[{"role":"user","content":"x"}', b',{"role":"user","content":"x"}', b"]")]  # fmt: skip
# Lengths of bulk bodies, to both sides of the endpoint's limit of 32 MiB.
_BULK_BYTES = (2_000, 20_000, 200_000, 2 << 20, 8 << 20, 31 << 20, 40 << 20)


def raw_bodies(valid: bytes) -> st.SearchStrategy[bytes]:
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


def bulk(valid: bytes, max_bytes: int) -> st.SearchStrategy[bytes]:
    """Bodies with a list of many small things."""

    def one(field: tuple[bytes, bytes, bytes, bytes], size_bytes: int) -> bytes:
        key, opening, more, closing = field
        return valid[:-1] + b', "%s": ' % key + opening + more * (size_bytes // len(more)) + closing + b"}"

    sizes = st.sampled_from([size for size in _BULK_BYTES if size <= max_bytes])
    return st.builds(one, st.sampled_from(_BULK), sizes)
