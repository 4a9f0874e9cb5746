"""The errors with which vLLM's OpenAI layer refuses a request; its own code makes them."""

import pytest

pytestmark = pytest.mark.vllm


def test_contract_engine_types_error_event() -> None:
    from vllm.entrypoints.generate.base.serving import GenerateBaseServing
    from vllm.entrypoints.openai.completion.protocol import CompletionStreamResponse
    from vllm.exceptions import VLLMValidationError

    from deployments.vllm_seam.engine_types import error_event

    serving = GenerateBaseServing.__new__(GenerateBaseServing)
    text = serving.create_streaming_error_response(VLLMValidationError("too long", parameter="input_tokens", value=7))
    refusal = error_event(f"data: {text}\n\n")
    assert refusal is not None
    assert (refusal.status, refusal.parameter, refusal.is_beyond_context) == (400, "input_tokens", True)
    assert refusal.message.startswith("too long")
    refusal = error_event(f"data: {serving.create_streaming_error_response(RuntimeError('gone'))}\n\n")
    assert refusal is not None and refusal.status == 500 and not refusal.is_beyond_context
    chunk = CompletionStreamResponse(model="m", choices=[]).model_dump_json()
    assert error_event(f"data: {chunk}\n\n") is None
    assert error_event("data: [DONE]\n\n") is None


def test_contract_engine_types_engine_refusal() -> None:
    from vllm.exceptions import VLLMValidationError
    from vllm.renderers.params import TokenizeParams

    from deployments.vllm_seam.engine_types import EngineRefusal

    params = TokenizeParams(max_total_tokens=8, max_output_tokens=1)
    with pytest.raises(VLLMValidationError) as error:
        params._token_len_check(None, list(range(20)))
    refusal = EngineRefusal(status=400, message=str(error.value), parameter=error.value.parameter)
    assert refusal.is_beyond_context
