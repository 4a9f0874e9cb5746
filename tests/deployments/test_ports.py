"""Side-channel ports."""

import os
import socket

import pytest

from deployments.ports import free_side_channel_port

HOST = "127.0.0.3"  # loopback, and nobody else's


def bound(port: int) -> socket.socket:
    """A socket that holds a port."""
    taken = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    taken.bind((HOST, port))
    return taken


def test_answer_is_the_first_port_asked_for_and_is_free_again() -> None:
    port = free_side_channel_port(HOST, start=21000)
    assert port == 21000
    with bound(port):
        pass


def test_taken_port_is_skipped() -> None:
    with bound(21100), bound(21101):
        assert free_side_channel_port(HOST, start=21100) == 21102


def test_search_wraps_round_at_the_end_of_the_range() -> None:
    with bound(27999):
        assert free_side_channel_port(HOST, start=27999) == 20000


@pytest.mark.parametrize("start", [0, 19999, 28000, 28001, 65535])
def test_answer_stays_in_the_range_wherever_the_search_starts(start: int) -> None:
    assert 20000 <= free_side_channel_port(HOST, start=start) < 28000


def test_no_free_port_says_where_and_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.ports._FIRST_PORT", 27998)
    with (
        bound(27998),
        bound(27999),
        pytest.raises(OSError, match=r"no free NIXL side-channel port on 127\.0\.0\.3 .*end what holds them"),
    ):
        free_side_channel_port(HOST, start=27999)


def test_a_host_of_nobody_is_said_at_once() -> None:
    # RFC 5737: no machine has this address.
    with pytest.raises(OSError, match=r"192\.0\.2\.1: Cannot assign requested address"):
        free_side_channel_port("192.0.2.1", start=20000)


def test_the_holder_of_a_taken_port_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with bound(21200) as taken:
        taken.listen()
        free_side_channel_port(HOST, start=21200)
    (said,) = caplog.messages
    assert f"21200 is held by process {os.getpid()} (" in said
