"""Every element of every parameter is in the layout, as often as it should be."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from smtrain.core.errors import ConfigError
from smtrain.core.model.blocks import Role
from smtrain.core.model.layout import Layout, Shard
from smtrain.core.model.shape import ModelShape
from tests.worker.checkpoint.models import configs

ORDERS = st.sampled_from(["grouped", "tiled"])


def layout(config: dict[str, Any], tp: int, pp: int, **more: Any) -> Layout:
    shape = ModelShape.from_config(config)
    assume(not shape.mesh_faults(tp, pp))
    return Layout(shape, tp, pp, **more)


@given(configs(), st.sampled_from([1, 2, 4, 8, 16]), st.integers(1, 4), ORDERS)
def test_shards_cover_every_parameter(config: dict[str, Any], tp: int, pp: int, order: Any) -> None:
    lay = layout(config, tp, pp, kv_order=order)
    for spec in lay.shape.specs:
        shards = [lay.shard(spec.name, t) for t in range(tp)]
        dim = shards[0].dim
        if dim is None:
            assert all(s == shards[0] and s.copies == tp for s in shards)
            continue
        held = Counter(i for s in shards for a, b in s.ranges for i in range(a, b))
        assert set(held) == set(range(spec.shape[dim]))
        for s in shards:
            assert (s.dim, s.copies) == (dim, shards[0].copies)
            assert set(held.values()) == {s.copies}
            filled = sum(b - a for a, b in s.ranges)
            assert filled == s.size or (spec.role is Role.VOCAB and filled <= s.size)
        sizes = {lay.local_shape(spec.name, t) for t in range(tp)}
        assert len(sizes) == 1, "all ranks hold tensors of one shape"


@given(configs(), st.sampled_from([1, 2, 4, 8, 16]), ORDERS, st.sampled_from([None, 1, 2, 4]))
def test_each_query_sits_beside_its_key(
    config: dict[str, Any], tp: int, order: Any, multiplier: int | None
) -> None:
    shape = ModelShape.from_config(config)
    assume(not shape.mesh_faults(tp, 1))
    try:
        lay = Layout(shape, tp, kv_order=order, kv_multiplier=multiplier)
    except ConfigError:
        assume(False)
    seen: list[int] = []
    copies: Counter[tuple[int, int]] = Counter()
    for t in range(tp):
        queries, slots = lay.query_heads(t), lay.kv_slots(t)
        seen += queries
        copies.update(slots)
        each = len(queries) // len(slots)
        for i, query in enumerate(queries):
            head = query // (shape.heads // shape.kv_heads)
            assert head == slots[i // each][0], (
                "attention on the rank pairs query i with slot i // each"
            )
    assert sorted(seen) == list(range(shape.heads))
    assert set(copies.values()) == {1}
    assert len(copies) == shape.kv_heads * lay.kv_multiplier


@given(configs(), st.sampled_from([1, 2, 4, 8]), ORDERS)
def test_columns_of_the_output_follow_the_queries(
    config: dict[str, Any], tp: int, order: Any
) -> None:
    lay = layout(config, tp, 1, kv_order=order)
    names = {s.role: s.name for s in lay.shape.specs if s.name.endswith("weight")}
    for t in range(tp):
        if Role.Q in names:
            queries, columns = (lay.shard(names[role], t).ranges for role in (Role.Q, Role.O))
            latent = lay.shape.latent
            if latent is not None:  # a head's values may have another size than its queries
                sizes = (latent.head_dim, latent.value_dim)
                queries, columns = (
                    tuple((a // size, b // size) for a, b in ranges)
                    for ranges, size in zip((queries, columns), sizes, strict=True)
                )
            assert queries == columns
        elif Role.QKV in names:  # the thirds of GPT-2 are each cut as the columns are
            assert lay.shard(names[Role.QKV], t).ranges == tuple(
                (3 * a, 3 * b) for a, b in lay.shard(names[Role.O], t).ranges
            )


@given(configs(), st.sampled_from([1, 2]), st.integers(1, 6))
def test_stages_hold_every_parameter_once(config: dict[str, Any], tp: int, pp: int) -> None:
    lay = layout(config, tp, pp)
    held = Counter(name for p in range(pp) for name in lay.names(p))
    assert set(held) == {s.name for s in lay.shape.specs}
    for name, count in held.items():
        twice = lay.shape.tied and pp > 1 and name == lay.shape.embed_name
        assert count == len(lay.stages(name)) == (2 if twice else 1)
    assert [i for p in range(pp) for i in lay.layers(p)] == list(range(lay.shape.layers))
    sizes = [len(lay.layers(p)) for p in range(pp)]
    assert sizes == sorted(sizes), "the remainder goes to the last stages"
    assert sizes[-1] - sizes[0] <= 1
    if lay.shape.tied:
        assert lay.stages(lay.shape.head_name) == ((0, pp - 1) if pp > 1 else (0,))
    else:
        assert lay.stages(lay.shape.head_name) == (pp - 1,)


@given(configs(), st.sampled_from([1, 2, 4]), st.integers(1, 3))
def test_the_flat_buffer_holds_matrices_first(config: dict[str, Any], tp: int, pp: int) -> None:
    lay = layout(config, tp, pp)
    for p in range(pp):
        table, at = lay.flat_table(p), 0
        trained = [name for name in lay.names(p) if lay.spec(name).role != Role.ROUTER_BIAS]
        assert sorted(name for name, _, _ in table.entries) == sorted(trained)
        for name, start, size in table.entries:
            assert start == at
            spec = lay.spec(name)  # a stack of experts has their number as its first dimension
            assert (start < table.decay_end) == (len(spec.shape) - spec.is_stacked > 1)
            at += size
        assert at == table.size


LLAMA = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 5,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 64,
    "vocab_size": 10,
    "head_dim": 2,
}


def test_what_nxd_documents() -> None:
    """8 key/value heads on tp 32: rank 9 holds head 1, copy 1 on trn1, and head 2, copy 1 on
    trn2.
    """
    shape = ModelShape.from_config(LLAMA)
    trn1, trn2 = Layout(shape, 32, kv_order="tiled"), Layout(shape, 32, kv_order="grouped")
    assert trn1.kv_multiplier == trn2.kv_multiplier == 4
    assert trn1.kv_slots(9) == ((1, 1),)
    assert trn2.kv_slots(9) == ((2, 1),)
    assert trn1.query_heads(9) == (1 * 8 + 1 * 2, 1 * 8 + 1 * 2 + 1)
    assert trn2.query_heads(9) == (18, 19)
    assert trn1.kv_groups()[1] == (1, 9, 17, 25)
    assert trn2.kv_groups()[1] == (4, 5, 6, 7)
    assert trn1.shard("model.layers.0.self_attn.k_proj.weight", 9) == Shard(
        0, ((2, 4),), 2, copies=4
    )


def test_a_multiplier_above_need_holds_several_slots() -> None:
    shape = ModelShape.from_config({**LLAMA, "num_key_value_heads": 4})
    tiled = Layout(shape, 4, kv_order="tiled", kv_multiplier=2)
    assert tiled.kv_slots(1) == ((2, 0), (3, 0))
    assert tiled.kv_slots(3) == ((2, 1), (3, 1))
    assert tiled.shard("model.layers.0.self_attn.v_proj.weight", 3).ranges == ((4, 8),)
    assert tiled.shard("model.layers.0.self_attn.q_proj.weight", 3).ranges == ((80, 96), (112, 128))


def test_pipeline_cuts() -> None:
    shape = ModelShape.from_config(LLAMA)
    assert [list(Layout(shape, 1, 2).layers(p)) for p in (0, 1)] == [[0, 1], [2, 3, 4]]
    assert [list(Layout(shape, 1, 2, cuts=[3]).layers(p)) for p in (0, 1)] == [[0, 1, 2, 3], [4]]
    for cuts in ([4], [-1], [1, 2], []):
        with pytest.raises(ConfigError, match="pipeline cuts"):
            Layout(shape, 1, 2, cuts=cuts)


def test_a_mesh_or_multiplier_that_does_not_fit_is_refused() -> None:
    shape = ModelShape.from_config(LLAMA)
    with pytest.raises(ConfigError) as error:
        Layout(shape, 3, 6)
    assert len(error.value.faults) == 4
    with pytest.raises(ConfigError, match="kv_multiplier = 3 does not fit"):
        Layout(shape, 2, kv_multiplier=3)


def test_vocabulary_rows_are_padded_at_the_end() -> None:
    lay = Layout(ModelShape.from_config({**LLAMA, "vocab_size": 5, "intermediate_size": 64}), 4)
    shards = [lay.shard("lm_head.weight", t) for t in range(4)]
    assert [s.ranges for s in shards] == [((0, 2),), ((2, 4),), ((4, 5),), ((5, 5),)]
    assert {s.size for s in shards} == {2}
