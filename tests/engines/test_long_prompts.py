"""Groups for very long prompts, beside groups that a policy sizes, on emulated engines (DOPD section VII)."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.engines.endpoint import WAIT_S, eventually, forked_yaml, replica_processes, samples

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
_LEAST_TOKENS = 1000


@pytest.fixture(scope="module", name="app")
def _app() -> Iterator[Any]:
    from serve_app.sdk import deploy

    document = forked_yaml("long-prompts")
    args = document["applications"][0]["args"]
    usual = args["groups"][0]
    for role in ("prefill", "decode"):
        emulator = {"profile": str(ROOT / usual[role]["emulator"]["profile"]), "start_s": 0.0, "time_factor": 4.0}
        usual[role]["emulator"] = emulator
    pools = {role: {**usual[role], "max_replicas": None} for role in ("prefill", "decode")}
    args["long_prompts"] = {"least_tokens": _LEAST_TOKENS, "groups": [{"name": "far", **pools}]}
    with deploy(document) as running:
        yield running


def _ask(app: Any, tokens: int) -> None:
    body = {"model": "llama-70b", "prompt": [100] * tokens, "max_tokens": 2}
    answer = requests.post(f"{app.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text


def _prompts(app: Any) -> Counter[str]:
    """Prompts that each decode replica has answered."""
    counts = Counter[str]()
    for labels, value in samples(app, "tandem_prefill_path_total"):
        counts[labels["replica"]] += int(value)
    return +counts


async def test_only_very_long_prompts_go_to_their_group_and_to_others_while_it_has_no_replica(app: Any) -> None:
    _ask(app, 50)
    _ask(app, _LEAST_TOKENS - 1)
    await eventually(lambda: _prompts(app).total() == 2, WAIT_S)
    (usual,) = _prompts(app)
    _ask(app, _LEAST_TOKENS)
    _ask(app, _LEAST_TOKENS + 500)
    await eventually(lambda: _prompts(app).total() == 4, WAIT_S)
    assert _prompts(app)[usual] == 2
    for process in replica_processes(app, "decode:far"):
        process.kill()
    for _ in range(4):
        _ask(app, _LEAST_TOKENS + 500)  # none is lost: the usual group computes it, or the new replica does
