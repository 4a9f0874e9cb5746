"""What is wrong with the events of a stream: each API has its own order, end and error."""

from typing import Any

from deployments.endpoint.routes import ErrorForm
from tests.lab.fuzz.errors import error_of_event, json_object

DONE = "data: [DONE]"
# Events that end a stream.
_LAST = {
    ErrorForm.RESPONSES: ("response.completed", "response.incomplete", "response.failed"),
    ErrorForm.ANTHROPIC: ("message_stop",),
}


def is_stream(text: str) -> bool:
    """Whether an answer is a stream of events."""
    return text.startswith(("data: ", "event: "))


def of_stream(text: str, form: ErrorForm) -> str | None:
    """The worst verdict on the events of a stream, or that its end is missing."""
    events = [event for event in text.split("\n\n") if event]
    verdicts = {_of_event(event, form) for event in events if event != DONE}
    if not _has_end(events, form) or not _is_in_order(events, form):
        verdicts.add("shape")
    return next((what for what in ("five_xx", "hang", "shape") if what in verdicts), None)


def _of_event(event: str, form: ErrorForm) -> str | None:
    name, data = _parts(event)
    fields = json_object(data)
    error = error_of_event(data, form)
    if error is not None:
        if error.is_servers:
            return "five_xx"
        if error.is_late:
            return "hang"
        return None if error.is_right and name in (None, "error") else "shape"
    if fields is None or (form is ErrorForm.OPENAI) != (name is None):
        return "shape"
    return None if name is None or name == fields.get("type") else "shape"


def _has_end(events: list[str], form: ErrorForm) -> bool:
    """Whether the last event is one that ends a stream. After an error of OpenAI's there is still ``[DONE]``."""
    if form is ErrorForm.OPENAI:
        return events[-1] == DONE and DONE not in events[:-1]
    name, data = _parts(events[-1])
    return name in _LAST[form] or error_of_event(data, form) is not None


def _is_in_order(events: list[str], form: ErrorForm) -> bool:
    """Whether the numbers of a response's events follow each other; a stored one may be read from its middle."""
    if form is not ErrorForm.RESPONSES:
        return True
    found: list[dict[str, Any]] = [json_object(_parts(event)[1]) or {} for event in events]
    numbers = [fields.get("sequence_number") for fields in found]
    return isinstance(numbers[0], int) and numbers == [numbers[0] + at for at in range(len(numbers))]


def _parts(event: str) -> tuple[str | None, str]:
    """The name of an event, if it has one, and its data."""
    first, _, rest = event.partition("\n")
    if first.startswith("event: "):
        return first.removeprefix("event: "), rest.removeprefix("data: ")
    return None, event.removeprefix("data: ")
