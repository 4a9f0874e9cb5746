"""The APIs whose streams a drill breaks: the body of a request, and what an event adds to its answer.

Completions and generate give token ids. Responses and messages give text, which is compared as a whole.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

# Length of every answer. One of messages may be shorter: that API cannot ignore the model's end of text.
OUTPUT_TOKENS = 300
# Words of which a prompt of text is made; each is one token of the tiny model.
_WORDS = ("the", "of", "and", "or", "to", "in", "any", "for")

Fields = dict[str, Any]


@dataclass(slots=True, kw_only=True)
class Answer:
    """One answer as its client saw it.

    Attributes:
        token_ids: the output, of an API that gives token ids.
        text: the output, of an API that gives text; ``None``: it gives token ids.
        events: number of events so far.
        is_ended: it ended as its API ends a stream, and without an error.
        is_cut: the connection broke after the response's headers; a timeout does not count.
        error: message of the endpoint or the connection.
        retries: how often the request was sent again after the connection broke before the headers. Refused
            connections do not count.
        ttft_s: time from the first sending to the first token.
        gap_s: the longest time between two events.
        span_s: when it was sent and when it ended, by the monotonic clock.
    """

    token_ids: list[int] = field(default_factory=list)
    text: str | None = None
    events: int = 0
    is_ended: bool = False
    is_cut: bool = False
    error: str | None = None
    retries: int = 0
    ttft_s: float | None = None
    gap_s: float = 0.0
    span_s: tuple[float, float] = (0.0, 0.0)

    @property
    def output(self) -> Sequence[Any]:
        """The output, token ids or text."""
        return self.token_ids if self.text is None else self.text

    def fail(self, message: Any) -> None:
        """Note the first error: the answer is not ended by what comes after it."""
        self.error = self.error or str(message)[:300]
        self.is_ended = False

    def end(self) -> None:
        """Note the event that ends a stream."""
        self.is_ended = self.error is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Api:
    """One API.

    Attributes:
        path: its route.
        body: the fields of a greedy stream beside ``model``, for a prompt's token ids.
        read: adds an event to the answer.
    """

    path: str
    body: Callable[[list[int]], Fields]
    read: Callable[[Answer, Fields], None]


def _text(prompt: list[int]) -> str:
    """A prompt of about as many tokens as text, for an API that takes no token ids."""
    return " ".join(_WORDS[token % len(_WORDS)] for token in prompt)


def _completion(prompt: list[int]) -> Fields:
    limits = {"max_tokens": OUTPUT_TOKENS, "temperature": 0.0, "ignore_eos": True}
    return {"prompt": prompt, "return_token_ids": True, **limits}


def _generate(prompt: list[int]) -> Fields:
    sampling = {"max_tokens": OUTPUT_TOKENS, "temperature": 0.0, "ignore_eos": True}
    return {"token_ids": prompt, "sampling_params": sampling}


def _response(prompt: list[int]) -> Fields:
    limits = {"max_output_tokens": OUTPUT_TOKENS, "temperature": 0.0, "ignore_eos": True}
    return {"input": _text(prompt), **limits}


def _messages(prompt: list[int]) -> Fields:
    said = [{"role": "user", "content": _text(prompt)}]
    return {"messages": said, "max_tokens": OUTPUT_TOKENS, "temperature": 0.0}


def _read_token_ids(answer: Answer, event: Fields) -> None:
    if "error" in event:
        answer.fail(_message(event["error"]))
        return
    answer.token_ids += [token for choice in event["choices"] for token in choice.get("token_ids") or ()]


def _read_response(answer: Answer, event: Fields) -> None:
    kind, number = event["type"], event.get("sequence_number")
    if kind == "error":
        answer.fail(event.get("message"))
    elif number != answer.events:
        answer.fail(f"sequence_number of event {answer.events} is {number}")
    elif kind == "response.output_text.delta":
        answer.text = (answer.text or "") + event["delta"]
    elif kind in ("response.completed", "response.incomplete"):
        answer.end()
    elif kind == "response.failed":
        answer.fail("response.failed")


def _read_message(answer: Answer, event: Fields) -> None:
    kind = event["type"]
    if kind == "error":
        answer.fail(_message(event["error"]))
    elif kind == "content_block_delta":
        answer.text = (answer.text or "") + event["delta"].get("text", "")
    elif kind == "message_stop":
        answer.end()


def _message(error: Any) -> Any:
    return error.get("message", error) if isinstance(error, dict) else error


APIS = {
    "completions": Api(path="/v1/completions", body=_completion, read=_read_token_ids),
    "responses": Api(path="/v1/responses", body=_response, read=_read_response),
    "messages": Api(path="/v1/messages", body=_messages, read=_read_message),
    "generate": Api(path="/inference/v1/generate", body=_generate, read=_read_token_ids),
}
