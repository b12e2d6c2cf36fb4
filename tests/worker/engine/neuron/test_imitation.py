"""The imitated device: views, gradients and collectives are the CPU's, and groups lie on a
torus.
"""

from __future__ import annotations

import io
import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from smtrain.core.facts.trainium2 import first_group_off_torus
from tests.worker.engine.neuron import imitation, runs
from tests.worker.engine.world import World


def behave(rank: int) -> None:
    device = torch.device("neuron", 0)
    x = torch.arange(12.0, device=device)
    view = x.view(3, 4)
    view[1].mul_(2)
    x[0] = 7
    assert x.tolist() == [7, 1, 2, 3, 8, 10, 12, 14, 8, 9, 10, 11]
    assert view.t().data_ptr() == x.data_ptr() != view.t().contiguous().data_ptr()
    out = torch.empty(0, device=device)
    torch.mm(view, view.t(), out=out)
    assert torch.equal(out.cpu(), view.cpu() @ view.cpu().t())
    grown = torch.ones(2, device=device)
    held = grown.view(2)
    grown.resize_(5).fill_(3)
    assert (grown.tolist(), held.tolist()) == ([3.0] * 5, [3.0] * 2)
    assert grown.device == device
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    assert torch.equal(torch.load(file).cpu(), x.cpu())
    with pytest.raises(RuntimeError, match="neuron:0 and cpu"):
        x + torch.ones(12)


def differentiate(rank: int) -> None:
    torch.manual_seed(0)
    here, there = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3).to("neuron")
    there.load_state_dict(here.state_dict())
    given = torch.randn(5, 4)
    for model, x in ((here, given), (there, given.to("neuron"))):
        model(x).relu().square().sum().backward()
    assert torch.equal(here.weight.grad, there.weight.grad.cpu())  # type: ignore[arg-type, union-attr]
    qkv = [torch.randn(2, 4, 8, 16) for _ in range(3)]
    both: list[list[torch.Tensor]] = [
        [t.clone().to(d).requires_grad_() for t in qkv] for d in ("cpu", "neuron")
    ]
    for parts in both:
        q, k, v = parts
        F.scaled_dot_product_attention(q, k, v, is_causal=True).square().sum().backward()
    assert all(torch.equal(a.grad, b.grad.cpu()) for a, b in zip(*both, strict=True))  # type: ignore[arg-type, union-attr]


def count(rank: int) -> tuple[Any, int]:
    imitation.forget()
    x = torch.ones(1000, device="neuron")
    y = x.view(10, 100).t().double()
    del x, y
    return dict(imitation.calls()), imitation.peak()


def collect(rank: int) -> None:
    x = torch.arange(4.0, device="neuron") + 10 * rank
    everyone = [torch.arange(4.0) + 10 * r for r in range(4)]
    total = x.clone()
    dist.all_reduce(total)
    assert torch.equal(total.cpu(), sum(everyone))  # type: ignore[arg-type]
    whole = torch.empty(16, device="neuron")
    dist.all_gather_into_tensor(whole, x)
    assert torch.equal(whole.cpu(), torch.cat(everyone))
    part = torch.empty(1, device="neuron")
    dist.reduce_scatter_tensor(part, x)
    assert part.item() == sum(everyone)[rank]  # type: ignore[index]
    swapped = torch.empty(4, device="neuron")
    dist.all_to_all_single(swapped, x)
    assert torch.equal(swapped.cpu(), torch.stack(everyone)[:, rank])
    dist.broadcast(x, 2)
    assert torch.equal(x.cpu(), everyone[2])
    with pytest.raises(RuntimeError, match="contiguous: False"):
        dist.all_reduce(torch.ones(2, 2, device="neuron").t())


def test_memory_is_shared_by_views_and_follows_a_resize(neuron_solo: World) -> None:
    neuron_solo.run(behave)


def test_gradients_are_the_cpu_s(neuron_solo: World) -> None:
    neuron_solo.run(differentiate)
    assert neuron_solo.run(runs.threads) == ["neuron:0"]


def test_calls_are_counted_with_dtype_and_shape_and_memory_at_its_peak(neuron_solo: World) -> None:
    ((calls, peak),) = neuron_solo.run(count)
    assert calls["aten::fill_ Float[1d]"] == 1
    assert calls["copy within Float[2d strided] as Double"] == 1
    assert peak == 12_000


def test_collectives_are_those_of_gloo(neuron: World) -> None:
    neuron.run(collect)


def test_groups_that_lie_on_the_torus() -> None:
    """Four chips a row, four rows, four cores a chip; ranks row by row."""
    assert imitation.tiles([0, 1, 2, 3], 4), "a chip"
    assert imitation.tiles([0, 1], 4), "half a chip"
    assert imitation.tiles([0, 4], 4), "a core of each of two neighbours"
    assert imitation.tiles([0, 12], 4), "neighbours around the edge"
    assert not imitation.tiles([0, 8], 4), "two chips with one between them"
    assert imitation.tiles([0, 4, 8, 12], 4), "a row"
    assert imitation.tiles([0, 16, 32, 48], 4), "a column"
    assert imitation.tiles(list(range(32)), 4), "two rows"
    assert not imitation.tiles(list(range(0, 64, 8)), 4), "every second column"
    assert not imitation.tiles([0, 5], 4), "other cores of each chip"
    assert imitation.tiles([*range(64), *range(64, 128)], 4), "two hosts"


def routable(tp: int, pp: int, dp: int, cores: int) -> bool:
    """Whether the device connects every group of a mesh."""
    grid = np.arange(tp * pp * dp).reshape(pp, dp, tp)
    lines = itertools.chain.from_iterable(
        np.moveaxis(grid, i, -1).reshape(-1, grid.shape[i]) for i in range(3)
    )
    return all(imitation.tiles(list(map(int, line)), cores) for line in lines)


@pytest.mark.parametrize(("cores", "world"), [(4, 64), (8, 128), (4, 128), (4, 48), (4, 8)])
def test_the_planner_s_rule_is_the_device_s(cores: int, world: int) -> None:
    for tp, pp in itertools.product(range(1, world + 1), repeat=2):
        if world % (tp * pp) == 0:
            dp = world // (tp * pp)
            rule = first_group_off_torus(tp, pp, dp, min(world, 16 * cores), cores) is None
            assert rule == routable(tp, pp, dp, cores), (tp, pp, dp)


def test_what_the_facts_computed_of_64_ranks() -> None:
    """pp 2 and 8 and tp 8 and 32 are not routable; tp 1, 2, 4, 16 and 64 with pp 1 or 4 are."""
    fit = {
        (tp, pp)
        for tp in (1, 2, 4, 8, 16, 32, 64)
        for pp in (1, 2, 4, 8, 16, 32, 64)
        if tp * pp <= 64
    }
    fit = {(tp, pp) for tp, pp in fit if routable(tp, pp, 64 // (tp * pp), 4)}
    assert fit >= {(1, 1), (2, 1), (4, 1), (16, 1), (64, 1), (1, 4), (2, 4), (4, 4), (16, 4)}
    assert not {(tp, pp) for tp, pp in fit if pp in (2, 8) or tp in (8, 32)}
