"""The applications that are fuzzed, with the number and the kinds of their requests."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deployments.endpoint.api_keys import key_line, new_key
from tests.lab.fuzz.requests import PAGE_ORIGIN
from tests.lab.stand.fixed_counts import fixed_counts

# Share of the requests that real engines get.
_REAL_FRAC = 0.2
# The endpoint ends a request after this time, in seconds; such a request was stuck. The longest right answers are 8,000
# tokens of an emulated engine (10 s at the time factor below) and 1,000 tokens of a real one (half a minute with six
# requests at once on two slow cores). Beam searches, one request per token, take about two minutes.
REQUEST_TIMEOUT_S = 240.0
# The client waits a minute longer than the endpoint.
DEADLINE_S = REQUEST_TIMEOUT_S + 60.0
# Emulated engines run faster than real ones by this factor.
_TIME_FACTOR = 20.0
# Context length of the real engine.
_REAL_CONTEXT_TOKENS = 1024
# KV memory of the real engine: eight whole contexts. The memory of a block counts from the first write to it, so the
# warm-up must write to all of them.
_REAL_KV_BYTES = 32 << 20
# Kinds of processes whose memory may not rise in the real part. The others run the same programs in the emulated part,
# whose four times as many requests fill their caches: an ingress that is settled there after 8,000 requests may still
# rise here at the 4,000th.
_REAL_KINDS = frozenset({"engine", "prefill replica", "decode replica"})
# Admission counts and orders requests, but its limits are too high to refuse one (ttft_s is the largest allowed).
_ADMISSION = {
    "ttft_s": 250.0,
    "tpot_s": 8.0,
    "max_queued_tokens": 10**9,
    "key": {"requests_per_minute": 1e6, "tokens_per_minute": 1e12, "max_requests": 1000},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One application and the requests that it gets.

    Attributes:
        name: ``emulated`` or ``real``.
        document: its Serve YAML, whose port is chosen at the start.
        key: an API key that it knows; ``None``: it needs none.
        requests: number of requests.
        at_once: requests that are in flight together.
        is_deep: nearly all requests are JSON bodies, and most of them reach the engine.
        max_bulk_bytes: length of the longest bodies.
        has_description: its engines describe their API (``/openapi.json``).
        settled_kinds: kinds of processes whose memory may not rise steadily; ``None``: all kinds.
    """

    name: str
    document: dict[str, Any]
    key: str | None
    requests: int
    at_once: int
    is_deep: bool
    max_bulk_bytes: int
    has_description: bool
    settled_kinds: frozenset[str] | None = None


def parts(requests: int, folder: Path) -> Sequence[Part]:
    """Four fifths of the requests to emulated engines, one fifth to real ones; ``folder``: for the key file."""
    real = round(_REAL_FRAC * requests)
    return emulated_part(requests - real, folder), real_part(real)


def emulated_part(requests: int, folder: Path, max_bulk_bytes: int = 40 << 20) -> Part:
    """``configs/emulated.yaml``, two replicas of everything, with keys and admission; ``folder``: for the key file."""
    document = fixed_counts("emulated", 2, start_s=0.0, time_factor=_TIME_FACTOR)
    key, file = new_key(), folder.resolve() / "keys"
    file.write_text(key_line("fuzz", key) + "\n")
    keys = {"replicas": 2, "api_keys_file": str(file), "admission": _ADMISSION}
    return Part(
        name="emulated",
        document=_with_ingress(document, **keys),
        key=key,
        requests=requests,
        at_once=8,
        is_deep=False,
        max_bulk_bytes=max_bulk_bytes,
        has_description=False,
    )


def real_part(requests: int) -> Part:
    """``configs/cpu_tiny.yaml`` with all routes that a model for text can have, and a short context."""
    document = fixed_counts("cpu_tiny", 1)
    args = document["applications"][0]["args"]
    args["groups"][0]["decode"]["env"] = {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}
    args["engine_kwargs"] |= {
        "enable_auto_tool_choice": True,
        "tool_call_parser": "hermes",
        "reasoning_parser": "deepseek_v3",
        "enable_tokenizer_info_endpoint": True,
        "max_model_len": _REAL_CONTEXT_TOKENS,
        "kv_cache_memory_bytes": _REAL_KV_BYTES,
    }
    return Part(
        name="real",
        document=_with_ingress(document),
        key=None,
        requests=requests,
        at_once=6,
        is_deep=True,
        max_bulk_bytes=2 << 20,
        has_description=True,
        settled_kinds=_REAL_KINDS,
    )


def _with_ingress(document: dict[str, Any], **ingress: Any) -> dict[str, Any]:
    document["applications"][0]["args"]["ingress"] |= {
        "request_timeout_s": REQUEST_TIMEOUT_S,
        "metrics_on_public_port": True,
        "docs": True,
        "cors": {"allowed_origins": [PAGE_ORIGIN]},
        **ingress,
    }
    return document
