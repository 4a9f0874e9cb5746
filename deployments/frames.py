"""What a decode replica sends the ingress for each piece of a response."""

from typing import NamedTuple

from deployments.openai_errors import OpenAIError


class Frame(NamedTuple):
    """One piece of a response, in the order in which the client gets it.

    ``text`` is what goes to the client as it is: a server-sent event of a stream, or the whole JSON body. ``token_ids``
    are the output ids that the engine produced since the frame before (a detokenizer may hold text back, so an event
    and its ids need not line up one to one). ``status`` is the HTTP status that the first frame decides; ``error`` the
    class of a failure, on the frame that carries it.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    status: int = 200
    error: str | None = None


def failure(status: int, message: str, error: str) -> Frame:
    """The frame of a failure that is not the client's; ``error`` is its class."""
    return Frame(OpenAIError(status, message).body(), status=status, error=error)
