"""The engines that the cost benchmark serves, and the ratios of its rounds (no stack is started here)."""

import os
import subprocess
import sys

import psutil
import pytest
import typer
from typer.testing import CliRunner

from serve_app.checks.yaml_checks import parse_app_config
from tests.lab.bench.cost import ENGINES, main, summary, tree_cpu_s


@pytest.mark.parametrize("name", ENGINES)
def test_one_engine_of_each_role_is_served(name: str) -> None:
    config = parse_app_config(ENGINES[name].document()["applications"][0]["args"])
    assert [group.prefill.replicas + group.decode.replicas for group in config.groups] == [2]
    assert not config.is_autoscaled


def test_ratios_are_taken_round_by_round_and_the_median_counts() -> None:
    rounds = [
        {
            side: {"cpu_ms_per_request": cost, "cpu_ms_per_request_above_rest": cost - 1.0, "rest_cores": 0.1}
            for side, cost in (("base", base), ("this", this))
        }
        for base, this in ((10.0, 11.0), (20.0, 21.0), (40.0, 40.0))
    ]
    row = summary(rounds)
    assert row["cpu_ms_per_request_ratios"] == pytest.approx([1.1, 1.05, 1.0])
    assert row["cpu_ms_per_request_ratio"] == pytest.approx(1.05)
    assert row["cpu_ms_per_request_above_rest_ratio"] == pytest.approx(20 / 19)
    assert (row["base_cpu_ms_per_request"], row["this_cpu_ms_per_request"]) == (20.0, 21.0)


def test_cpu_time_is_that_of_the_whole_tree() -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass\n"
    outer = f"import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {burn + 'time.sleep(60)'!r}])\n"
    parent = subprocess.Popen([sys.executable, "-c", outer + "time.sleep(60)"])
    try:
        tree = psutil.Process(parent.pid)
        while tree_cpu_s(tree) < 0.3:
            assert parent.poll() is None
            os.sched_yield()
        assert sum(psutil.Process(parent.pid).cpu_times()[:2]) < 0.3
    finally:
        for one in [*tree.children(recursive=True), tree]:
            one.kill()
        parent.wait()


def test_unknown_engines_are_wrong_usage() -> None:
    command = typer.Typer()
    command.command()(main)
    assert CliRunner().invoke(command, [".", "--engines", "bogus"]).exit_code == 2
