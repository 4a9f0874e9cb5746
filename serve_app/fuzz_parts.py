"""The applications that are fuzzed, and how much of what is sent to each."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deployments.api_keys import key_line, new_key
from serve_app.fixed_counts import fixed_counts

_REAL_FRAC = 0.2
# What ends as late as this is stuck: the longest answers, which requests ask for by numbers beyond every context, are
# 8,000 tokens of an emulated engine, some 10 s at this factor, and 1,000 of a real one, half a minute with six at once
# on two slow cores; beams, a request per token each, take the longest, about two.
REQUEST_TIMEOUT_S = 240.0
# The endpoint itself ends a request before, and a body that does not come as a whole.
DEADLINE_S = REQUEST_TIMEOUT_S + 60.0
_TIME_FACTOR = 20.0
_REAL_CONTEXT_TOKENS = 1024
# For eight whole contexts: memory of a block counts from when it is first written, so all must be in the warm-up.
_REAL_KV_BYTES = 32 << 20
# The other processes run the same programs in the emulated part, where four times as many requests fill their caches:
# an ingress that is at rest there after 8,000 requests may still rise here at the 4,000th.
_REAL_KINDS = frozenset({"engine", "prefill replica", "decode replica"})
# Admission keeps its order and its books, and has no reason to refuse anybody (ttft_s is the longest that it takes).
_ADMISSION = {
    "ttft_s": 250.0,
    "tpot_s": 8.0,
    "max_queued_tokens": 10**9,
    "key": {"requests_per_minute": 1e6, "tokens_per_minute": 1e12, "max_requests": 1000},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One application and what is sent to it.

    Attributes:
        name: ``emulated`` or ``real``.
        document: its Serve YAML, whose port is chosen at the start.
        key: an API key that it knows; ``None``: it asks for none.
        requests: how many.
        at_once: how many of them at the same time.
        is_deep: nearly all JSON, of which most reaches the engine.
        most_bulk_bytes: the longest bodies.
        settled_kinds: of processes, whose memory may not rise steadily either; ``None``: all.
    """

    name: str
    document: dict[str, Any]
    key: str | None
    requests: int
    at_once: int
    is_deep: bool
    most_bulk_bytes: int
    settled_kinds: frozenset[str] | None = None


def parts(requests: int, folder: Path) -> Sequence[Part]:
    """The bulk on emulated engines, a fifth on real ones; ``folder``: for what their applications read."""
    real = round(_REAL_FRAC * requests)
    return emulated_part(requests - real, folder), real_part(real)


def emulated_part(requests: int, folder: Path, most_bulk_bytes: int = 40 << 20) -> Part:
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
        most_bulk_bytes=most_bulk_bytes,
    )


def real_part(requests: int) -> Part:
    """``configs/cpu_tiny.yaml`` with vLLM's parsers of tools and reasoning, and a short context."""
    document = fixed_counts("cpu_tiny", 1)
    document["applications"][0]["args"]["engine_kwargs"] |= {
        "enable_auto_tool_choice": True,
        "tool_call_parser": "hermes",
        "reasoning_parser": "deepseek_v3",
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
        most_bulk_bytes=2 << 20,
        settled_kinds=_REAL_KINDS,
    )


def _with_ingress(document: dict[str, Any], **ingress: Any) -> dict[str, Any]:
    document["applications"][0]["args"]["ingress"] |= {
        "request_timeout_s": REQUEST_TIMEOUT_S,
        "metrics_on_public_port": True,
        **ingress,
    }
    return document
