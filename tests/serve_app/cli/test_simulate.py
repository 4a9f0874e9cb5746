"""Laws of ``tandem simulate``."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from subprocess import PIPE
from typing import Any

import psutil
import pytest
import yaml
from typer.testing import CliRunner

from serve_app.checks.ray_schema import single_app_config
from serve_app.checks.yaml_checks import ConfigError, load_serve_yaml
from serve_app.cli.main import cli

pytestmark = pytest.mark.usefixtures("short_pressure_runs")

ROOT = Path(__file__).parents[3]
FIGURES = (
    *("slo_attainment_frac", "goodput_requests_per_s", "gpu_hours", "gpu_hours_over_oracle"),
    *("gpu_hours_over_causal_bound", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "tpot_p50_s", "tpot_p90_s"),
    *("scale_events", "ratio_within_band_frac"),
)


OWN = "tests.autoscale.own:Fixed"


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """A trace of 24 s, and a configuration with short starts."""
    rng = random.Random(0)
    rows, at = ["timestamp_s,input_tokens,output_tokens"], 0.0
    while at < 24.0:
        at += rng.expovariate(4.0 if at < 12.0 else 8.0)
        rows.append(f"{at:.3f},{rng.randint(200, 2500)},{rng.randint(10, 150)}")
    (tmp_path / "trace.csv").write_text("\n".join(rows) + "\n")
    document = yaml.safe_load((ROOT / "configs" / "sim" / "h100_llama70b.yaml").read_text())
    for role in ("prefill", "decode"):
        pool = document["groups"][0][role]
        pool |= {"profile": str(ROOT / "configs" / "profiles" / Path(pool["profile"]).name), "start_s": 5}
    document |= {"warm_up_s": 6, "oracle_simulated_requests": 1}
    (tmp_path / "sim.yaml").write_text(yaml.safe_dump(document))
    return str(tmp_path / "trace.csv"), str(tmp_path / "sim.yaml")


def simulate(*arguments: str) -> Any:
    """Run the command with one worker: starting a worker takes longer than its work here."""
    return CliRunner().invoke(cli, ["simulate", "--jobs", "1", *arguments])


def test_policies_are_compared_with_the_oracle_in_a_table_json_and_a_page(
    files: tuple[str, str], tmp_path: Path
) -> None:
    trace, config = files
    json_out, html_out = tmp_path / "out" / "report.json", tmp_path / "out" / "report.html"
    ran = simulate(
        *("--trace", trace, "--config", config, "--policy", "default,static,hpa", "--seeds", "2", "--jobs", "2"),
        *("--json", str(json_out), "--html", str(html_out)),
    )
    assert ran.exit_code == 0, ran.output + str(ran.exception)
    for name in ("default", "static", "hpa", "oracle", "causal bound", "aggregated"):
        assert name in ran.stdout
    report = json.loads(json_out.read_text())
    assert list(report["policies"]) == ["default", "static", "hpa"]
    for name, figures in report["policies"].items():
        assert all(figure in figures for figure in FIGURES), name
        assert 0.0 <= figures["slo_attainment_frac"] <= 1.0
        assert len(figures["seeds"]) == 2
        low, high = figures["intervals"]["gpu_hours"]
        assert low <= figures["gpu_hours"] <= high
        assert figures["gpu_hours_over_oracle"] >= 1.0 or figures["slo_attainment_frac"] < 0.994
    assert report["oracle"]["slo_attainment_frac"] >= 0.994
    assert report["oracle"]["gpu_hours"] <= report["smallest_static"]["gpu_hours"] * (1 + 1e-9)
    assert report["causal_bound"]["gpu_hours"] <= report["smallest_static"]["gpu_hours"] * (1 + 1e-9)
    assert report["policies"]["default"]["parameters"]["policy"]["decode"] == "h100_llama70b_fp8_tp2"
    assert len(report["trace"]["sha256"]) == len(report["config"]["sha256"]) == 64
    page = html_out.read_text()
    assert page.count("data:image/svg+xml;base64,") == 2
    assert "http://" not in page.replace("http://www.w3.org", "") and "<script" not in page


def test_a_policy_of_ones_own_is_compared_by_its_import_path(files: tuple[str, str], tmp_path: Path) -> None:
    json_out = tmp_path / "report.json"
    document = yaml.safe_load(Path(files[1]).read_text())
    document["policies"] = {"failing": {"policy": {"kind": OWN, "fault": "nan"}}}
    config = tmp_path / "own.yaml"
    config.write_text(yaml.safe_dump(document))
    names = f"{OWN},failing,tests.autoscale.own:Profiled"
    ran = simulate("--trace", files[0], "--config", str(config), "--policy", names, "--json", str(json_out))
    assert ran.exit_code == 0, ran.output + str(ran.exception)
    report = json.loads(json_out.read_text())
    assert list(report["policies"]) == names.split(",")
    assert report["policies"][OWN]["parameters"]["policy"] == {"kind": OWN, "decode": 2.0, "fault": ""}
    # A policy that sizes by profiles gets those of the first group.
    profiled = report["policies"]["tests.autoscale.own:Profiled"]["parameters"]["policy"]
    assert profiled["decode"] == "h100_llama70b_fp8_tp2"
    (flag,) = [line for line in report["flags"] if line.startswith("failing: ")]
    assert "of its decisions failed; the first one: policy tests.autoscale.own:Fixed wants nan decode replicas" in flag


def test_several_groups_are_shown_by_gpu_type_and_cost_without_bounds(files: tuple[str, str], tmp_path: Path) -> None:
    document = yaml.safe_load(Path(files[1]).read_text())
    (first,) = document["groups"]
    h200 = {"profile": str(ROOT / "configs" / "profiles" / "h200_llama8b_fp8_tp1.json"), "start_s": 10}
    document["groups"] = [first, {"name": "h200", "prefill": h200, "decode": h200}]
    config, json_out, html_out = (tmp_path / name for name in ("two.yaml", "two.json", "two.html"))
    config.write_text(yaml.safe_dump(document))
    ran = simulate(
        *("--trace", files[0], "--config", str(config), "--policy", "wva,hpa"),
        *("--json", str(json_out), "--html", str(html_out)),
    )
    assert ran.exit_code == 0, ran.output + str(ran.exception)
    assert "oracle:" not in ran.stdout and "H200" in ran.stdout
    report = json.loads(json_out.read_text())
    assert "oracle" not in report
    assert set(report["policies"]["wva"]["gpu_hours_by_type"]) == {"H100", "H200"}
    assert set(report["profiles"]) == {f"{role}:{name}" for role in ("prefill", "decode") for name in ("g0", "h200")}
    assert html_out.read_text().count("data:image/svg+xml;base64,") == 2


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--policy", "nope"], "there is no policy 'nope'"),
        (["--policy", "no_such_package:Mine"], "policy no_such_package:Mine cannot be imported: ModuleNotFoundError"),
        (["--policy", ","], "--policy: give at least one name"),
        (["--policy", "hpa,oracle"], "--policy oracle: is shown beside every policy anyway; leave it out"),
        (["--policy", "periodic"], "policies.periodic: policy.periodic.periods: Field required"),
        (["--rate-scale", "much"], "--rate-scale much: give a number above 0 and below 1000000, or auto"),
        (["--rate-scale", "-1"], "--rate-scale -1"),
        (["--rate-scale", "1000000"], "--rate-scale 1000000: give a number above 0 and below 1000000, or auto"),
        (["--start", "500"], "no request from --start 500 s on: the first is at"),
        (["--start", "500", "--duration", "5"], "no request from --start 500 to 505 s: the first is at"),
        (["--time-scale", "inf"], "--time-scale inf: give a number"),
        (["--rate-scale", "999999"], "requests x 999999 are"),
        (["--rate-scale", "0.0000001"], "requests x 1e-07 leave none"),
        (["--duration", "5"], "no request arrives after the warm-up"),
        (["--json", "/dev/null/report.json"], "--json /dev/null/report.json: /dev/null is no folder: give a file"),
        (["--html", "."], "--html .: . is a folder: give a file"),
    ],
)
def test_a_mistake_of_the_user_is_named_in_one_line(files: tuple[str, str], arguments: list[str], says: str) -> None:
    ran = simulate("--trace", files[0], "--config", files[1], *arguments)
    assert isinstance(ran.exception, ConfigError), ran.output
    assert says in str(ran.exception)


@pytest.mark.parametrize("command", [["simulate"], ["pressure-test"], ["curate", "--out", "best.yaml"]])
def test_strict_refuses_requests_beyond_the_profile(files: tuple[str, str], tmp_path: Path, command: list[str]) -> None:
    path = tmp_path / "long.csv"
    path.write_text("timestamp_s,input_tokens,output_tokens\n0,500,5\n\n1,140000,5\n2,131000,500\n")
    arguments = ["--trace", str(path), "--config", files[1], "--strict"]
    ran = CliRunner().invoke(cli, [*command, *arguments])
    assert "2 of 3 requests are beyond the profile, the first in line 4: 140000 + 5 tokens" in str(ran.exception)


def test_no_figure_is_cut_however_long_a_name_is(files: tuple[str, str], tmp_path: Path) -> None:
    document = yaml.safe_load(Path(files[1]).read_text())
    name = "static_with_a_name_that_leaves_hardly_any_room_for_figures"
    document["policies"] |= {name: {"policy": {"kind": "static", "prefill": 3, "decode": 2}}}
    config = tmp_path / "named.yaml"
    config.write_text(yaml.safe_dump(document))
    pages = []
    for turn in ("one", "two"):
        page = tmp_path / turn
        ran = simulate("--trace", files[0], "--config", str(config), "--policy", name, "--html", str(page))
        assert ran.exit_code == 0, ran.output + str(ran.exception)
        assert name in ran.stdout and "…" not in ran.stdout
        pages.append(page.read_bytes())
    assert pages[0] == pages[1]


def test_an_interrupt_ends_the_workers_without_a_traceback(files: tuple[str, str]) -> None:
    command = [sys.executable, "-m", "serve_app.cli.main", "simulate", "--trace", files[0], "--config", files[1]]
    command += ["--rate-scale", "auto"]
    # A shell lets background processes ignore interrupts; if it runs these tests so, the command would ignore them too.
    command = ["env", "--default-signal=INT", *command]
    running = subprocess.Popen(command, cwd=ROOT, start_new_session=True, stdout=PIPE, stderr=PIPE, text=True)
    with running:
        children: list[psutil.Process] = []
        for _ in range(600):
            children = psutil.Process(running.pid).children()
            if len(children) > 1 and sum(child.cpu_times().user for child in children) > 3.0:
                break
            time.sleep(0.1)
        os.killpg(running.pid, signal.SIGINT)
        out, err = running.communicate(timeout=300)
    assert running.returncode == 130
    assert "Traceback" not in out + err
    assert children and not psutil.wait_procs(children, timeout=60)[1]


def test_no_output_is_written_over_an_input_or_over_another_output(files: tuple[str, str], tmp_path: Path) -> None:
    base = ("--trace", files[0], "--config", files[1])
    ran = simulate(*base, "--json", files[0])
    assert f"--json {files[0]}: is the file of --trace too" in str(ran.exception)
    both = str(tmp_path / "both")
    ran = simulate(*base, "--json", both, "--html", both)
    assert f"--html {both}: is the file of --json too" in str(ran.exception)


def test_a_pipe_is_refused_since_its_hash_could_not_be_taken(files: tuple[str, str], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.csv")
    ran = simulate("--trace", str(tmp_path / "pipe.csv"), "--config", files[1])
    assert "pipe.csv: is no file" in str(ran.exception)


def test_an_objective_that_no_counts_meet_is_flagged_in_the_report(files: tuple[str, str], tmp_path: Path) -> None:
    document = yaml.safe_load(Path(files[1]).read_text())
    for role in ("prefill", "decode"):
        document["groups"][0][role]["highest_replicas"] = 1
    document["oracle_simulated_requests"] = 1
    config, out = tmp_path / "few.yaml", tmp_path / "few.json"
    config.write_text(yaml.safe_dump(document))
    ran = simulate("--trace", files[0], "--config", str(config), "--json", str(out), "--rate-scale", "3")
    assert ran.exit_code == 0, ran.output + str(ran.exception)
    (flag, *_) = (line for line in json.loads(out.read_text())["flags"] if line.startswith("oracle"))
    assert flag == "oracle: no counts were found that attain 99.40%; the nearest are shown"


def test_an_objective_that_no_request_can_meet_is_refused(files: tuple[str, str], tmp_path: Path) -> None:
    config = tmp_path / "tight.yaml"
    config.write_text(Path(files[1]).read_text().replace("tpot_s: 0.05\n", "tpot_s: 0.0001\n"))
    ran = simulate("--trace", files[0], "--config", str(config))
    assert "slo.tpot_s is 0.0001: none of the" in str(ran.exception)


def test_a_request_that_does_not_fit_any_engine_is_named(files: tuple[str, str], tmp_path: Path) -> None:
    path = tmp_path / "huge.csv"
    path.write_text("timestamp_s,input_tokens,output_tokens\n0,500,5\n1,300000,5\n")
    ran = simulate("--trace", str(path), "--config", files[1])
    assert "line 3: 300000 + 5 tokens do not fit the KV of an engine, 224128 tokens" in str(ran.exception)


def test_a_pressure_test_names_the_ratio(files: tuple[str, str], tmp_path: Path) -> None:
    out = tmp_path / "pressure.json"
    ran = CliRunner().invoke(
        cli, ["pressure-test", "--trace", files[0], "--config", files[1], "--gpus", "6", "--json", str(out)]
    )
    assert ran.exit_code == 0, ran.output + str(ran.exception)
    report = json.loads(out.read_text())
    assert f"pd_ratio {report['pd_ratio']}" in ran.stdout.replace("\n", " ")
    assert report["best"]["requests_per_s"] > report["aggregated"]["requests_per_s"]
    assert len(report["trace"]["sha256"]) == 64 and report["flags"] == []


def test_a_curated_configuration_can_be_simulated_and_served(files: tuple[str, str], tmp_path: Path) -> None:
    trace, config = files
    base = ["curate", "--trace", trace, "--config", config, "--gpus", "4", "--tries", "1", "--jobs", "1"]
    out = tmp_path / "curated.yaml"
    ran = CliRunner().invoke(cli, [*base, "--policy", "default,heteroscale", "--out", str(out)])
    assert ran.exit_code == 0, ran.output + str(ran.exception)
    best = out.read_text().splitlines()[0].split(": ")[1].split(",")[0]
    assert simulate("--trace", trace, "--config", str(out), "--policy", best).exit_code == 0
    served = tmp_path / "serve.yaml"
    emulated = str(ROOT / "configs" / "emulated.yaml")
    ran = CliRunner().invoke(cli, [*base, "--policy", "heteroscale", "--out", str(served), "--serve", emulated])
    assert ran.exit_code == 0, ran.output + str(ran.exception)
    args = yaml.safe_load(served.read_text())["applications"][0]["args"]
    assert args["autoscale"]["policy"]["kind"] == "heteroscale"
    assert "emulated.yaml serves other engines than were simulated" in ran.stdout.replace("\n", " ")
    assert single_app_config(load_serve_yaml(served)).is_autoscaled


def test_gpus_and_parameters_that_were_not_given_fit_the_config(files: tuple[str, str], tmp_path: Path) -> None:
    trace, config = files
    small = tmp_path / "small.yaml"
    document = yaml.safe_load(Path(config).read_text())
    for group in document["groups"]:
        for role in ("prefill", "decode"):
            group[role]["highest_replicas"] = 2
    document.pop("policies", None)  # curate has to find heteroscale's target
    small.write_text(yaml.safe_dump(document))
    out = tmp_path / "curated.yaml"
    base = ["--trace", trace, "--config", str(small)]
    ran = CliRunner().invoke(
        cli, ["curate", *base, "--policy", "heteroscale,heteroscale", "--tries", "1", "--jobs", "1", "--out", str(out)]
    )
    assert ran.exit_code == 0, ran.output + str(ran.exception)
    ran = CliRunner().invoke(cli, ["pressure-test", *base, "--gpus", "40"])
    given = re.search(r"40 GPUs make no split .* \(2 and 2\): give (\d+)", str(ran.exception))
    assert given is not None
    assert CliRunner().invoke(cli, ["pressure-test", *base, "--gpus", given[1]]).exit_code == 0


def test_only_an_autoscaled_application_can_be_curated(files: tuple[str, str], tmp_path: Path) -> None:
    fixed = str(ROOT / "configs" / "h100_llama70b_fp8.yaml")
    base = ["curate", "--trace", files[0], "--config", files[1], "--out", str(tmp_path / "x.yaml"), "--serve"]
    ran = CliRunner().invoke(cli, [*base, fixed])
    assert f"{fixed}: its application is not autoscaled: add autoscale" in str(ran.exception)
    (tmp_path / "none.yaml").write_text("applications: []\n")
    ran = CliRunner().invoke(cli, [*base, str(tmp_path / "none.yaml")])
    assert isinstance(ran.exception, ConfigError) and "exactly one application" in str(ran.exception)


def test_an_unknown_kind_cannot_be_curated(files: tuple[str, str], tmp_path: Path) -> None:
    ran = CliRunner().invoke(
        cli, ["curate", "--trace", files[0], "--config", files[1], "--policy", "periodic", "--out", str(tmp_path / "x")]
    )
    assert "periodic" in str(ran.exception)


def test_a_simulated_policy_is_never_put_into_an_application(files: tuple[str, str], tmp_path: Path) -> None:
    served = ["--out", str(tmp_path / "x.yaml"), "--serve", str(ROOT / "configs" / "emulated.yaml")]
    ran = CliRunner().invoke(cli, ["curate", "--trace", files[0], "--config", files[1], "--policy", "hpa", *served])
    assert "--policy hpa: for the simulator only, not with --serve" in str(ran.exception)
