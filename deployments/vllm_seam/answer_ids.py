"""Random ids in answers, such as those of tool calls, come from the request's seed: another replica gives the same.

So a stream with such ids can continue on another replica to the byte.
"""

import hashlib
import sys
import uuid
from collections.abc import Iterator
from contextvars import ContextVar
from itertools import count
from types import SimpleNamespace
from typing import Any

import vllm.entrypoints.anthropic.serving as anthropic
from vllm.utils import random_uuid

_MODULES = ("vllm.entrypoints.", "vllm.parser.", "vllm.reasoning.", "vllm.tool_parsers.")

# Registry: the ids of the request that a task serves. vLLM asks for an id without saying for which request.
_IDS: ContextVar[Iterator[uuid.UUID] | None] = ContextVar("tandem_answer_ids", default=None)


def seed_ids(seed: str) -> None:
    """Let the random ids of this task's request, and of the tasks that it starts, follow from ``seed``."""
    _IDS.set(_ids(seed))


def install_seeded_ids() -> None:
    """Let vLLM's API layers take ids from the request's seed; ids of the engine stay random.

    Needs: the name ``random_uuid`` in vLLM's modules that make answers, each a text of 16 hexadecimal digits; the name
    ``uuid`` in ``vllm.entrypoints.anthropic.serving``.
    Without it: a stream with a random id (a tool call, an item of the Responses API) ends with an error if its replica
    is lost.
    """
    for name, module in list(sys.modules.items()):
        if name.startswith(_MODULES) and getattr(module, "random_uuid", None) is random_uuid:
            vars(module)["random_uuid"] = _hex_id
    vars(anthropic)["uuid"] = SimpleNamespace(uuid4=_uuid)


def _ids(seed: str) -> Iterator[uuid.UUID]:
    for number in count():
        yield uuid.UUID(bytes=hashlib.blake2b(f"{seed}-{number}".encode(), digest_size=16).digest())


def _uuid() -> Any:
    ids = _IDS.get()
    return uuid.uuid4() if ids is None else next(ids)


def _hex_id() -> str:
    """16 hexadecimal digits, as ``random_uuid`` gives."""
    return str(_uuid().hex[-16:])
