"""vLLM's own load generator, ``vllm bench serve``, in the environment of Tandem.

It runs in this process: an import of vLLM takes 12 s of CPU time. vLLM's CPU build has no command ``vllm``, because its
package has another name.
"""

import json
from pathlib import Path

from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tests.lab.clients.checks import Checks, Server

checks, server = Checks(), Server.load()
_MODEL = ("--model", server.model, "--tokenizer", server.tokenizer)
_RANDOM = ("--dataset-name", "random", "--random-input-len", "96", "--random-output-len", "8")


def bench(requests: int, *arguments: str, model: tuple[str, ...] = _MODEL) -> None:
    """Run the load generator; every request must be answered, with tokens."""
    result = Path(server.folder) / "vllm_bench.json"
    result.unlink(missing_ok=True)
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    settings = [
        *("--base-url", server.url, "--save-result", "--result-dir", server.folder, "--result-filename", result.name),
        *("--num-prompts", str(requests), "--header", f"Authorization=Bearer {server.key}"),
    ]
    main(parser.parse_args([*settings, *model, *arguments]))
    figures = json.loads(result.read_text())
    assert figures["completed"] == requests and not figures.get("failed"), figures
    assert figures["total_output_tokens"] > 0 and figures["mean_ttft_ms"] > 0, figures


def file_of(name: str, rows: list[dict[str, object]]) -> str:
    """The path of a file with one line of JSON per row."""
    path = Path(server.folder) / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@checks.add
def random_prompts() -> None:
    """Random prompts through completions."""
    bench(16, *_RANDOM, "--ignore-eos", "--logprobs", "1")


@checks.add
def chat() -> None:
    """Random prompts through chat, four at a time."""
    bench(12, *_RANDOM, "--backend", "openai-chat", "--endpoint", "/v1/chat/completions", "--max-concurrency", "4")


@checks.add
def model_found_by_itself() -> None:
    """Without ``--model`` it asks the server which model it serves."""
    bench(4, *_RANDOM, model=("--tokenizer", server.tokenizer))


@checks.add
def custom_prompts() -> None:
    """Prompts of a file."""
    path = file_of("custom.jsonl", [{"prompt": f"Part {number} of the licence. " * 8} for number in range(8)])
    bench(8, "--dataset-name", "custom", "--dataset-path", path, "--custom-output-len", "8")


@checks.add
def timed_trace() -> None:
    """A trace at its own times."""
    rows: list[dict[str, object]] = [
        {"timestamp": 100 * number, "input_length": 64, "output_length": 8, "hash_ids": [number, number + 1]}
        for number in range(8)
    ]
    bench(
        8,
        *("--dataset-name", "timed_trace", "--dataset-path", file_of("trace.jsonl", rows), "--self-timed"),
        *("--timed-trace-chunk-hash-size", "32", "--timed-trace-sec-multiplier", "0.001"),
    )


@checks.add
def beam_search() -> None:
    """Beam search of two."""
    bench(2, *_RANDOM, "--use-beam-search", "--extra-body", '{"n": 2}')


if __name__ == "__main__":
    checks.run()
