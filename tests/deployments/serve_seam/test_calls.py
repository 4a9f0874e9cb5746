"""The error of gRPC for an answer that is too large; a real server sends it."""

from typing import Any

import pytest

pytestmark = pytest.mark.ray


async def test_contract_calls_is_answer_too_large() -> None:
    import grpc

    from deployments.serve_seam.calls import is_answer_too_large

    async def answer(request: bytes, context: Any) -> bytes:
        if request == b"busy":
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "Bandwidth exhausted")
        return bytes(5000)

    server = grpc.aio.server()
    handlers = {"get": grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    options = [("grpc.max_receive_message_length", 1000)]
    verdicts = {}
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        for request in (b"large", b"busy"):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await channel.unary_unary("/test/get")(request)
            verdicts[request] = is_answer_too_large(error.value)
    await server.stop(None)
    assert verdicts == {b"large": True, b"busy": False}
    assert not is_answer_too_large(ValueError("larger than max"))
