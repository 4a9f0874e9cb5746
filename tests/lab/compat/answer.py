"""Sends a shape to a server, and records the answer."""

import http.client
import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from pydantic import BaseModel

from tests.lab.compat.shape import ID, Shape

# Seconds after which a server hangs. The longest answers have 2,000 tokens.
_TIMEOUT_S = 60.0
# Status of an answer that did not come.
HUNG = 0
# Wait, seconds, between a response that may still run in the background and the next request about it.
_BACKGROUND_S = 1.0
# Headers that tell about a connection, and not about the answer.
_CONNECTION = frozenset({"date", "server", "content-length", "transfer-encoding", "connection", "keep-alive"})


class Answer(BaseModel):
    """An answer as it came.

    ``digest``: of its shape; ``is_cut``: the connection ended before the answer did; ``seconds``: until its end.
    """

    digest: str
    status: int
    headers: dict[str, str] = {}
    text: str = ""
    is_cut: bool = False
    seconds: float = 0.0

    @property
    def id(self) -> str:
        """The id of the first object in it that has one, or ``none``."""
        found = re.search(r'"id": ?"((?:resp_)[^"]+)"', self.text)
        return "none" if found is None else found[1]


def record(url: str, shapes: Iterable[Shape]) -> Iterator[tuple[str, Answer]]:
    """The name of each shape and its answer; one request at a time, so that batches are alike on both servers."""
    ids: dict[str, str] = {}
    for shape in shapes:
        answer = send(url, shape, ids.get(shape.after or "", "none"))
        ids[shape.name] = answer.id
        yield shape.name, answer


def send(url: str, shape: Shape, identity: str) -> Answer:
    """The answer to one shape; ``identity``: replaces the id in its path and body.

    Raises RuntimeError: the server does not listen any more.
    """
    if shape.after is not None and shape.method == "GET":
        time.sleep(_BACKGROUND_S)
    began_s = time.monotonic()
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=_TIMEOUT_S)
    body = None if shape.raw is None else shape.raw.replace(ID.encode(), identity.encode())
    answer = Answer(digest=shape.digest, status=HUNG)
    try:
        connection.request(shape.method, shape.path.replace(ID, identity), body, dict(shape.headers))
        response = connection.getresponse()
        headers = {name.lower(): value for name, value in response.getheaders() if name.lower() not in _CONNECTION}
        answer = answer.model_copy(update={"status": response.status, "headers": headers})
        answer.text = response.read().decode("utf-8", "replace")
    except http.client.IncompleteRead as error:
        answer.text, answer.is_cut = error.partial.decode("utf-8", "replace"), True
    except ConnectionRefusedError:
        raise RuntimeError(f"the server has ended; the shape before {shape.name!r} may be the cause") from None
    except (OSError, http.client.HTTPException) as error:
        answer.text, answer.is_cut = f"{type(error).__name__}: {error}", True
    finally:
        connection.close()
    answer.seconds = time.monotonic() - began_s
    return answer


def events(text: str) -> list[tuple[str, Any]]:
    """The server-sent events of a stream: the name and the data of each; data that is no JSON as its text."""
    found = []
    for block in re.split(r"\r?\n\r?\n", text.strip()):
        fields: dict[str, list[str]] = {}
        for line in block.splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name, []).append(value.removeprefix(" "))
        found.append(("\n".join(fields.get("event", [])), parsed("\n".join(fields.get("data", [])))))
    return found


def parsed(text: str) -> Any:
    """The JSON of a text, else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def is_stream(headers: Mapping[str, str]) -> bool:
    """Whether an answer is a stream of events."""
    return headers.get("content-type", "").startswith("text/event-stream")
