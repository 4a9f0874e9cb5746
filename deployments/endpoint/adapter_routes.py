"""The routes that load and unload LoRA adapters at run time, with the bodies and answers of vLLM's."""

import asyncio
from collections.abc import Mapping
from typing import Any

from fastapi import Request, Response
from ray.exceptions import RayError

from deployments.adapter_paths import OutsideFolderError, allowed_path
from deployments.config import ModelConfig
from deployments.endpoint.config import IngressConfig
from deployments.endpoint.json_body import check_content_type, json_object
from deployments.endpoint.request_body import Bodies, Body, read_body
from deployments.wire.openai_errors import OpenAIError
from router.adapters import AdapterFault, FaultKind
from router.ray_actors import find_actor
from router.ray_adapters import adapter_board_key

_STATUS = {FaultKind.MISSING: 404, FaultKind.FAILED: 500}  # of other faults: 400
_PARAM = {FaultKind.TAKEN: "lora_name", FaultKind.FIXED: "lora_name"}  # of other faults: lora_path
_MOST_NAME = 255  # longest name of an adapter, characters
_RETRY_S = 1.0  # Retry-After, seconds, while the board starts


class AdapterRoutes:
    """Checks requests for adapters, and passes them to the board."""

    def __init__(self, app: str, config: IngressConfig, bodies: Bodies, models: Mapping[str, ModelConfig]) -> None:
        """``models``: the configuration of each model, by its id."""
        self._app, self._config, self._bodies, self._models = app, config, bodies, models

    async def load(self, http: Request, key: str | None) -> Response:
        """Load an adapter on all replicas. Raises OpenAIError: the request is refused, or a replica cannot load it."""
        fields = await self._fields(http, key)
        name, path = _text(fields, "lora_name"), _text(fields, "lora_path")
        is_in_place = fields.get("load_inplace", False)
        if not isinstance(is_in_place, bool):
            raise OpenAIError(
                400, f"load_inplace must be true or false, got {is_in_place!r:.100}", param="load_inplace"
            )
        if name in self._models:
            raise OpenAIError(400, f"{name!r} is the name of a model: give the adapter another one", param="lora_name")
        model = self._model_of(path, fields.get("base_model_name"))
        fault = await self._ask("load", model, name, path, is_in_place)
        _check(fault)
        return Response(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, http: Request, key: str | None) -> Response:
        """Unload an adapter on all replicas. Raises OpenAIError: it is refused, or there is no such adapter."""
        name = _text(await self._fields(http, key), "lora_name")
        if name in self._models:
            raise OpenAIError(400, f"{name!r} is a model and no adapter: a model stays loaded", param="lora_name")
        _check(await self._ask("unload", name))
        return Response(f"Success: LoRA adapter '{name}' removed successfully.")

    async def _fields(self, http: Request, key: str | None) -> dict[str, Any]:
        """The fields of a body. Raises OpenAIError: the key may not change adapters, or the body is refused."""
        if not any(model.adapters_folder is not None for model in self._models.values()):
            raise OpenAIError(404, f"{http.url.path}: no model has adapters_folder, so none is loaded at run time")
        if key is not None and key not in self._config.admin_keys:
            raise OpenAIError(403, f"the key {key!r} may not change adapters: add it to ingress.admin_keys")
        check_content_type(http.headers.get("content-type"))
        body = Body(self._bodies, key)
        try:
            return json_object(await read_body(http, self._config, body), body.take)
        finally:
            body.free()

    def _model_of(self, path: str, base: Any) -> str:
        """The model whose allowed folder has a path. Raises OpenAIError: 400, none has, or several have."""
        if base is not None and base not in self._models:
            raise OpenAIError(
                404, f"the model {base!r:.300} does not exist", param="base_model_name", code="model_not_found"
            )
        folders = {
            name: model.adapters_folder
            for name, model in self._models.items()
            if model.adapters_folder is not None and base in (None, name)
        }
        allowed = []
        for name, folder in folders.items():
            try:
                allowed_path(folder, path)
            except OutsideFolderError:
                continue
            allowed.append(name)
        if not allowed:
            where = ", ".join(str(folder) for folder in folders.values()) or "none of this model"
            raise OpenAIError(
                400, f"lora_path {path!r:.300} is outside of the allowed folder ({where})", param="lora_path"
            )
        if len(allowed) > 1:
            names = ", ".join(map(repr, allowed))
            raise OpenAIError(400, f"{names} share the allowed folder: give base_model_name", param="base_model_name")
        return allowed[0]

    async def _ask(self, method: str, *arguments: Any) -> AdapterFault | None:
        """The board's answer. Raises OpenAIError: 503, there is no board now."""
        try:
            board = await asyncio.to_thread(find_actor, adapter_board_key(self._app))
            if board is not None:
                fault: AdapterFault | None = await getattr(board, method).remote(*arguments)
                return fault
        except RayError as error:
            raise OpenAIError(
                503, f"the adapter board was lost ({type(error).__name__}): send it again", retry_after_s=_RETRY_S
            ) from None
        raise OpenAIError(503, "the adapter board starts: send it again", retry_after_s=_RETRY_S)


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str) or not value:
        raise OpenAIError(400, f"{name} must be a text that is not empty, got {value!r:.100}", param=name)
    if name == "lora_name" and (len(value) > _MOST_NAME or not value.isprintable()):
        raise OpenAIError(400, f"lora_name must have at most {_MOST_NAME} printable characters", param=name)
    return value


def _check(fault: AdapterFault | None) -> None:
    if fault is not None:
        raise OpenAIError(_STATUS.get(fault.kind, 400), fault.message, param=_PARAM.get(fault.kind, "lora_path"))
