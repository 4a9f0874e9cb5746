"""Whether vLLM takes an engine's arguments, asked in a process of its own before anything starts."""

import dataclasses
import difflib
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from deployments.config import GroupConfig, ModelConfig, RoleConfig

_TIMEOUT_S = 120.0


def engine_complaint(model: ModelConfig, groups: Sequence[GroupConfig], engine_kwargs: Mapping[str, Any]) -> str | None:
    """What vLLM has against the arguments of the first pool that it refuses, in one line, or ``None``.

    Names are checked for every pool; values, which vLLM checks against the model and the device, for engines on CPU
    whose model folder is here.
    """
    questions = [
        {"where": f"groups.{group.name}.{key.role}", **_question(model, pool, engine_kwargs)}
        for group in groups
        for key, pool in group.pools().items()
    ]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "deployments.engine_arguments"],
            input=json.dumps(questions, default=str),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
            env={**os.environ, "VLLM_LOGGING_STREAM": "ext://sys.stderr", "VLLM_PLUGINS": ""},
        )
    except subprocess.TimeoutExpired:
        return f"vLLM said nothing about engine_kwargs for {_TIMEOUT_S:g} s: is this machine overloaded?"
    if done.returncode:
        return f"vLLM cannot be asked about engine_kwargs: {' '.join(done.stderr.split())[-300:]}"
    complaint: str | None = json.loads(done.stdout)
    return complaint


def check_known(kwargs: Mapping[str, Any]) -> None:
    """Refuse engine arguments that vLLM does not have.

    Raises:
        ValueError: names the argument, and the nearest one that vLLM has.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import FrontendArgs

    known = {field.name for args in (AsyncEngineArgs, FrontendArgs) for field in dataclasses.fields(args)}
    for key in kwargs:
        if key not in known:
            raise ValueError(f"engine_kwargs: vLLM has no argument {key!r}{did_you_mean(key, known)}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the nearest one that is known, or nothing."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


def _question(model: ModelConfig, pool: RoleConfig, engine_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    here = pool.placement.accelerator_type is None and model.folder is not None and model.folder.is_dir()
    return {
        "kwargs": {**engine_kwargs, **pool.engine_kwargs},
        "model": str(model.folder) if here else None,
        "sizes": {
            "tensor_parallel_size": pool.tensor_parallel_size,
            "pipeline_parallel_size": pool.pipeline_parallel_size,
        },
    }


def _answer(questions: Sequence[Mapping[str, Any]]) -> str | None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    fields = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    asked: list[Mapping[str, Any]] = []
    for question in questions:
        engine = {key: question[key] for key in ("kwargs", "model", "sizes")}
        if engine in asked:
            continue
        asked.append(engine)
        try:
            check_known(question["kwargs"])
            if question["model"] is not None:
                kwargs = {key: value for key, value in question["kwargs"].items() if key in fields}
                AsyncEngineArgs(model=question["model"], **question["sizes"], **kwargs).create_engine_config()
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            field = "".join(f".{part}" for part in first["loc"][:1])
            return f"{question['where']}: engine_kwargs{field}: {first['msg'].removeprefix('Value error, ')}"[:400]
        except Exception as error:
            return f"{question['where']}: {textwrap.shorten(str(error), 400, placeholder=' ...')}"
    return None


if __name__ == "__main__":
    print(json.dumps(_answer(json.load(sys.stdin))))
