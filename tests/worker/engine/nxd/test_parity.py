"""The nxd engine against the native one: the same losses and norms, step by step, whatever the
mesh.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.core.model.generations import spelled
from tests.worker.engine import cases
from tests.worker.engine.cases import CONFIGS, STEPS, mesh
from tests.worker.engine.nxd import cases as nxd
from tests.worker.engine.world import World

pytestmark = pytest.mark.nxd

CASES = [
    # the table: attention with and without grouped queries, NeoX; three meshes; ZeRO-1 and
    # sequence parallel
    *(
        (name, mesh_, zero1)
        for name in ("llama-kv4", "llama", "gpt_neox")
        for mesh_ in ("211", "211 sp", "121 m2", "221", "221 sp m2")
        for zero1 in (True, False)
    ),
    ("llama", "122 m2", True),  # with data parallelism too
    ("llama", "212 sp", False),
    ("llama-kv1", "211", True),  # key/value heads held twice, with biases below
    ("llama-kv1", "212 sp", False),
    ("qwen2", "211 sp", True),
    ("qwen2", "221", True),
    ("qwen3", "221 sp m2", True),
    ("qwen2-window", "211", True),
    ("mistral-window", "121", True),
    ("gpt_neox-sequential", "121 m2", False),
    ("llama-tied-509", "121 m2", True),  # padding token 0
    # a vocabulary that tp does not divide
    ("llama-tied-509", "221 m2", True),
    ("mistral-window", "212 sp", True),
    ("gpt_neox-sequential", "411", False),
]


@pytest.fixture(scope="module")
def expected(world: dict[int, World]) -> Any:
    """The native engine's 20 steps of a config, in one process of the same Python."""
    known: dict[str, Any] = {}

    def steps(name: str) -> Any:
        if name not in known:
            known[name] = world[1].run(nxd.native_train, CONFIGS[name], mesh("111"))[0]
        return known[name]

    return steps


def same(result: Any, expected: Any, tolerance: float = 1e-5) -> None:
    for step, ((loss, norm), (known, known_norm)) in enumerate(zip(result, expected, strict=True)):
        assert abs(loss - known) < tolerance, step
        assert abs(norm - known_norm) < 100 * tolerance * max(1.0, known_norm), step


@pytest.mark.parametrize(("name", "where", "zero1"), CASES)
def test_losses_and_norms_are_the_native_engines(
    world: dict[int, World], expected: Any, name: str, where: str, zero1: bool
) -> None:
    options = replace(mesh(where), zero1=zero1)
    answers = world[options.tp * options.pp * options.dp].run(nxd.train, CONFIGS[name], options)
    assert all(answer == answers[0] for answer in answers), "every rank tells the same numbers"
    same(answers[0], expected(name))


@pytest.mark.parametrize(
    ("family", "rope"), [("llama", "llama3"), ("qwen2", "yarn"), ("gpt_neox", "partial")]
)
def test_a_config_of_transformers_5_is_the_same_model(
    world: dict[int, World], family: str, rope: str
) -> None:
    """The library needs transformers 4, which reads nothing of that spelling by itself."""
    known = world[1].run(cases.plain, spelled(family, rope, 4), 5)[0]
    same(world[1].run(nxd.train, spelled(family, rope, 5), mesh("111"), 5)[0], known)


def test_rounding_alone_stays_far_below_the_bound(world: dict[int, World]) -> None:
    """Or a difference between engines would say nothing of them."""
    known = world[1].run(cases.plain, CONFIGS["llama-kv4"], STEPS)[0]
    for seed in range(1, 7):
        result = world[1].run(cases.plain, CONFIGS["llama-kv4"], STEPS, cases.OPTIMIZER, seed)[0]
        same(result, known, tolerance=3e-6)


@pytest.mark.parametrize(
    ("where", "changes"),
    [
        ("221 sp m2", {"activation_checkpointing": "full"}),
        ("211", {"activation_checkpointing": "full"}),
        ("211 sp", {"activation_checkpointing": "selective"}),
        ("121 m2", {"activation_checkpointing": "selective"}),
        ("121 m2", {"pipeline_cuts": (0,)}),
        ("121 m2", {"virtual_stages": 2}),
        ("221 m2", {"virtual_stages": 2, "pipeline_cuts": (0, 1, 2)}),
    ],
)
def test_recomputing_and_cutting_otherwise_change_nothing(
    world: dict[int, World], expected: Any, where: str, changes: dict[str, Any]
) -> None:
    options = replace(mesh(where), **changes)
    same(
        world[options.tp * options.pp].run(nxd.train, CONFIGS["llama"], options)[0],
        expected("llama"),
    )


def test_bf16_follows_the_native_engine(world: dict[int, World]) -> None:
    known = world[1].run(nxd.native_train, CONFIGS["llama"], mesh("111 bf16"))[0]
    result = world[2].run(nxd.train, CONFIGS["llama"], mesh("211 sp bf16"))[0]
    same(result, known, tolerance=2e-2)


def test_evaluation_is_the_native_engines(world: dict[int, World]) -> None:
    known = world[1].run(cases.look, CONFIGS["llama"], mesh("111"))[0][0]
    for where in ("211", "121 m2"):
        result = world[2].run(nxd.evaluate, CONFIGS["llama"], mesh(where))
        assert all(abs(loss - known) < 1e-5 for loss in result)


@pytest.mark.parametrize("where", ["211 sp", "121 m2"])
def test_steps_are_the_same_with_evaluations_between_them(
    world: dict[int, World], where: str
) -> None:
    quiet = world[2].run(nxd.between_steps, CONFIGS["llama"], mesh(where), False)
    assert world[2].run(nxd.between_steps, CONFIGS["llama"], mesh(where), True) == quiet


@pytest.mark.parametrize(
    ("where", "name"), [("112", "llama"), ("212 sp", "qwen2"), ("121 m2", "llama-tied-509")]
)
def test_fp32_weights_begin_with_what_the_source_has(
    world: dict[int, World], where: str, name: str
) -> None:
    options = mesh(where)
    job = world[options.tp * options.pp * options.dp]
    for count, same, kept in job.run(nxd.masters, CONFIGS[name], options, False):
        assert same == count
        assert kept < count / 2
    for count, same, kept in job.run(nxd.masters, CONFIGS[name], options, True):
        assert count == same == kept
