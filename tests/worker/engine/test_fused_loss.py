"""The loss in pieces has the numbers of whole logits, and nothing has their size."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from smtrain.core.model.footprint import IGNORED_LABEL, LOSS_ROWS, loss_rows
from smtrain.worker.engine.native import cross_entropy, fused_loss
from smtrain.worker.engine.native.cross_entropy import Columns
from smtrain.worker.engine.native.fused_loss import LabelledRows, LinearCrossEntropy
from smtrain.worker.engine.native.linears import add_product
from tests.worker.engine import losses
from tests.worker.engine.cases import mesh
from tests.worker.engine.losses import error, fused, pieces_of, problem, whole
from tests.worker.engine.world import World

SCALES: list[dict[Any, float]] = [{}, {"cap": 3.0}, {"logits": 8.0}, {"cap": 3.0, "logits": 0.5}]
CASES = {
    "seed": st.integers(0, 1000),
    "tokens": st.integers(1, 40),
    "hidden": st.integers(1, 9),
    "vocab": st.integers(1, 50),
    "rows": st.integers(1, 45),
    "ignored": st.sampled_from([0.0, 0.3, 0.8, 1.0]),
    "scales": st.sampled_from(SCALES),
    "each": st.booleans(),
    "sink": st.booleans(),
    "select": st.booleans(),
}


@given(**CASES)
def test_every_number_is_that_of_whole_logits(
    seed: int,
    tokens: int,
    hidden: int,
    vocab: int,
    rows: int,
    ignored: float,
    scales: Any,
    each: bool,
    **options: bool,
) -> None:
    h, weight, labels, factors = problem(seed, tokens, hidden, vocab, ignored)
    with pieces_of(rows):
        made, gradients = fused(
            h, weight, labels, factors, scales, Columns(0, vocab, None), each=each, **options
        )
    right, rights = whole(
        h.double(), weight.double(), labels, factors if each else factors[0].expand(tokens), scales
    )
    scale = max(1.0, float(right.abs().sum()))
    assert float((made - (right if each else right.sum())).abs().max()) < 1e-6 * scale
    for gradient, other in zip(gradients, rights, strict=True):
        assert gradient is not None
        assert float((gradient - other).abs().max()) <= 1e-6 * max(1.0, float(other.abs().max()))


def test_over_a_vocabulary_that_is_cut_too(four: World) -> None:
    for worst in four.run(losses.over_ranks, range(12)):
        assert max(worst) < 1e-6


def test_in_bf16_pieces_add_no_error() -> None:
    """Also if every piece's part of the weight's gradient is small against the sum."""
    h, weight, labels, factors = problem(0, 2048, 16, 64, 0.2)
    half = h.bfloat16(), weight.bfloat16()
    factors = factors[:1].expand(2048).contiguous()
    right, rights = whole(half[0].double(), half[1].double(), labels, factors, {})
    once, known = whole(*half, labels, factors, {})
    for sink in (False, True):
        with pieces_of(32):
            made, gradients = fused(*half, labels, factors, {}, Columns(0, 64, None), sink=sink)
        assert error(made, right.sum()) <= max(1e-6, 1.1 * error(once.sum(), right.sum()))
        for gradient, whole_one, other in zip(gradients, known, rights, strict=True):
            assert gradient is not None
            assert error(gradient, other) <= 1.2 * error(whole_one, other) + 1e-3


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_piece_computes_what_torch_computes(precision: str) -> None:
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    h, weight, labels, factors = problem(1, 64, 16, 128, 0.2)
    known, rights = whole(h.to(dtype), weight.to(dtype), labels, factors[:1].expand(64), {})
    made, gradients = fused(
        h.to(dtype), weight.to(dtype), labels, factors, {}, Columns(0, 128, None)
    )
    assert error(made, known.sum()) < 2e-7
    for gradient, other in zip(gradients, rights, strict=True):
        assert gradient is not None
        assert error(gradient, other) < (2e-7 if precision == "fp32" else 1e-2)


@pytest.mark.parametrize("objective", ["pretrain", "sft", "dpo"])
def test_no_tensor_has_the_size_of_the_logits(objective: str, solo: World) -> None:
    ((largest, piece),) = solo.run(losses.largest, mesh("111"), objective)
    assert largest == piece


def test_on_a_mesh_neither(four: World) -> None:
    for largest, piece in four.run(losses.largest, mesh("221 sp full"), "sft")[2:]:
        assert largest == piece


ENGINES = [
    ("111 m4", "pretrain"), ("111 m4 full", "tied"), ("111 m2", "lora"), ("111 m2", "dpo"),
    ("111 m4", "cap"), ("111 m4", "logits"), ("111 m4 selective", "pretrain"),
]  # fmt: skip
MESHES = [
    ("221 sp m2", "tied"),
    ("212 m2", "cap"),
    ("122 m1 full", "pretrain"),
    ("211 cp2 m1", "logits"),
    ("221 m1", "dpo"),
    ("221 sp", "lora"),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("text", "kind"), ENGINES)
def test_steps_in_pieces_of_labelled_rows_are_those_of_one_piece(
    text: str, kind: str, solo: World
) -> None:
    (*one,), (*many,) = (
        solo.run(losses.steps, mesh(text), rows, kind)[0] for rows in (1 << 20, 24)
    )
    for first, second in zip(one, many, strict=True):
        assert second == pytest.approx(first, rel=2e-6, abs=1e-6)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("text", "kind"), MESHES)
def test_so_they_are_on_meshes(text: str, kind: str, four: World) -> None:
    one, many = (four.run(losses.steps, mesh(text), rows, kind)[0] for rows in (1 << 20, 24))
    for first, second in zip(one, many, strict=True):
        assert second == pytest.approx(first, rel=2e-6, abs=1e-6)


@pytest.mark.parametrize("name", ["llama", "llama-tied-509"])
def test_no_gradient_of_the_output_matrix_is_a_tensor_apart(name: str, solo: World) -> None:
    assert solo.run(losses.has_sink, name, mesh("111")) == [True]
    assert solo.run(losses.has_sink, name, mesh("111"), losses.LORA) == [False]


def test_rows_with_labels_are_selected_on_the_host() -> None:
    labels = torch.full((2, 512), IGNORED_LABEL)
    labels[:, 10:210] = 5
    made = LabelledRows.of(labels, losses.CPU)
    assert made is not None
    flat = labels.flatten()
    assert len(made.rows) == 512  # 400 of 1024, one without a label at least, a multiple of 128
    assert (flat[made.rows] != IGNORED_LABEL).sum() == 400
    assert torch.equal(flat[made.rows][made.places], flat)
    assert LabelledRows.of(torch.zeros(2, 512, dtype=torch.int64), losses.CPU) is None
    assert len(LabelledRows.of(torch.full((2, 512), IGNORED_LABEL), losses.CPU).rows) == 128  # type: ignore[union-attr]
    full = torch.zeros(1, 512, dtype=torch.int64)
    full[:, :60] = IGNORED_LABEL  # too few to be worth it
    assert LabelledRows.of(full, losses.CPU) is None


def test_a_device_that_compiles_each_shape_selects_none() -> None:
    labels = torch.full((2, 4096), IGNORED_LABEL)
    for kind, rows in (("cuda", 128), ("neuron", None)):
        head = SimpleNamespace(weight=torch.empty(1 << 15, 64, device="meta"))
        device: Any = SimpleNamespace(type=kind)
        loss = LinearCrossEntropy(head, Columns(0, 1 << 15, None), {}, device, fast=False)
        with patch.object(fused_loss, "to_device", lambda x, device: x):
            made = loss.select_labelled(labels)
        assert (None if made is None else len(made.rows)) == rows


def test_the_last_micro_batch_s_gradient_is_announced_in_its_backward_pass() -> None:
    """Data-parallel ranks begin to sum a gradient then, and know only after the forward pass that
    it is the last.
    """
    h, weight, labels, factors = problem(3, 20, 4, 10, 0.1)
    linear, _ = losses.head(weight, sink=True)
    heard = []
    with (
        patch.object(type(linear.sink), "announce_added", lambda sink: heard.append(1)),
        pieces_of(7),
    ):
        loss = LinearCrossEntropy(linear, Columns(0, 10, None), {}, losses.CPU, fast=False)
        total = loss.sum(h.requires_grad_(), labels, factors[0])
        assert not heard
        total.backward()
    assert len(heard) == 1


@pytest.mark.parametrize(
    ("tokens", "hidden", "columns", "device", "rows"),
    [
        (65536, 2048, 128256, "cpu", 2048),  # 1B of Llama 3 at 64k
        (65536, 2048, 128256, "cuda", 2048),
        (16384, 2048, 128256, "neuron", LOSS_ROWS["neuron"]),
        (16384, 2048, 128256, "cuda", LOSS_ROWS["cuda"]),
        (8192, 4096, 32000, "another", LOSS_ROWS["cuda"]),
        (65536, 4096, 32000, "cpu", 8192),
        (4096, 4096, 4000, "cuda", 4096),
    ],
)
def test_the_rows_of_a_piece(
    tokens: int, hidden: int, columns: int, device: str, rows: int
) -> None:
    assert loss_rows(tokens, hidden, columns, device) == rows


def test_a_product_is_added_to_sums_of_another_type() -> None:
    left, right = torch.randn(8, 3).bfloat16(), torch.randn(8, 2).bfloat16()
    total = torch.ones(3, 2)
    add_product(total, left, right, fresh=False)
    assert torch.equal(total, 1 + (left.t() @ right).float())
    add_product(total, left, right, fresh=True)
    assert torch.equal(total, (left.t() @ right).float())


def compiled_and_plain(compiled: Any) -> None:
    h, weight, labels, factors = problem(4, 12, 5, 20, 0.3)
    rest = labels, factors, 2.0, 3.0
    plain = cross_entropy.loss_gradient(h @ weight.t(), *rest)
    for made, right in zip(compiled(h @ weight.t(), *rest), plain, strict=True):
        assert error(made, right) < 1e-6


def test_a_compiler_gets_the_same_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    compiled_and_plain(cross_entropy.loss_gradient)


@pytest.mark.full  # the test before has its branch; importing the compiler takes seconds
def test_in_one_graph() -> None:
    compiled_and_plain(torch.compile(cross_entropy.loss_gradient, backend="eager", fullgraph=True))
