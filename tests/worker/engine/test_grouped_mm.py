"""Grouped products equal one product for each expert, and wait for no device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from smtrain.worker.engine.native import grouped_mm
from smtrain.worker.engine.native.grouped_mm import RowBlocks, has_kernel, multiply

sizes = st.lists(st.integers(0, 5), min_size=1, max_size=6)
widths = st.sampled_from([1, 4, 7, 8, 12, 16])


def blocks_of(rows: list[int]) -> RowBlocks:
    chosen = torch.arange(len(rows)).repeat_interleave(torch.tensor(rows))
    return RowBlocks.sort(chosen[torch.randperm(len(chosen))][:, None], len(rows))[1]


@pytest.mark.parametrize("kernel", [True, False])
@settings(deadline=None)
@given(rows=sizes, width=widths, out=widths, turned=st.booleans(), sink=st.booleans())
def test_each_block_is_multiplied_by_its_matrix(
    kernel: bool, rows: list[int], width: int, out: int, turned: bool, sink: bool
) -> None:
    """Also blocks without rows, and rows that torch's kernel does not take."""
    torch.manual_seed(0)
    x = torch.randn(sum(rows), width, requires_grad=True)
    shape = (len(rows), out, width) if turned else (len(rows), width, out)
    weight, taken = torch.randn(shape, requires_grad=True), torch.full(shape, torch.nan)

    def take(gradient: Any) -> None:
        gradient(taken)

    with pytest.MonkeyPatch.context() as patch:
        if not kernel:
            patch.setattr(grouped_mm, "has_kernel", lambda *_: False)
        y = multiply(x, weight, blocks_of(rows), turned, take if sink else None)
        grad = torch.randn_like(y)
        y.backward(grad)
    ours = y.detach(), x.grad, taken if sink else weight.grad
    x.grad = weight.grad = None
    parts = [part @ (w.t() if turned else w) for part, w in zip(x.split(rows), weight, strict=True)]
    torch.cat(parts).backward(grad)
    for mine, theirs in zip(ours, (torch.cat(parts).detach(), x.grad, weight.grad), strict=True):
        assert mine is not None
        assert theirs is not None
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


@given(rows=st.integers(1, 4), experts=st.integers(1, 5), turned=st.booleans())
@settings(deadline=None)
def test_even_blocks_are_one_batch(rows: int, experts: int, turned: bool) -> None:
    torch.manual_seed(0)
    even = RowBlocks.evenly(experts, rows, torch.device("cpu"))
    x, weight = (
        torch.randn(experts * rows, 6, requires_grad=True),
        torch.randn(experts, 6, 6, requires_grad=True),
    )
    any_sizes = RowBlocks(even.expert, even.counts)
    made = [multiply(x, weight, blocks, turned) for blocks in (even, any_sizes)]
    gradients = [torch.autograd.grad(y, (x, weight), torch.ones_like(y)) for y in made]
    for ours, theirs in zip((made[0], *gradients[0]), (made[1], *gradients[1]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_the_sizes_of_blocks_are_not_read() -> None:
    """The device meta has no values: a read by the host fails."""
    chosen = torch.zeros(64, 2, dtype=torch.int64, device="meta")
    x = torch.zeros(128, 16, dtype=torch.bfloat16, device="meta", requires_grad=True)
    weight = torch.zeros(8, 24, 16, dtype=torch.bfloat16, device="meta", requires_grad=True)
    order, blocks = RowBlocks.sort(chosen, 8)
    multiply(x[order], weight, blocks, True).sum().backward()
    assert weight.grad is not None
    with pytest.raises((RuntimeError, NotImplementedError)):
        blocks.sizes  # noqa: B018 - which the loop needs


@pytest.mark.parametrize(("capability", "dtype", "expected"), [
    ((9, 0), torch.bfloat16, True),
    ((10, 0), torch.bfloat16, True),
    ((9, 0), torch.float32, False),
    ((9, 0), torch.float16, False),
    ((8, 0), torch.bfloat16, False),
    ((12, 0), torch.bfloat16, False),
])  # fmt: skip
def test_cards_without_a_kernel_loop(
    capability: tuple[int, int], dtype: torch.dtype, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch itself would loop too, and read the ends in each product."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert has_kernel(torch.device("cuda"), dtype) is expected
    assert not has_kernel(torch.device("xpu"), dtype)
