"""EleutherAI's lm-evaluation-harness on tasks of this file: log likelihoods and generation, no data set of a hub."""

import json
import os
from pathlib import Path
from typing import Any

import yaml
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from tests.lab.clients.checks import Checks, Server

checks, server = Checks(), Server.load()
os.environ["OPENAI_API_KEY"] = server.key
os.environ["HF_HOME"] = f"{server.folder}/hf"
_TASKS = Path(server.folder) / "lm_eval_tasks"
_CHOICES = ["the work", "a copy of the licence", "no warranty"]
# Largest difference of a log likelihood that rounding explains.
_SAME = 1e-3


def write_tasks() -> TaskManager:
    """A task of choices, one of texts and one of answers, on four questions."""
    _TASKS.mkdir(exist_ok=True)
    data = _TASKS / "questions.jsonl"
    rows = [
        {"text": f"Section {number} of the licence grants each contributor the right to copy", "choices": _CHOICES}
        for number in range(4)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "{{text}}",
    }
    tasks: dict[str, dict[str, Any]] = {
        "tandem_choices": {
            "output_type": "multiple_choice",
            "doc_to_choice": "choices",
            "doc_to_target": 0,
            "metric_list": [{"metric": "acc"}],
        },
        "tandem_texts": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}],
        },
        "tandem_answers": {
            "output_type": "generate_until",
            "doc_to_target": "the work",
            "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 8, "do_sample": False},
            "metric_list": [{"metric": "exact_match"}],
        },
    }
    for name, values in tasks.items():
        (_TASKS / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, **common, **values}))
    return TaskManager(include_path=str(_TASKS), include_defaults=False)


manager = write_tasks()


def evaluate(task: str, route: str = "completions", **arguments: Any) -> list[Any]:
    """What the model answered to the task's requests."""
    model = {"completions": "local-completions", "chat/completions": "local-chat-completions"}[route]
    result = simple_evaluate(
        model=model,
        model_args={"model": server.model, "base_url": f"{server.base_url}/{route}", "max_retries": 1, **arguments},
        tasks=[task],
        task_manager=manager,
        bootstrap_iters=0,
        apply_chat_template=route.startswith("chat"),
    )
    return [answer for sample in result["samples"][task] for answer in sample["filtered_resps"]]


def log_likelihoods(task: str, **arguments: Any) -> list[float]:
    """The log likelihoods that a task's answers have."""
    found = [
        float(answer[0]) if isinstance(answer, list | tuple) else float(answer)
        for answer in evaluate(task, **arguments)
    ]
    assert found and all(value < 0 for value in found), found
    return found


def by_ids() -> dict[str, Any]:
    """Prompts as token ids of a local tokenizer."""
    return {"tokenizer_backend": "huggingface", "tokenizer": server.tokenizer, "tokenized_requests": True}


@checks.add
def log_likelihoods_by_ids() -> None:
    """One at a time, and several in one request, have the same scores."""
    alone = log_likelihoods("tandem_choices", **by_ids())
    together = log_likelihoods("tandem_choices", batch_size=4, **by_ids())
    assert len(alone) == 12 and all(abs(a - b) < _SAME for a, b in zip(alone, together, strict=True))


@checks.add
def log_likelihoods_by_text() -> None:
    """Prompts as text, which the server's tokenizer splits."""
    found = log_likelihoods("tandem_choices", tokenizer_backend="remote", tokenized_requests=False)
    assert len(found) == 12


@checks.add
def remote_tokenizer() -> None:
    """The server's own tokenizer has the scores of the local one."""
    remote = log_likelihoods("tandem_choices", tokenizer_backend="remote", tokenized_requests=True)
    local = log_likelihoods("tandem_choices", **by_ids())
    assert all(abs(a - b) < _SAME for a, b in zip(remote, local, strict=True)), (remote, local)


@checks.add
def rolling_log_likelihoods() -> None:
    """The likelihood of whole texts."""
    assert len(log_likelihoods("tandem_texts", max_length=512, **by_ids())) == 4


@checks.add
def generation() -> None:
    """Answers by ids and by text are the same."""
    texts = evaluate("tandem_answers", **by_ids())
    assert len(texts) == 4 and all(texts)
    assert evaluate("tandem_answers", tokenizer_backend="none") == texts


@checks.add
def chat_generation() -> None:
    """Answers through chat."""
    texts = evaluate("tandem_answers", "chat/completions")
    assert len(texts) == 4 and all(texts)


if __name__ == "__main__":
    checks.run()
