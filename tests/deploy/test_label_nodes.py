"""deploy/label_nodes.sh: the command it prints, and one clear line for what it cannot use."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "deploy/label_nodes.sh"


def run(*arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": path} if path is not None else None
    command = ["bash", str(SCRIPT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


def test_worker_command_has_all_labels_and_passes_options_on() -> None:
    levels = ["--dc", "dc1", "--cluster", "c1", "--s2", "spine-1", "--s1", "switch-a", "--s0", "tor.7"]
    done = run("--address", "10.0.0.1:6379", *levels, "--", "--num-cpus=64", "--node-name=a b")
    assert done.returncode == 0, done.stderr
    labels = "tandem.io/dc=dc1,tandem.io/cluster=c1,tandem.io/s2=spine-1,tandem.io/s1=switch-a,tandem.io/s0=tor.7"
    # %q quotes what the shell would otherwise split or expand, so that the line can be pasted.
    asked = subprocess.run(["bash", "-c", f"printf '%s\\n' {done.stdout}"], capture_output=True, text=True, timeout=120)
    assert asked.stdout.splitlines() == [
        "ray",
        "start",
        "--address=10.0.0.1:6379",
        f"--labels={labels}",
        "--num-cpus=64",
        "--node-name=a b",
    ]


def test_head_command_needs_no_address() -> None:
    done = run("--head", "--s1", "switch-a")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ray start --head --labels=tandem.io/s1=switch-a\n"


def test_run_executes_ray(tmp_path: Path) -> None:
    ray = tmp_path / "ray"
    ray.write_text('#!/bin/sh\necho "ran: $*"\n')
    ray.chmod(0o755)
    done = run("--run", "--head", "--s1", "a", path=f"{tmp_path}:{os.environ['PATH']}")
    assert (done.returncode, done.stdout) == (0, "ran: start --head --labels=tandem.io/s1=a\n")


def test_help_shows_the_usage() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert done.stdout.startswith("Usage: label_nodes.sh")
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no label given"),
        (["--head"], "no label given"),
        (["--s1", "a"], "give --head, or --address"),
        (["--head", "--address", "h:1", "--s1", "a"], "exclude each other"),
        (["--head", "--s1"], "--s1 needs a value"),
        (["--head", "--s1", ""], "--s1: '' is no label value"),
        (["--head", "--s1", "a,tandem.io/s2=b"], "is no label value"),
        (["--head", "--s1", "-a"], "is no label value"),
        (["--head", "--s1", "a" * 64], "is no label value"),
        (["--head", "--s1", "a b"], "is no label value"),
        (["--head", "--s1", "a", "--s1", "b"], "--s1 is given twice"),
        (["--address", "nowhere", "--s1", "a"], "is not HOST:PORT"),
        (["--head", "--s3", "a"], "unknown argument '--s3'"),
        (["--head", "--s1", "a", "extra"], "unknown argument 'extra'"),
    ],
)
def test_bad_arguments_give_one_line_and_code_2(arguments: list[str], message: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_longest_label_value_is_accepted() -> None:
    assert run("--head", "--s1", "a" * 63).returncode == 0
