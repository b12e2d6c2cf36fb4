"""Copies of tensors for a save: the same bits, made during training, in memory that stays."""

from __future__ import annotations

from threading import Event, Thread

import pytest
import torch

from smtrain.worker.engine import host_copies
from smtrain.worker.engine.host_copies import HostCopies
from smtrain.worker.engine.native.norms import is_finite


def tensors(seed: int, rows: int = 3) -> dict[str, dict[str, torch.Tensor]]:
    made = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, 5, generator=made)
    turned = torch.randn(4, rows, generator=made).t().bfloat16()
    optimizer = {"step": torch.tensor(seed), "nothing": weight[:0]}
    return {"model": {"w": torch.nn.Parameter(weight), "t": turned}, "optim": optimizer}


@pytest.mark.parametrize("device", ["cpu", "cuda", "neuron"])
def test_copies_have_the_same_bits_and_are_apart_from_the_tensors(device: str) -> None:
    copies = HostCopies(device)
    for seed in (1, 2):
        files = tensors(seed)
        copying = copies.begin(files)
        copying.finish_before_change()
        with torch.no_grad():
            files["model"]["w"].zero_()
        made, wanted = copying.wait(), tensors(seed)
        assert {file: named.keys() for file, named in made.items()} == {
            f: named.keys() for f, named in wanted.items()
        }
        for file, named in wanted.items():
            for name, tensor in named.items():
                copy = made[file][name]
                assert copy.dtype == tensor.dtype
                assert torch.equal(copy, tensor)
                assert not copy.requires_grad


def test_a_change_of_the_tensors_waits_for_slow_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    released, real = Event(), host_copies._copy

    def slow(*args: object) -> None:
        released.wait(60)
        real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(host_copies, "_copy", slow)
    copying = HostCopies("cpu").begin(tensors(1))
    change = Thread(target=copying.finish_before_change)
    change.start()
    change.join(0.01)
    assert change.is_alive()
    released.set()
    change.join(60)
    assert not change.is_alive()
    assert torch.equal(copying.wait()["model"]["w"], tensors(1)["model"]["w"])


def test_an_error_of_copying_is_raised_when_the_copies_are_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no page left")

    monkeypatch.setattr(host_copies, "_copy", fail)
    copying = HostCopies("cpu").begin(tensors(1))
    copying.finish_before_change()
    with pytest.raises(MemoryError, match="no page left"):
        copying.wait()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_memory_stays_between_saves_of_the_same_size_only(device: str) -> None:
    copies = HostCopies(device)
    first = copies.begin(tensors(1)).wait()["model"]["w"].data_ptr()
    assert copies.begin(tensors(2)).wait()["model"]["w"].data_ptr() == first
    larger = copies.begin(tensors(3, rows=3000)).wait()
    assert copies._memory.nbytes == 60160 + 24064 + 256
    assert torch.equal(larger["model"]["w"], tensors(3, rows=3000)["model"]["w"])


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("at", [0, 500, 999])
def test_one_number_that_is_not_finite_is_found(wrong: float, at: int) -> None:
    numbers = torch.randn(1000)
    numbers[0], numbers[1] = torch.finfo(torch.float32).max, torch.finfo(torch.float32).min
    assert is_finite(numbers)
    numbers[at] = wrong
    assert not is_finite(numbers)
    assert is_finite(torch.empty(0))


def test_reserved_memory_is_that_of_the_first_save() -> None:
    copies = HostCopies("cuda")
    copies.reserve(tensors(1))
    assert copies._reserving is not None
    copies._reserving.join()
    reserved = copies._memory.data_ptr()
    assert len(copies._memory) > 0
    first = copies.begin(tensors(1)).wait()["model"]["w"].data_ptr()
    assert reserved <= first < reserved + len(copies._memory)
