"""vLLM's kernels, called as an engine calls them, compute the same products and attention as torch."""

import pytest

torch = pytest.importorskip("torch")

from deployments.operator_profiler.kernels import silu_mul
from deployments.operator_profiler.vllm_tensors import VllmTensors, vllm_reason
from tests.installed_source import installed_source

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def tensors() -> VllmTensors:
    assert vllm_reason() is None
    return VllmTensors("cpu", rotation_bytes=0, kv_limit_bytes=2**20, dtype="fp32")


def test_a_product_is_that_of_the_weights_that_were_packed(
    tensors: VllmTensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, entered = torch.randn(24, 16), torch.randn(3, 16)
    monkeypatch.setattr(tensors, "_weight_copies", lambda n, k, dtype: [weight])
    monkeypatch.setattr(tensors, "_randn", lambda *sizes: entered)
    found = tensors.product(3, 24, 16, "fp32")[0]()
    torch.testing.assert_close(found, entered @ weight.t(), atol=1e-5, rtol=1e-5)  # rounding of fp32


def test_small_operators_are_those_of_a_llama(tensors: VllmTensors, monkeypatch: pytest.MonkeyPatch) -> None:
    both = torch.randn(4, 2 * 32)
    out = torch.empty(4, 32)
    monkeypatch.setattr(tensors, "_randn", lambda rows, width: both if width == 64 else out)
    tensors.silu_mul(4, 32, "")[0]()
    torch.testing.assert_close(out, silu_mul(*both.chunk(2, dim=-1)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("batch", "new", "total"), [(1, 8, 8), (1, 4, 40), (3, 1, 50)])
def test_equal_values_come_out_of_attention(
    tensors: VllmTensors, monkeypatch: pytest.MonkeyPatch, batch: int, new: int, total: int
) -> None:
    outputs = []
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda like: outputs.append(empty_like(like)) or outputs[-1])
    tensors._kv = torch.ones(2, 2**16)
    (call,) = tensors.attention(batch, new, total, (2, 1, 32), "", is_causal=new > 1)
    call()
    # A mean of ones is one, with whatever weights: each query read some keys, and only written values.
    torch.testing.assert_close(outputs[0], torch.ones(batch * new, 2, 32), atol=1e-5, rtol=0)


def test_contract_cpu_kernels_cpu_kernels() -> None:
    """vLLM's CPU layers call these kernels, and in this way: products of packed weights, attention of paged KV."""
    assert vllm_reason() is None
    linear = installed_source("vllm/model_executor/layers/utils.py")
    assert "ops.create_onednn_mm(origin_weight.t(), 32)" in linear and "ops.onednn_mm(handler, x, bias)" in linear
    attention = installed_source("vllm/v1/attention/backends/cpu_attn.py")
    assert "ops.cpu_attention_with_kv_cache(" in attention and "kv_cache.chunk(2, dim=2)" in attention
