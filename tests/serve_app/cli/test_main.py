"""The command ``tandem``: what it prints, where, and with which exit code."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from deployments.serve_seam.environment import serve_environment
from serve_app.checks.ray_schema import JOINT_POLICY
from serve_app.checks.yaml_checks import load_serve_yaml, parse_app_config
from serve_app.cli.main import _curl, _replace_model, main
from serve_app.kube.manifest import manifest_text, render_rayservice
from tests.serve_app.fake_endpoint import FakeEndpoint, refuse

ROOT = Path(__file__).parents[3]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
# Configs that `make test` asks vLLM about, for a CPU and for GPUs; `make test-slow` does it with the others.
_OFTEN = {"cpu_tiny", "h100_llama70b_fp8"}
COMMANDS = ["validate", "examples", "env", "render", "deploy", "serve", "quickstart", "status", "delete", "bench"]

COLOUR = re.compile(r"\x1b\[[\d;]*m")  # some CI machines ask for it

Run = Callable[..., tuple[int, str, str]]
MakeEndpoint = Callable[..., FakeEndpoint]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run ``tandem`` with these arguments: exit code, standard output, standard error."""

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["tandem", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
        out, err = (COLOUR.sub("", text) for text in capsys.readouterr())
        assert isinstance(exit_.value.code, int)
        return exit_.value.code, out, err

    return call


def mistake(run: Run, *arguments: object) -> str:
    """The one line for a mistake that a user can mend."""
    code, _, err = run(*arguments)
    assert code == 1
    (line,) = err.splitlines()
    assert line.startswith("tandem: ")
    return line.removeprefix("tandem: ")


def test_help_lists_every_command(run: Run) -> None:
    code, out, _ = run("--help")
    assert code == 0
    words = [line.strip("│| ").split() for line in out.splitlines()]
    listed = [word[0] for word in words if word and word[0] in COMMANDS and len(word) > 1]
    assert listed == COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(run: Run, command: str) -> None:
    code, out, _ = run(command, "--help")
    assert code == 0
    assert f"tandem {command} " in out


@pytest.mark.parametrize(
    "arguments", [["no-such-command"], ["bench", "--requests", "0"], ["bench", "--concurrency", "0"]]
)
def test_wrong_usage_is_exit_code_2(run: Run, arguments: list[str]) -> None:
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("Usage: ")


def test_bench_reports_on_synthetic_load(run: Run, make_endpoint: MakeEndpoint, tmp_path: Path) -> None:
    endpoint = make_endpoint()
    path = tmp_path / "new" / "report.json"
    load = ["--requests", 5, "--input-tokens", 17, "--output-tokens", 3, "--concurrency", 2]
    code, out, err = run("bench", "--url", endpoint.url, "--model", "m", *load, "--json", path)
    assert (code, err) == (0, "")
    report = json.loads(out)
    written = json.loads(path.read_text())
    timelines = written.pop("requests")
    assert written == report
    assert [(one["input_tokens"], one["output_tokens"], one["error"]) for one in timelines] == [(17, 3, None)] * 5
    assert all(one["sent_s"] <= one["first_token_s"] <= one["last_token_s"] for one in timelines)
    assert (report["requests_ok"], report["requests_failed"], report["errors"]) == (5, 0, {})
    assert set(report["ttft_s"]) == {"p50", "p90", "p99"}
    assert report["output_tokens_per_s"] == pytest.approx(5 * 3 / report["duration_s"])
    assert {(body["model"], len(body["prompt"]), body["max_tokens"]) for body in endpoint.bodies} == {("m", 17, 3)}
    assert endpoint.most_in_flight <= 2
    assert endpoint.keys == [None] * 5
    run("bench", "--url", endpoint.url, "--requests", 1, "--api-key", "mine")
    assert endpoint.keys[5:] == ["Bearer mine"]


def test_bench_replays_a_trace_scaled_and_cut(run: Run, make_endpoint: MakeEndpoint, tmp_path: Path) -> None:
    endpoint = make_endpoint()
    trace = tmp_path / "trace.csv"
    trace.write_text("timestamp_s,input_tokens,output_tokens\n0,10,4\n20,20,6\n9999,1,1\n")
    factors = ["--time-factor", 0.01, "--length-factor", 0.5, "--requests", 2]
    code, out, _ = run("bench", "--url", endpoint.url, "--trace", trace, *factors)
    assert (code, json.loads(out)["requests_ok"]) == (0, 2)
    assert [(len(body["prompt"]), body["max_tokens"]) for body in endpoint.bodies] == [(5, 2), (10, 3)]
    # 20 s x 0.01; asyncio may wake one tick of its clock early, and the first request may arrive late.
    assert json.loads(out)["duration_s"] >= 0.15


def test_bench_of_a_dead_url_is_one_line_and_exit_code_1(run: Run, dead_url: str) -> None:
    line = mistake(run, "bench", "--url", dead_url, "--requests", 3)
    assert line == f"no request to {dead_url} succeeded: {{'ClientConnectorError': 3}}"


def test_bench_with_one_good_answer_is_a_success_that_names_the_failures(run: Run, make_endpoint: MakeEndpoint) -> None:
    code, out, _ = run("bench", "--url", make_endpoint(refuse(503, first=2)).url, "--requests", 3)
    assert code == 0
    assert json.loads(out)["errors"] == {"HTTP 503": 2}


def test_a_report_that_cannot_be_written_is_printed_before_the_error_line(
    run: Run, make_endpoint: MakeEndpoint, tmp_path: Path
) -> None:
    code, out, err = run("bench", "--url", make_endpoint().url, "--requests", 1, "--json", tmp_path)
    assert (code, json.loads(out)["requests_ok"]) == (1, 1)
    assert err == f"tandem: --json {tmp_path}: Is a directory: give a file that can be written\n"


def test_trace_that_cannot_be_read_is_one_line(run: Run, tmp_path: Path) -> None:
    assert mistake(run, "bench", "--trace", tmp_path / "none.csv").startswith(
        f"--trace: {tmp_path}/none.csv: cannot be read"
    )


def test_a_shell_takes_the_environment_as_it_is(run: Run) -> None:
    code, out, err = run("env")
    assert (code, err) == (0, "")
    shown = subprocess.run(["bash", "-c", f"{out}\nenv -0"], capture_output=True, text=True, check=True).stdout
    assert serve_environment().items() <= dict(one.partition("=")[::2] for one in shown.split("\0")).items()


# Declared node types are refused: `tandem render` writes worker groups of its own.
@pytest.mark.parametrize("path", [path for path in CONFIGS if path.stem != "elastic"], ids=lambda path: path.stem)
def test_render_prints_the_manifest_and_nothing_else(run: Run, path: Path) -> None:
    code, out, err = run("render", path, "--image", "i:1", "--namespace", "ns", "--name", "n")
    assert (code, err) == (0, "")
    manifest = yaml.safe_load(out)
    assert (manifest["kind"], manifest["metadata"]) == ("RayService", {"name": "n", "namespace": "ns"})
    head = manifest["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert head["image"] == "i:1"
    document = load_serve_yaml(path)
    (args,) = (one["args"] for one in document["applications"])
    rendered = render_rayservice(document, parse_app_config(args), image="i:1", namespace="ns", name="n")
    assert out == manifest_text(rendered)


@pytest.mark.ray
@pytest.mark.parametrize(
    "path", [pytest.param(one, marks=() if one.stem in _OFTEN else pytest.mark.slow, id=one.stem) for one in CONFIGS]
)
def test_validate_says_that_a_shipped_config_is_fine(run: Run, path: Path) -> None:
    pytest.importorskip("ray.serve.schema")
    code, out, err = run("validate", path)
    assert (code, err) == (0, "")
    assert ": fine (" in " ".join(out.split())


@pytest.mark.ray
def test_validate_names_a_profile_of_another_model(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("ray.serve.schema")
    (tiny,) = (path for path in CONFIGS if path.stem == "cpu_tiny")
    document = load_serve_yaml(tiny)
    args, profile = document["applications"][0]["args"], str(tiny.parent / "profiles" / "h100_llama70b_fp8_tp4.json")
    args["autoscale"] = {"policy": {"kind": "default", "prefill": profile, "decode": profile}}
    document["applications"][0]["autoscaling_policy"] = JOINT_POLICY
    for role in ("prefill", "decode"):
        args["groups"][0][role]["max_replicas"] = 2
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(document))
    code, out, err = run("validate", tmp_path / "serve.yaml")
    assert code == 0 and ": fine (" in " ".join(out.split())
    notes = [line for line in err.splitlines() if line.startswith("note: profile h100_llama70b_fp8_tp4 has ")]
    assert len(notes) == 4  # of both roles: the model, and the GPU
    assert "and prefill:g0 has tiny: " in notes[0]


@pytest.mark.parametrize("command", ["validate", "render", "serve", "deploy", "quickstart"])
def test_a_missing_config_is_one_line_for_every_command_that_reads_one(run: Run, tmp_path: Path, command: str) -> None:
    assert (
        mistake(run, command, tmp_path / "none.yaml")
        == f"{tmp_path}/none.yaml: cannot be read: No such file or directory"
    )


def test_wrong_field_is_one_line_with_its_path_even_if_it_is_long_or_looks_like_markup(
    run: Run, make_app_args: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    path = tmp_path / "serve.yaml"
    wrong = make_app_args(model={"id": "m", "source": "org/m", "[red]" + "x" * 300: 1})
    path.write_text(yaml.safe_dump({"applications": [{"import_path": "serve_app.app:build", "args": wrong}]}))
    line = mistake(run, "render", path)
    assert "model.[red]" + "x" * 300 in line
    assert line.endswith("no such field; remove it or check its spelling")


@pytest.mark.ray
@pytest.mark.parametrize(
    ("name", "words"),
    [(None, "/v1/chat/completions -H 'Content-Type"), ("/keys", "completions -H 'Authorization: Bearer KEY' -H")],
)
def test_the_first_curl_line_has_a_key_if_the_endpoint_needs_one(
    make_app_args: Callable[..., dict[str, Any]], name: str | None, words: str
) -> None:
    config = parse_app_config(make_app_args(ingress={"api_keys_file": name}))
    assert words in _curl("http://localhost:1", config)


@pytest.mark.parametrize("applications", [[], [None], [{"args": None}], [{"args": []}], {}, None])
def test_model_of_a_config_without_args_cannot_be_replaced(run: Run, tmp_path: Path, applications: Any) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(yaml.safe_dump({"applications": applications}))
    words = "the config has no applications.0.args.model to replace"
    assert mistake(run, "serve", path, "--model", "org/m") == words


@pytest.mark.parametrize("before", [None, "tiny", {"id": "tiny", "source": "./models/tiny"}])
def test_the_option_model_replaces_any_model_of_the_config(
    before: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    monkeypatch.chdir(folder)
    expected = {
        str(folder): {"id": "mine", "source": str(folder)},
        "../mine": {"id": "mine", "source": str(folder)},
        ".": {"id": "mine", "source": str(folder)},
        "org/model": {"id": "model", "source": "org/model"},
        "./" + "x" * 300: {"id": "x" * 300, "source": "./" + "x" * 300},  # longer than a file name may be
    }
    for source, model in expected.items():
        document = {"applications": [{"args": {"model": before, "groups": []}}]}
        _replace_model(document, source)
        assert document == {"applications": [{"args": {"model": model, "groups": []}}]}
