"""Laws of ``tandem trace``."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from autoscale.traces.trace import load_trace
from serve_app.checks.yaml_checks import ConfigError
from serve_app.cli import traces as cli_trace

AZURE = Path(__file__).parents[3] / "configs" / "traces" / "azure_conv_60s.csv"
PLAIN = ("--poisson", "5", "--duration", "600", "--input-tokens", "1000", "--output-tokens", "200")
YAML = """\
duration_s: 60
arrivals: {kind: poisson, rate: {kind: stairs, stairs_requests_per_s: [10, 0]}}
lengths:
  kind: separate
  input_tokens: {kind: lognormal, median_tokens: 800, sigma: 0.8, highest_tokens: 8000}
  output_tokens: {kind: pareto, lowest_tokens: 10, highest_tokens: 1000, alpha: 1.5}
"""
# As LiteLLM's StandardLoggingPayload has it.
RECORD = {"startTime": 1737710446.5, "status": "success", "prompt_tokens": 10, "completion_tokens": 20}
# As vLLM 0.29 sends it to a collector, whose file exporter writes it.
SPAN = {
    "name": "llm_request",
    "startTimeUnixNano": "1795374853985166592",
    "attributes": [
        {"key": "gen_ai.usage.prompt_tokens", "value": {"intValue": "2"}},
        {"key": "gen_ai.usage.completion_tokens", "value": {"intValue": "3"}},
    ],
}


def trace(*arguments: object) -> Any:
    app = typer.Typer()
    app.add_typer(cli_trace.commands)
    return CliRunner().invoke(app, ["trace", *map(str, arguments)])


def refusal(*arguments: object) -> str:
    """The one line that a user gets."""
    ran = trace(*arguments)
    assert isinstance(ran.exception, ConfigError), ran.output
    assert "\n" not in str(ran.exception)
    return str(ran.exception)


def test_a_plain_trace_is_written_and_its_seed_repeats_it(tmp_path: Path) -> None:
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        ran = trace("synthesize", *PLAIN, "--seed", seed, "--out", tmp_path / "new" / f"{name}.csv.gz")
        assert ran.exit_code == 0, ran.output
    a, b, c = ((tmp_path / "new" / f"{name}.csv.gz").read_bytes() for name in "abc")
    assert a == b != c
    requests = load_trace(tmp_path / "new" / "a.csv.gz")
    # Three standard deviations of 3000 arrivals.
    assert len(requests) == pytest.approx(3000, abs=165)
    assert {(request.input_tokens, request.output_tokens) for request in requests} == {(1000, 200)}


def test_a_configuration_is_synthesized(tmp_path: Path) -> None:
    (tmp_path / "w.yaml").write_text(YAML)
    ran = trace("synthesize", "--config", tmp_path / "w.yaml", "--out", tmp_path / "a.csv")
    assert ran.exit_code == 0, ran.output
    requests = load_trace(tmp_path / "a.csv")
    assert f"a.csv: {len(requests)} requests in " in ran.stdout
    assert requests[-1].at_s < 30.0
    assert max(request.input_tokens for request in requests) <= 8000


def test_a_synthesis_that_fails_says_why(tmp_path: Path) -> None:
    config = tmp_path / "w.yaml"
    config.write_text(YAML.replace("10, 0", "10, -1"))
    out = ("--out", tmp_path / "a.csv")
    says = f"{config}: arrivals.rate.stairs_requests_per_s.1: Input should be greater than or equal to 0, got -1"
    assert refusal("synthesize", "--config", config, *out) == says
    missing = refusal("synthesize", "--config", tmp_path / "none.yaml", *out)
    assert missing == f"{tmp_path / 'none.yaml'}: cannot be read: No such file or directory"
    both = refusal("synthesize", "--config", config, "--duration", 5, *out)
    assert both == f"--config is given too: set --duration in {config}"
    missing = refusal("synthesize", *PLAIN[:4], *out)
    assert missing.endswith(
        "all of --poisson, --duration, --input-tokens, --output-tokens: --input-tokens, --output-tokens is missing"
    )
    wrong = refusal("synthesize", *PLAIN[:-1], "0", *out)
    assert wrong == "the options: lengths.output_tokens.tokens: Input should be greater than or equal to 1, got 0"
    empty = refusal("synthesize", "--poisson", "0.001", *PLAIN[2:3], "1", *PLAIN[4:], *out)
    assert empty == "no request came in 1 s: raise the rate or the duration"
    assert not (tmp_path / "a.csv").exists()
    assert "cannot be written: Is a directory" in refusal("synthesize", *PLAIN, "--out", tmp_path)


def test_spans_are_imported_and_left_out_lines_are_counted(tmp_path: Path) -> None:
    log, out = tmp_path / "spans.jsonl", tmp_path / "a.csv"
    log.write_text("not JSON\n" + json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [SPAN]}]}]}) + "\n")
    ran = trace("import", "--vllm", log, "--out", out)
    assert ran.exit_code == 0, ran.output
    assert "a.csv: 1 requests in 0.0 s, -, from vLLM's spans" in ran.stdout
    assert "left out: 1 other lines" in ran.stdout
    assert out.read_text() == "timestamp_s,input_tokens,output_tokens\n0.0,2,3\n"


def test_logs_of_several_proxies_are_one_trace(tmp_path: Path) -> None:
    first, second, out = tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "a.csv"
    first.write_text(json.dumps(RECORD) + "\n")
    second.write_text(json.dumps(RECORD | {"startTime": 1737710440.0}) + "\n")
    ran = trace("import", "--openai", first, "--openai", second, "--out", out)
    assert ran.exit_code == 0, ran.output
    assert out.read_text() == "timestamp_s,input_tokens,output_tokens\n0.0,10,20\n6.5,10,20\n"
    assert "left out" not in ran.stdout


def test_an_import_that_fails_says_why(tmp_path: Path) -> None:
    path, out = tmp_path / "a.jsonl", ("--out", tmp_path / "a.csv")
    path.write_text(json.dumps(RECORD | {"prompt_tokens": -1}) + "\n")
    assert refusal("import", *out) == "give --vllm or --openai, and not both"
    assert refusal("import", "--vllm", path, "--openai", path, *out) == "give --vllm or --openai, and not both"
    says = f"{path}: line 1: prompt_tokens is -1: expected a whole number, 0 or more"
    assert refusal("import", "--openai", path, *out) == says
    assert "no request with both lengths" in refusal("import", "--vllm", path, *out)
    assert not (tmp_path / "a.csv").exists()


def cells(text: str, name: str) -> list[str]:
    """The cells of the table row that begins with this name."""
    return next(line.split() for line in text.splitlines() if line.strip().startswith(name))


def test_a_trace_is_shown(tmp_path: Path) -> None:
    # Ten requests in the first second, then one each ten seconds.
    at_s = [*(n / 10 for n in range(10)), *(float(10 * n) for n in range(1, 11))]
    rows = "".join(f"{at},{n + 1},{7}\n" for n, at in enumerate(at_s))
    path = tmp_path / "a.csv"
    path.write_text("timestamp_s,input_tokens,output_tokens\n" + rows)
    ran = trace("show", path, "--window", "2")
    assert ran.exit_code == 0, ran.output
    assert cells(ran.stdout, "requests") == ["requests", "20"]
    assert cells(ran.stdout, "span") == ["span", "100.0", "s"]
    assert cells(ran.stdout, "mean rate") == ["mean", "rate", "0.19", "/s"]
    assert cells(ran.stdout, "peak rate") == ["peak", "rate", "over", "2", "s", "5", "/s"]
    # Nine gaps of 0.1 s, one of 9.1 s, nine of 10 s: mean 100 / 19, mean square 982.9 / 19.
    assert cells(ran.stdout, "CV of gaps")[-1] == f"{(982.9 / 19 - (100 / 19) ** 2) ** 0.5 / (100 / 19):.2f}"
    assert cells(ran.stdout, "input") == ["input", "10", "10", "18", "20", "20", "210"]
    assert cells(ran.stdout, "output") == ["output", "7", "7", "7", "7", "7", "140"]


def test_one_request_has_neither_rates_nor_gaps(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("timestamp_s,input_tokens,output_tokens\n0,5,7\n")
    ran = trace("show", path)
    assert [cells(ran.stdout, name)[-1] for name in ("mean rate", "peak rate", "CV of gaps")] == ["-", "-", "-"]


def test_the_committed_sample_is_shown_and_a_file_that_is_no_trace_is_refused(tmp_path: Path) -> None:
    assert cells(trace("show", AZURE).stdout, "requests") == ["requests", "265"]
    assert "cannot be read" in refusal("show", tmp_path / "none.csv")
