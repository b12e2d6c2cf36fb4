"""Rows of several samples: packed instruction data and text with a document mask, against the
native engine.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from smtrain.core.model.lora import Lora
from tests.worker.engine.cases import CONFIGS, mesh
from tests.worker.engine.nxd import cases as nxd
from tests.worker.engine.world import World

pytestmark = pytest.mark.nxd
COUNT = 10
LORA = Lora(
    4, 8.0, 0.0, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
)

MESHES = ("111", "211", "211 sp", "121 m2", "221 m2", "221 sp m2", "112", "212 sp")
CASES: list[tuple[str, str, str, dict[str, Any]]] = [
    *(("llama", where, "packed", {}) for where in MESHES),
    *(("gpt_neox", where, "packed", {}) for where in ("211 sp", "221 m2", "112")),
    *(
        ("llama-kv4", where, kind, {})
        for where in ("221 m2", "212")
        for kind in ("samples", "documents")
    ),
    ("qwen2-window", "211", "packed", {}),
    (
        "mistral-window",
        "121 m2",
        "documents",
        {},
    ),  # and a vocabulary that tp does not divide, below
    ("mistral-window", "212 sp", "packed", {}),
    ("qwen3", "221 sp m2", "documents", {}),
    ("llama", "211", "packed", {"zero1": False}),
    ("llama", "211 sp", "packed", {"activation_checkpointing": "selective"}),
    ("llama", "221 m2", "packed", {"activation_checkpointing": "full"}),
    ("llama", "121 m2", "packed", {"virtual_stages": 2}),
    ("llama", "121 m2", "samples", {"pipeline_cuts": (0,)}),
]


@pytest.fixture(scope="module")
def expected(world: dict[int, World]) -> Any:
    """The native engine's steps, in one process."""
    known: dict[Any, Any] = {}

    def steps(name: str, kind: str, lora: Lora | None = None) -> Any:
        if (name, kind, lora) not in known:
            how = {"native": True, "lora": lora}
            known[name, kind, lora] = world[1].run(
                nxd.apart, CONFIGS[name], mesh("111"), kind, COUNT, how
            )[0]
        return known[name, kind, lora]

    return steps


def same(result: Any, expected: Any) -> None:
    for step, (made, known) in enumerate(zip(result, expected, strict=True)):
        assert abs(made[0] - known[0]) < 1e-5, step
        assert abs(made[1] - known[1]) < 1e-5 * max(1.0, known[1]), step
        assert made[2] in (known[2], None), step


@pytest.mark.parametrize(("name", "where", "kind", "changes"), CASES)
def test_samples_of_a_row_train_as_in_the_native_engine(
    world: dict[int, World],
    expected: Any,
    name: str,
    where: str,
    kind: str,
    changes: dict[str, Any],
) -> None:
    options = replace(mesh(where), **changes)
    job = world[options.tp * options.pp * options.dp]
    answers = job.run(nxd.apart, CONFIGS[name], options, kind, COUNT, {})
    assert all(answer == answers[0] for answer in answers), "every rank tells the same numbers"
    same(answers[0], expected(name, kind))


@pytest.mark.parametrize("where", ["211 sp", "121 m2", "112"])
def test_adapters_too(world: dict[int, World], expected: Any, where: str) -> None:
    options = mesh(where)
    result = world[2].run(nxd.apart, CONFIGS["llama"], options, "packed", COUNT, {"lora": LORA})[0]
    same(result, expected("llama", "packed", LORA))


def test_a_row_that_is_one_sample_trains_as_without_segments(
    world: dict[int, World], expected: Any
) -> None:
    """The masks of rows change nothing by themselves; those of packed rows do."""
    known = expected("llama", "packed")
    assert abs(known[0][0] - expected("llama", "samples")[0][0]) > 1e-3
    plain, whole = world[1].run(nxd.one_sample, CONFIGS["llama"], mesh("111"))[0]
    assert abs(plain[0] - whole[0]) < 1e-6
    assert plain[1] == pytest.approx(whole[1], rel=1e-5)
