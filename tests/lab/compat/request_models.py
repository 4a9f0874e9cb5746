"""vLLM's request models, each with its route and a valid body."""

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from tests.lab.compat.schema_shapes import PROMPT_IDS, Model

PROMPT = "{name}: you may reproduce and distribute copies of the work"
USER = {"role": "user", "content": PROMPT}
CHAT: dict[str, Any] = {"model": "tiny", "messages": [USER], "max_tokens": 6, "temperature": 0}
COMPLETION: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 6, "temperature": 0}
RESPONSE: dict[str, Any] = {"model": "tiny", "input": PROMPT, "max_output_tokens": 6, "temperature": 0}
TOKENS: dict[str, Any] = {
    "model": "tiny",
    "token_ids": PROMPT_IDS,
    "sampling_params": {"max_tokens": 6, "temperature": 0},
}
GENERATED: dict[str, Any] = {
    "request_id": "r1",
    "choices": [{"index": 0, "token_ids": [300, 301, 302], "finish_reason": "stop", "logprobs": None}],
}
CHUNK: dict[str, Any] = {
    "request_id": "r1",
    "choices": [{"index": 0, "token_ids": [300, 301], "finish_reason": None, "logprobs": None}],
}


def request_models() -> Sequence[Model]:
    """Every request model of vLLM's routes for text; imports vLLM, which takes seconds."""
    from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest
    from vllm.entrypoints.openai.chat_completion import protocol as chat
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.scale_out.token_in_token_out import protocol as tokens
    from vllm.entrypoints.serve.tokenize import protocol as tokenize

    return (
        _model("/v1/chat/completions", chat.ChatCompletionRequest, CHAT, streams=True),
        _model("/v1/completions", CompletionRequest, COMPLETION, streams=True),
        _model("/v1/responses", ResponsesRequest, RESPONSE, streams=True),
        _model("/v1/messages", AnthropicMessagesRequest, CHAT, streams=True),
        _model("/v1/messages/count_tokens", AnthropicCountTokensRequest, _parts(CHAT, "model", "messages")),
        _model("/v1/chat/completions/batch", chat.BatchChatCompletionRequest, CHAT | {"messages": [[USER], [USER]]}),
        _model("/inference/v1/generate", tokens.GenerateRequest, TOKENS, streams=True),
        _model("/tokenize", tokenize.TokenizeCompletionRequest, _parts(COMPLETION, "model", "prompt")),
        _model("/tokenize", tokenize.TokenizeChatRequest, _parts(CHAT, "model", "messages")),
        _model("/detokenize", tokenize.DetokenizeRequest, {"model": "tiny", "tokens": [300, 301, 302]}),
        _model(
            "/v1/chat/completions/derender",
            tokens.DerenderChatRequest,
            {"model": "tiny", "generate_response": GENERATED},
        ),
        _model(
            "/v1/chat/completions/derender",
            tokens.DerenderChatStreamRequest,
            {"model": "tiny", "stream": True, "generate_chunk": CHUNK},
        ),
        _model(
            "/v1/completions/derender",
            tokens.DerenderCompletionRequest,
            {"model": "tiny", "generate_responses": [GENERATED]},
        ),
        _model(
            "/v1/completions/derender",
            tokens.DerenderCompletionStreamRequest,
            {"model": "tiny", "stream": True, "generate_chunk": CHUNK},
        ),
    )


def _model(route: str, of: type[BaseModel], base: dict[str, Any], *, streams: bool = False) -> Model:
    return Model(name=of.__name__, route=route, schema=of.model_json_schema(), base=base, streams=streams)


def _parts(body: dict[str, Any], *fields: str) -> dict[str, Any]:
    return {field: body[field] for field in fields}
