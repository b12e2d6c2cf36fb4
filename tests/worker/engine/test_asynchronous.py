"""A step is begun without reading a number, so that a device always has work; its numbers are the
same, only later.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from smtrain.worker.engine.base import ParallelOptions
from tests.worker.engine import cases, packed
from tests.worker.engine.cases import CONFIGS, mesh
from tests.worker.engine.world import World


class Reads(TorchDispatchMode):
    """Counts the operations that have to wait for a device: a number read from a tensor, a size
    that values decide.
    """

    WAITING = frozenset(
        {"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal"}
    )

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() in self.WAITING:
            self.reads.append(func.name())
        return func(*args, **(kwargs or {}))


def begun(
    rank: int, config: dict[str, Any], options: ParallelOptions, count: int, segments: bool = False
) -> tuple[list[str], list[Any], list[Any]]:
    """Operations that read while `count` steps were begun, and the results: read at the end, and
    each at once.
    """
    late = cases.engine(config, options)
    at_once = cases.engine(config, options)
    watch, pending, now = Reads(), [], []
    for step in range(1, count + 1):
        each = packed.batch(config, step) if segments else cases.batch(config, step)
        part = cases.BATCH // late.dp_size
        input_ids, labels, *within = (
            x[late.dp_rank * part : (late.dp_rank + 1) * part] for x in each
        )
        with watch if step > 1 else nullcontext():  # the masks of whole rows are made once
            pending.append(late.begin_step(input_ids, labels, cases.lr(step), *within))
        now.append(at_once.step(input_ids, labels, cases.lr(step), *within))
    return watch.reads, [numbers() for numbers in pending], now


def watched(rank: int) -> list[str]:
    """The operations that the watch sees in a read."""
    watch = Reads()
    with watch:
        float(torch.ones(2).sum())
    return watch.reads


def steps_ahead(rank: int, config: dict[str, Any], options: ParallelOptions) -> int:
    return cases.engine(config, options).steps_ahead


def test_the_watch_sees_a_read(solo: World) -> None:
    assert solo.run(watched) == [["aten::_local_scalar_dense"]]


@pytest.mark.parametrize(
    ("name", "text", "segments"),
    [
        ("llama-tied-509", "122", False),
        ("mistral-window", "221 sp full", True),
        ("llama", "114 bf16 m1", True),
    ],
)
def test_steps_are_begun_without_a_read_and_give_the_same_numbers(
    name: str, text: str, segments: bool, four: World
) -> None:
    ranks = four.run(begun, CONFIGS[name], mesh(text), 3, segments)
    for read, late, at_once in ranks:
        assert read == []
        assert late == at_once
        assert late == ranks[0][1]


def test_on_a_processor_alone_numbers_are_read_at_once(solo: World) -> None:
    ahead = solo.run(steps_ahead, CONFIGS["llama"], mesh("111"))[0]
    assert ahead == (0 if not torch.accelerator.is_available() else 1)
