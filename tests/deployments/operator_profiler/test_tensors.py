"""Attention with groups of heads, as it is timed, computes what torch's plain formula gives."""

import pytest

torch = pytest.importorskip("torch")

from deployments.operator_profiler.kernels import attention_call, residual_norm
from deployments.operator_profiler.tensors import Tensors, _without_groups
from deployments.operator_profiler.timing import HostTimer


def plain(query: "torch.Tensor", key: "torch.Tensor", value: "torch.Tensor", is_causal: bool) -> "torch.Tensor":
    """Attention by its formula; the last query sees all keys."""
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    scores = query @ key.transpose(2, 3) / query.shape[3] ** 0.5
    if is_causal:
        new, total = scores.shape[2:]
        scores = scores.masked_fill(torch.ones(new, total, dtype=torch.bool).triu(total - new + 1), -torch.inf)
    return scores.softmax(dim=-1) @ value


@pytest.mark.parametrize(("batch", "new", "total"), [(1, 8, 8), (3, 8, 8), (1, 4, 12), (5, 1, 16)])
def test_attention_without_groups_is_the_same_attention(batch: int, new: int, total: int) -> None:
    torch.manual_seed(1)
    query = torch.randn(batch, new, 6, 16).transpose(1, 2)
    key, value = (torch.randn(batch, total, 2, 16).transpose(1, 2) for _ in range(2))
    found = attention_call(*_without_groups(query, key, value), "flash", is_causal=new > 1)()
    # 1e-5: rounding of fp32 sums of 16 terms
    torch.testing.assert_close(found.reshape(batch, 6, new, 16), plain(query, key, value, new > 1), atol=1e-5, rtol=0)


def test_the_norm_adds_the_residual_first() -> None:
    entered, residual, weight = torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 4.0]]), torch.ones(2)
    # The mean square of (3, 4) is 12.5.
    torch.testing.assert_close(residual_norm(entered, residual, weight), torch.tensor([[3.0, 4.0]]) / 12.5**0.5)
    assert residual.tolist() == [[3.0, 4.0]]


def test_weights_in_turns_exceed_the_cache_and_differ_in_place() -> None:
    tensors = Tensors("cpu", rotation_bytes=4096, kv_limit_bytes=2**20, dtype="fp32")
    calls = tensors.product(2, 16, 16, "fp32")
    assert len(calls) == 4  # 4096 bytes over weights of 1024 bytes
    assert tensors.product(4, 16, 16, "fp32")[0]().shape == (4, 16)


def test_a_time_of_a_host_is_that_of_one_call() -> None:
    calls = []
    timing = HostTimer(target_us=200.0, groups=3).time([lambda: calls.append(sum(range(1000)))])
    assert timing.p10_us <= timing.median_us <= timing.p90_us
    assert len(calls) > timing.repeats >= 3
