"""Factories of the outside world around ``serve_app``."""

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from tests.serve_app.fake_endpoint import Answer, FakeEndpoint, tokens


@pytest.fixture
def make_endpoint() -> Iterator[Callable[..., FakeEndpoint]]:
    """A running endpoint on a free port of its own."""
    with ExitStack() as stack:

        def make(answer: Answer | None = None, metrics_page: str = "") -> FakeEndpoint:
            return stack.enter_context(FakeEndpoint(answer or tokens(), metrics_page))

        yield make


@pytest.fixture
def dead_url() -> Iterator[str]:
    """Where nobody listens: the port is bound, so that nobody else gets it."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
