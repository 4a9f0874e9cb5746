"""A fork runs the program that Ray gave it, and the server stays for the next one."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.lab.stand import forked_worker

pytestmark = pytest.mark.vllm

_PROGRAM = """
import json, os, sys
seen = [sys.argv[1:], os.environ["GIVEN"], os.getcwd(), "vllm" in sys.modules, "ray" in sys.modules, os.getppid()]
print(json.dumps(seen))
"""


def test_a_worker_is_a_fork_with_vllm_and_with_what_ray_gave_it(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    arguments = [f"--temp-dir={tmp_path}", "-x"]

    def run(given: str) -> list[Any]:
        command = [sys.executable, "-S", "-E", forked_worker.__file__, str(program), *arguments]
        environment = {**os.environ, "GIVEN": given}
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, check=True, timeout=300)
        seen: list[Any] = json.loads(done.stdout)
        return seen

    *first, server = run("one")
    try:
        *second, same_server = run("two")
    finally:
        os.kill(server, signal.SIGKILL)
    assert first == [arguments, "one", str(tmp_path), True, False]
    assert second == [arguments, "two", str(tmp_path), True, False]
    assert same_server == server
