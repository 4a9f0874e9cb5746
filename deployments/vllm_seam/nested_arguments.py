"""Engine arguments whose value is a mapping: vLLM reads it into a class of its own, as its command line does."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from itertools import takewhile
from typing import Any

from pydantic import TypeAdapter, ValidationError

from deployments.explain import did_you_mean


def parse_nested(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Engine arguments with each mapping as the class that vLLM has for it; the other ones unchanged.

    Needs: ``vllm.engine.arg_utils.AsyncEngineArgs``, whose fields are annotated with these classes. Ray Serve LLM does
    the same when an engine starts (ray/llm/_internal/serve/engines/vllm/vllm_engine.py:144).
    Without it: ``tandem validate`` refuses ``reasoning_config``, and ``reasoning_parser`` beside
    ``structured_outputs_config``, which engines take.

    Raises ValueError: a value in a mapping is wrong; the message has its path.
    """
    parsed = dict(kwargs)
    for name, kind in _annotated_classes().items():
        if isinstance(kwargs.get(name), Mapping):
            try:
                parsed[name] = TypeAdapter(kind).validate_python(dict(kwargs[name]))
            except ValidationError as error:
                raise ValueError(first_fault(error, f"engine_kwargs.{name}")) from None
    return parsed


def first_fault(error: ValidationError, path: str | None = None) -> str:
    """The first fault in values of vLLM, with its path below ``path``; ``None``: below the argument of its class."""
    fault = error.errors(include_url=False)[0]
    if path is None:
        later = {getattr(kind, "__name__", ""): name for name, kind in _other_classes().items()}
        path = f"engine_kwargs.{later[error.title]}" if error.title in later else "engine_kwargs"
    # Pydantic adds the types of a union, such as "literal['a']", which are no names.
    names = takewhile(lambda part: isinstance(part, int) or part.isidentifier(), fault["loc"])
    return f"{'.'.join((path, *map(str, names)))}: {fault['msg'].removeprefix('Value error, ')}"


def check_nested_names(kwargs: Mapping[str, Any]) -> None:
    """Refuse names in mappings that vLLM does not have there.

    Needs: the classes of ``parse_nested``; ``vllm.config.{SpeculativeConfig,DiffusionConfig}``,
    ``vllm.config.quantization.QuantizationConfigArgs`` and
    ``vllm.config.multimodal.{Image,Video,Audio}DummyOptions``. All are dataclasses whose fields are the names.
    Without it: no configuration with such an argument passes ``tandem validate``; it names the import that failed.

    Raises ValueError: a name is unknown; the message has its path and the most similar name.
    """
    for name, kind in {**_annotated_classes(), **_other_classes()}.items():
        value = kwargs.get(name)
        if name == "speculative_config" and isinstance(value, Mapping):  # here vLLM takes names with dashes too
            value = {str(key).replace("-", "_"): inner for key, inner in value.items()}
        _check(kind, value, f"engine_kwargs.{name}")


def _check(kind: Any, value: Any, path: str) -> None:
    if not isinstance(value, Mapping):
        return
    if isinstance(kind, Mapping):  # the keys are free, and some have a class
        for name in value.keys() & kind.keys():
            _check(kind[name], value[name], f"{path}.{name}")
        return
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    for name, inner in value.items():
        if name not in fields:
            raise ValueError(f"{path}: vLLM has no {name!r} there{did_you_mean(str(name), fields)}")
        if (inner_kind := _config_class(fields[name].type)) is not None:
            _check(inner_kind, inner, f"{path}.{name}")


def _annotated_classes() -> dict[str, type]:
    """The class in the annotation of each engine argument that has one, by the argument's name."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    kinds = {field.name: _config_class(field.type) for field in dataclasses.fields(AsyncEngineArgs)}
    return {name: kind for name, kind in kinds.items() if kind is not None}


def _other_classes() -> dict[str, Any]:
    """Classes into which vLLM reads mappings later, when it has read the model too."""
    from vllm.config import DiffusionConfig, SpeculativeConfig
    from vllm.config.multimodal import AudioDummyOptions, ImageDummyOptions, VideoDummyOptions
    from vllm.config.quantization import QuantizationConfigArgs

    return {
        "speculative_config": SpeculativeConfig,
        "diffusion_config": DiffusionConfig,
        "quantization_config": QuantizationConfigArgs,
        "limit_mm_per_prompt": {
            "image": ImageDummyOptions,
            "video": VideoDummyOptions,
            "audio": AudioDummyOptions,
        },
    }


def _config_class(annotation: Any) -> type | None:
    """The dataclass in an annotation, also if the value may be something else too; ``None``: it has none."""
    if isinstance(annotation, type):
        return annotation if dataclasses.is_dataclass(annotation) else None
    if typing.get_origin(annotation) in (typing.Annotated, typing.Union, types.UnionType):
        kinds = map(_config_class, typing.get_args(annotation))
        return next((kind for kind in kinds if kind is not None), None)
    return None
