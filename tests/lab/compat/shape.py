"""One request of the differential test, which both servers get."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Stands in a path or a body for the id in the answer to an earlier shape.
ID = "{id}"
JSON = {"content-type": "application/json"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One request.

    Attributes:
        name: unique; tells what is special about the request.
        route: path as the report names it; ``path`` without the parts that differ.
        path: path and query that are sent.
        method: HTTP method.
        raw: the body; ``None``: no body.
        headers: headers of the request.
        after: name of an earlier shape, whose answer has the id that replaces ``{id}``; ``None``: there is no id.
        is_determined: whether text and numbers of the answer must be equal. Else only their types are compared.
    """

    name: str
    route: str
    path: str
    method: str = "POST"
    raw: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=lambda: JSON)
    after: str | None = None
    is_determined: bool = True

    @property
    def digest(self) -> str:
        """Short text that changes with what is sent."""
        sent = (self.path, self.method, self.raw, sorted(self.headers.items()), self.after)
        return hashlib.sha256(repr(sent).encode()).hexdigest()[:16]


def post(name: str, route: str, body: Any, **others: Any) -> Shape:
    """A POST of a JSON body; ``others``: further fields of the shape."""
    return Shape(name=name, route=route, **{"path": route, "raw": json.dumps(body).encode(), **others})


def bare(name: str, method: str, path: str, **others: Any) -> Shape:
    """A request without a body; ``others``: further fields of the shape."""
    return Shape(name=name, method=method, **{"route": path, "path": path, "headers": {}, **others})
