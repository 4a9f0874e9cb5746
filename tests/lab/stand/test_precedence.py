"""A load generator's thread runs before others, and nothing that it starts does."""

import os
import subprocess
import sys
import threading

import pytest

from tests.lab.stand.precedence import ahead_of_others

POLICY = "import os; print(os.sched_getscheduler(0))"


def policy() -> int:
    return os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK


def test_the_thread_goes_first_in_the_block_and_its_threads_and_processes_do_not() -> None:
    seen = []
    with ahead_of_others():
        if policy() != os.SCHED_RR:
            pytest.skip("not allowed to")
        thread = threading.Thread(target=lambda: seen.append(policy()))
        thread.start()
        thread.join()
        child = subprocess.run([sys.executable, "-c", POLICY], capture_output=True, text=True, check=True)
    assert (seen, int(child.stdout)) == ([os.SCHED_OTHER], os.SCHED_OTHER)
    assert policy() == os.SCHED_OTHER


def test_without_the_right_to_clear_the_flag_the_thread_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[int] = []

    def restricted(_: int, policy: int, __: object) -> None:  # as for a user with RLIMIT_RTPRIO alone
        if given and not policy & os.SCHED_RESET_ON_FORK:
            raise PermissionError
        given.append(policy)

    monkeypatch.setattr(os, "sched_setscheduler", restricted)
    with ahead_of_others():
        pass
    assert given == [policy | os.SCHED_RESET_ON_FORK for policy in (os.SCHED_RR, os.SCHED_OTHER)]


def test_without_the_right_to_go_first_the_thread_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", denied)
    with ahead_of_others():
        assert policy() == os.SCHED_OTHER
