"""Private parts of Ray Serve LLM's servers: the engine and its protocol, a faster start, no handoff by Ray."""

import os
from collections.abc import AsyncGenerator
from typing import Any

from ray.llm._internal.serve.core.engine.protocol import LLMEngine
from ray.llm._internal.serve.core.server import llm_server
from ray.serve.llm import LLMConfig

__all__ = [
    "EngineDoor",
    "LLMEngine",
    "engine_client",
    "native_app",
    "report_no_usage",
    "served_adapters",
    "start_no_download",
]


def engine_client(server: Any) -> Any:
    """The vLLM ``AsyncLLM`` behind a Ray Serve LLM server.

    Needs: ``server.engine._engine_client``; ``generate``, ``encode``, ``get_supported_tasks``, ``collective_rpc``,
    ``check_admission``, ``get_num_queued_tokens`` and ``notify_kv_transfer_request_rejected`` of ``AsyncLLM``.
    Without it: no replica starts; the error names the missing part.
    """
    return server.engine._engine_client


async def native_app(server: Any) -> Any:
    """vLLM's own HTTP application for the engine of a server: an ASGI application with all of vLLM's routes.

    ``None``: the engine is emulated, and has no such application.

    Needs: ``build_asgi_app`` of Ray's ``VLLMEngine``.
    Without it: a decode replica answers 404 on all routes but chat and completions.
    """
    os.environ.pop("VLLM_API_KEY", None)  # the endpoint asks for keys; vLLM's application would refuse its requests
    build = getattr(server.engine, "build_asgi_app", None)
    return None if build is None else await build()


def served_adapters(server: Any) -> dict[str, Any]:
    """The LoRA adapters that vLLM's OpenAI layer of a Ray Serve LLM server takes for models, by name.

    Needs: ``server.engine._oai_models``, a vLLM ``OpenAIServingModels``; its ``lora_requests``.
    Without it: no replica of a model with adapters starts; the error names the missing part.
    """
    adapters: dict[str, Any] = server.engine._oai_models.lora_requests
    return adapters


def start_no_download(llm_config: LLMConfig) -> None:
    """Skip Ray's download of weights for a source without a scheme: a folder, or a name that vLLM resolves itself.

    The download is a task on every node of the replica. For such a source it has no effect, but it first imports torch
    and Ray's LLM library: 8 s of a core, for which the engine waits.

    Needs: ``LLMConfig.get_or_create_callback().ctx.run_init_node``.
    Without it: a replica starts 8 s later, or not at all; then the error names the missing part.
    """
    if "://" not in str(llm_config.model_loading_config.model_source):
        llm_config.get_or_create_callback().ctx.run_init_node = False


def report_no_usage() -> None:
    """Send no report on the model from this process, if ``RAY_USAGE_STATS_ENABLED`` is 0.

    Ray sends the report to an actor, for which the replica waits. The actor first imports torch and Ray's LLM library:
    7 s of a core and 0.4 GB. With 0 it then records nothing.

    Needs: ``push_telemetry_report_for_all_models`` of Ray's ``llm_server``.
    Without it: the first replica of a cluster starts some seconds later.
    """
    if os.environ.get("RAY_USAGE_STATS_ENABLED") == "0":
        llm_server.push_telemetry_report_for_all_models = lambda all_models: None


class EngineDoor:
    """Mixed into a decode server before Ray's class: ``chat`` and ``completions`` call the engine directly.

    Ray's orchestration would prefill a second time.

    Needs: ``_pd_handle_request`` and ``_run_request`` of Ray's ``PDDecodeServer``; ``LLMEngine``, the protocol of an
    engine.
    Without it: every request is prefilled twice, or fails.
    """

    async def _pd_handle_request(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        method = "chat" if hasattr(request, "messages") else "completions"
        run: Any = getattr(self, "_run_request")  # noqa: B009 (Ray's class has it)
        async for chunk in await run(request, engine_method=method, raw_request_info=raw_request_info):
            yield chunk
