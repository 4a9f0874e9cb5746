"""A check of engine arguments by vLLM itself, in a separate process, before anything starts."""

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

_TIMEOUT_S = 120.0  # longest check, seconds: vLLM takes seconds to import, and longer on a busy machine
_CAUSE_CHARS = 400  # longest refusal of vLLM in a message, characters


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolArguments:
    """Arguments of the engines of one pool.

    Attributes:
        where: name of the pool in messages.
        kwargs: the pool's engine arguments.
        model: folder of the model; values are checked against it and this machine's device. ``None``: only names are
            checked.
        sizes: tensor and pipeline parallel sizes.
    """

    where: str
    kwargs: Mapping[str, Any]
    model: str | None
    sizes: Mapping[str, int]


def engine_complaint(pools: Sequence[PoolArguments]) -> str | None:
    """Why vLLM refuses the arguments of a pool, or cannot check them, in one line; ``None``: it accepts all.

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
            # No plugins: they change the processes of an engine, which the check does not start.
            env={**os.environ, "VLLM_LOGGING_STREAM": "ext://sys.stderr", "VLLM_PLUGINS": ""},
        )
    except subprocess.TimeoutExpired:
        return f"vLLM did not check engine_kwargs within {_TIMEOUT_S:g} s: run it again when this machine is less busy"
    if done.returncode:
        return f"the check of engine_kwargs in vLLM failed: {' '.join(done.stderr.split())[-300:]}"
    return json.loads(done.stdout)


def check_known(kwargs: Mapping[str, Any]) -> None:
    """Refuse engine arguments that vLLM does not have.

    Needs: ``vllm.engine.arg_utils.AsyncEngineArgs`` and ``vllm.entrypoints.launchers.cli_args.FrontendArgs``, both
    dataclasses whose fields are the arguments.
    Without it: no configuration passes ``tandem validate``; it names the import that failed.

    Raises ValueError: vLLM has no such argument; the message has the most similar one.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import FrontendArgs

    argument_names = {field.name for args in (AsyncEngineArgs, FrontendArgs) for field in dataclasses.fields(args)}
    for key in kwargs:
        if key not in argument_names:
            raise ValueError(f"engine_kwargs: vLLM has no argument {key!r}{did_you_mean(key, argument_names)}")


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The end of a message about an unknown name: the most similar one of ``names``, or an empty text."""
    matches = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def _first_refusal(pools: Sequence[PoolArguments]) -> str | None:
    """Check pools in this process; returns as ``engine_complaint``."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    fields = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    checked: list[PoolArguments] = []
    for pool in pools:
        engine = dataclasses.replace(pool, where="")
        if engine in checked:  # another pool has equal arguments
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
            return f"{pool.where}: engine_kwargs{field}: {first['msg'].removeprefix('Value error, ')}"[:_CAUSE_CHARS]
        except Exception as error:
            return f"{pool.where}: {textwrap.shorten(str(error), _CAUSE_CHARS, placeholder=' ...')}"
    return None


if __name__ == "__main__":
    print(json.dumps(_first_refusal([PoolArguments(**pool) for pool in json.load(sys.stdin)])))
