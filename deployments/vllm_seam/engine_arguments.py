"""A check of engine arguments by vLLM itself, in a separate process, before anything starts."""

import dataclasses
import json
import os
import subprocess
import sys
import textwrap
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from deployments.explain import did_you_mean
from deployments.pooling_config import is_pooling
from deployments.vllm_seam.nested_arguments import check_nested_names, first_fault, parse_nested
from deployments.vllm_seam.parser_plugins import check_parsers, import_parser_plugins

_TIMEOUT_S = 300.0  # longest check, seconds: vLLM takes seconds to import, and minutes on a machine that is overloaded
_CAUSE_CHARS = 400  # longest refusal of vLLM in a message, characters


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolArguments:
    """Arguments of the engines of one pool.

    Attributes:
        where: name of the pool in messages.
        kwargs: the pool's engine arguments.
        model: folder of the model; values are checked against it and this machine's device. ``None``: only names and
            arguments of vLLM's server are checked.
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


def _first_refusal(pools: Sequence[PoolArguments]) -> str | None:
    """Check pools in this process; returns as ``engine_complaint``."""
    checked: list[PoolArguments] = []
    for pool in pools:
        engine = dataclasses.replace(pool, where="")
        if engine in checked:  # another pool has equal arguments
            continue
        checked.append(engine)
        try:
            _check(pool)
        except ValidationError as error:
            return f"{pool.where}: {first_fault(error)}"[:_CAUSE_CHARS]
        except Exception as error:
            return f"{pool.where}: {textwrap.shorten(str(error), _CAUSE_CHARS, placeholder=' ...')}"
    return None


def _check(pool: PoolArguments) -> None:
    """Check the arguments of one pool by vLLM's own rules, as a replica of it will.

    Raises any exception: vLLM refuses one.
    """
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import FrontendArgs, validate_parsed_serve_args

    check_known(pool.kwargs)
    check_nested_names(pool.kwargs)
    if has_values := pool.model is not None:
        import_parser_plugins(pool.kwargs)
    check_parsers(pool.kwargs, has_plugins=has_values)
    server_names = {field.name for field in dataclasses.fields(FrontendArgs)}
    server = FrontendArgs(**{name: value for name, value in pool.kwargs.items() if name in server_names})
    if pool.model is None:
        return
    kwargs = parse_nested({name: value for name, value in pool.kwargs.items() if name not in server_names})
    engine = AsyncEngineArgs(model=pool.model, **pool.sizes, **kwargs)
    config = engine.create_engine_config()
    if config.model_config.runner_type == "pooling" and not is_pooling(pool.kwargs):
        raise ValueError("the model is a pooling model: set runner: pooling in engine_kwargs of the service")
    validate_parsed_serve_args(Namespace(**{**vars(server), **vars(engine)}))


if __name__ == "__main__":
    os.chdir("/")  # replicas start in another folder too, so relative paths are found in neither
    print(json.dumps(_first_refusal([PoolArguments(**pool) for pool in json.load(sys.stdin)])))
