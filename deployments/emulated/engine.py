"""An engine that waits instead of computing, behind Ray Serve LLM's engine protocol.

With it a dozen replicas run under real Ray Serve on one machine. Everything above the engine is real, also
``PDGenerate`` and decode's calls of prefill. An ``EngineModel`` with an ``EngineProfile`` says how long steps take.
"""

import asyncio
import json
import os
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

from ray.serve.llm import LLMConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind, SamplingParams

from autoscale.engines.profile import EngineProfile
from deployments.emulated.client import DEFAULT_OUTPUT_TOKENS, EmulatedClient
from deployments.emulated.text import tokens_of
from deployments.machine.claims import run_at_once
from deployments.pool_config import EMULATOR_KEY, EmulatorConfig
from deployments.replicas.openai_layer import requested_max_tokens
from deployments.serve_seam.llm_server import LLMEngine
from deployments.vllm_seam.engine_stats import register_engine
from deployments.wire.messages import DONE


class EmulatedEngine(LLMEngine):
    """The emulated engine of one replica, as Ray Serve LLM's servers call it."""

    def __init__(self, llm_config: LLMConfig) -> None:
        self._config = EmulatorConfig.model_validate(llm_config.experimental_configs[EMULATOR_KEY])
        profile = EngineProfile.load(self._config.profile)
        if self._config.max_running is not None:
            profile = profile.model_copy(update={"max_running": self._config.max_running})
        self._model_id = llm_config.model_id
        max_model_len = int(llm_config.engine_kwargs.get("max_model_len") or 0)
        if max_model_len <= 0:  # no length is set, as with vLLM's -1: the KV memory is the limit
            max_model_len = profile.kv_tokens
        self._engine_client = EmulatedClient(profile, self._config, max_model_len=max_model_len)

    async def start(self) -> None:
        """Take as long to start as the real engine."""
        profile = self._engine_client.profile
        await asyncio.sleep(profile.start_s if self._config.start_s is None else self._config.start_s)
        # ``os.nice(0)`` only reads the niceness. Above 0 the engine's steps would be late while other processes start.
        if os.nice(0) > 0:
            with suppress(PermissionError):
                run_at_once(os.getpid())
        register_engine(self._engine_client.stats)
        self._engine_client.start()

    async def check_health(self) -> None:
        """Raise the error that ended the engine's loop, if it has ended."""
        self._engine_client.check()

    async def chat(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        """A chat completion, in OpenAI's stream format."""
        text = "\n".join(str(message.get("content") or "") for message in request.messages)
        ids = tokens_of(text or "user")  # never empty: a chat template adds at least a role
        kind = "chat.completion.chunk" if request.stream else "chat.completion"
        async for chunk in self._answer(request, ids, kind):
            yield chunk

    async def completions(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        """A completion, in OpenAI's stream format."""
        if request.prompt_embeds is not None:
            raise VLLMValidationError("the emulated engine has no embeddings: give a prompt", parameter="prompt_embeds")
        ids = tokens_of(request.prompt) if isinstance(request.prompt, str) else list(request.prompt)
        if not all(isinstance(token, int) for token in ids):
            raise VLLMValidationError("the emulated engine takes one prompt at a time", parameter="prompt")
        async for chunk in self._answer(request, ids, "text_completion"):
            yield chunk

    async def _answer(self, request: Any, ids: list[int], kind: str) -> AsyncGenerator[Any, None]:
        """Events of a stream, or one whole answer; ``kind``: OpenAI's ``object``."""
        is_chat = kind != "text_completion"
        context_tokens = self._engine_client.model_config.max_model_len
        if len(ids) >= context_tokens:
            raise VLLMValidationError(
                f"the prompt has {len(ids)} tokens, the model's context length is {context_tokens}",
                parameter="input_tokens",
            )
        limit = requested_max_tokens(request)  # 0: an echo, for which vLLM computes one token
        sampling = SamplingParams(
            max_tokens=min(DEFAULT_OUTPUT_TOKENS if limit is None else limit or 1, context_tokens - len(ids)),
            output_kind=RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY,
        )
        head = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{request.request_id}",
            "object": kind,
            "created": int(time.time()),
            "model": self._model_id,
        }
        prompt = {"type": "token", "prompt_token_ids": ids, "cache_salt": request.cache_salt}
        produced = 0
        async for output in self._engine_client.generate(prompt, sampling, request.request_id):
            (part,) = output.outputs
            produced += len(part.token_ids)
            usage = {"prompt_tokens": len(ids), "completion_tokens": produced, "total_tokens": len(ids) + produced}
            message = {"role": "assistant", "content": part.text}
            body: dict[str, Any] = {"text": part.text}
            if is_chat:
                body = {"delta" if request.stream else "message": message}
            choice = {"index": 0, **body, "finish_reason": part.finish_reason}
            if not request.stream:
                answer = {**head, "choices": [choice], "usage": usage}
                # The parts of the real engine's response that ``openai_layer.answer_frame`` uses.
                yield SimpleNamespace(error=None, model_dump_json=partial(_json, answer))
                return
            if request.return_token_ids:
                choice["token_ids"] = list(part.token_ids)
            yield f"data: {_json({**head, 'choices': [choice]})}\n\n"
        if request.stream_options is not None and request.stream_options.include_usage:
            yield f"data: {_json({**head, 'choices': [], 'usage': usage})}\n\n"
        yield DONE

    def routing_stats(self) -> dict[str, Any]:
        """Nothing: Tandem's router uses other counts (``PrefillServer.record_routing_stats``)."""
        return {}

    async def reset_prefix_cache(self) -> None:
        """Empty the prefix cache."""
        self._engine_client.forget_prefixes()

    async def resolve_lora(self, lora_model: Any) -> None:
        """Do nothing: an adapter changes no time of an emulated engine."""

    async def build_asgi_app(self) -> None:
        """No HTTP application of vLLM's: an emulated engine answers chat and completions alone."""

    def embeddings(self, request: Any, raw_request_info: Any = None) -> AsyncGenerator[Any, None]:
        """Not emulated."""
        raise NotImplementedError("the emulated engine generates text only")

    transcriptions = embeddings


def _json(answer: dict[str, Any]) -> str:
    return json.dumps(answer, separators=(",", ":"))  # without spaces, as vLLM does: answers have the same size
