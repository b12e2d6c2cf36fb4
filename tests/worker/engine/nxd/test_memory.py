"""The planner's memory of engine nxd with masks against the peaks of its tensors in CPU mode."""

from __future__ import annotations

import pytest

from smtrain.client.planner.machines import Machine, Mesh, Work
from smtrain.client.planner.memory import core_memory
from smtrain.core.model.lora import Lora, targets_of
from smtrain.core.model.shape import ModelShape
from tests.client.planner.peaks import model
from tests.worker.engine.cases import BATCH, mesh
from tests.worker.engine.nxd import cases as nxd
from tests.worker.engine.world import World

pytestmark = pytest.mark.nxd
SEQ_LEN = 256  # long enough that scores decide


@pytest.mark.parametrize(
    ("family", "where", "adapted"),
    [
        ("llama", "111 m2", False),
        ("llama", "211 sp m2", False),
        ("llama", "111 m2 bf16", False),
        ("gpt_neox", "111 m2 bf16", False),
        ("llama", "111 m2 full", False),
        ("llama", "111 m2 selective", False),
        ("llama", "121 m2", False),
        ("llama", "112 m2", False),
        ("llama", "111 m2", True),
    ],
)
def test_the_peak_with_masks_is_predicted(
    world: dict[int, World], family: str, where: str, adapted: bool
) -> None:
    o, described = mesh(where), model(family)
    described["max_position_embeddings"] = SEQ_LEN
    shape = ModelShape.from_config(described)
    lora = Lora(8, 16.0, 0.0, targets_of(shape, ("all-linear",))) if adapted else None
    measured = world[o.tp * o.pp * o.dp].run(nxd.peak, described, o, SEQ_LEN, lora)
    work = Work(
        shape,
        SEQ_LEN,
        BATCH,
        o.precision,
        fused_attention=False,
        separates_documents=True,
        gathers_again=True,
        lora=lora,
    )
    machine = Machine("cpu", 1, o.tp * o.pp * o.dp, 1e12, 1e12, 1e12, 1e9, has_accelerators=False)
    cut = Mesh(
        o.tp, o.pp, o.dp, o.micro_batch_size, o.activation_checkpointing, o.sequence_parallel
    )
    for stage in range(o.pp):
        top = max(bytes_ for at, bytes_ in measured if at == stage)
        parts = core_memory(work, machine, cut, stage)
        # In fp32 with one data-parallel rank it is 8 % above: the library keeps copies that the
        # planner does not count.
        assert 0.95 < top / parts.total < 1.12, parts
