"""GuideLLM, a load generator: chat, completions and the Responses API."""

import json
from pathlib import Path
from typing import Any

from tests.lab.clients.checks import Checks, Server, call

checks, server = Checks(), Server.load()
_REQUESTS = 6


def run(*, model: str = server.model, profile: str = "kind=synchronous", **backend: Any) -> None:
    """Send synthetic prompts; every request must be answered, with tokens."""
    report = Path(server.folder) / "guidellm.json"
    report.unlink(missing_ok=True)
    values = {"kind": "openai_http", "target": server.url, "api_key": server.key, **backend}
    if model:
        values["model"] = model
    call(
        "guidellm",
        *("run", "--disable-console", "--backend", json.dumps(values), "--profile", profile),
        *("--constraint", f"kind=max_requests,count={_REQUESTS}", "--output", f"kind=json,path={report}"),
        *("--tokenizer", f"kind=huggingface_auto,model={server.tokenizer}"),
        *("--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=8"),
    )
    (figures,) = json.loads(report.read_text())["benchmarks"]
    totals = figures["metrics"]["request_totals"]
    assert totals["successful"] == _REQUESTS and not totals["errored"], totals
    assert figures["metrics"]["output_token_count"]["successful"]["mean"] >= 1


@checks.add
def chat() -> None:
    """Chat, three at a time."""
    run(profile="kind=concurrent,streams=3")


@checks.add
def completions() -> None:
    """Completions."""
    run(request_format="/v1/completions")


@checks.add
def model_found_by_itself() -> None:
    """Without a model it takes the one that the server lists."""
    run(model="")


@checks.add
def responses() -> None:
    """The Responses API."""
    run(request_format="/v1/responses")


if __name__ == "__main__":
    checks.run()
