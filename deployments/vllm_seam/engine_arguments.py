"""Checks an engine's arguments with vLLM, in a separate process, before anything starts."""

import dataclasses
import difflib
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

_TIMEOUT_S = 120.0  # vLLM takes seconds to import, and longer on a busy machine


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolArguments:
    """Arguments of the engines of one pool."""

    where: str  # the pool, for messages
    kwargs: Mapping[str, Any]
    model: str | None  # its folder, for values to be checked against the model and the device; ``None``: only names are
    sizes: Mapping[str, int]  # tensor and pipeline parallel


def engine_complaint(pools: Sequence[PoolArguments]) -> str | None:
    """Why vLLM refuses the arguments of a pool, or why it could not check them, in one line; ``None``: it accepts all.

    Needs: vLLM importable in a process of its own, which reads ``VLLM_PLUGINS`` and ``VLLM_LOGGING_STREAM``.
    Without it: ``tandem validate`` reports that the check of engine_kwargs in vLLM failed.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", "deployments.vllm_seam.engine_arguments"],
            input=json.dumps([dataclasses.asdict(pool) for pool in pools], default=str),
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
            # No plugins: they change the processes of an engine, and the check starts no engine.
            env={**os.environ, "VLLM_LOGGING_STREAM": "ext://sys.stderr", "VLLM_PLUGINS": ""},
        )
    except subprocess.TimeoutExpired:
        return f"vLLM did not check engine_kwargs within {_TIMEOUT_S:g} s: run it again when this machine is less busy"
    if done.returncode:
        return f"the check of engine_kwargs in vLLM failed: {' '.join(done.stderr.split())[-300:]}"
    complaint: str | None = json.loads(done.stdout)
    return complaint


def check_known(kwargs: Mapping[str, Any]) -> None:
    """Refuse engine arguments that vLLM does not have.

    Needs: ``vllm.engine.arg_utils.AsyncEngineArgs`` and ``vllm.entrypoints.launchers.cli_args.FrontendArgs``, both
    dataclasses whose fields are the arguments.
    Without it: no configuration passes ``tandem validate``; it names the import that failed.

    Raises ValueError: it names the argument, and the nearest one that vLLM has.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import FrontendArgs

    argument_names = {field.name for args in (AsyncEngineArgs, FrontendArgs) for field in dataclasses.fields(args)}
    for key in kwargs:
        if key not in argument_names:
            raise ValueError(f"engine_kwargs: vLLM has no argument {key!r}{did_you_mean(key, argument_names)}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the most similar known name, or nothing."""
    matches = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def _first_refusal(pools: Sequence[PoolArguments]) -> str | None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    fields = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    checked: list[PoolArguments] = []
    for pool in pools:
        engine = dataclasses.replace(pool, where="")
        if engine in checked:
            continue
        checked.append(engine)
        try:
            check_known(pool.kwargs)
            if pool.model is not None:
                kwargs = {key: value for key, value in pool.kwargs.items() if key in fields}
                AsyncEngineArgs(model=pool.model, **pool.sizes, **kwargs).create_engine_config()
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            field = "".join(f".{part}" for part in first["loc"][:1])
            return f"{pool.where}: engine_kwargs{field}: {first['msg'].removeprefix('Value error, ')}"[:400]
        except Exception as error:
            return f"{pool.where}: {textwrap.shorten(str(error), 400, placeholder=' ...')}"
    return None


if __name__ == "__main__":
    print(json.dumps(_first_refusal([PoolArguments(**pool) for pool in json.load(sys.stdin)])))
