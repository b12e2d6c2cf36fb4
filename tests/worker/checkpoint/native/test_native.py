"""Native checkpoint files without an engine: any slice of any cut is read as it was written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from smtrain.core.errors import CheckpointError
from smtrain.core.model.blocks import Spec, keeps_fp32
from smtrain.core.model.footprint import PRECISIONS, Precision
from smtrain.core.model.layout import Layout
from smtrain.core.model.shape import ModelShape
from smtrain.core.protocol.lineage import Lineage
from smtrain.worker.checkpoint import manifest
from smtrain.worker.checkpoint.convert import convert
from smtrain.worker.checkpoint.dtypes import BY_PRECISION
from smtrain.worker.checkpoint.manifest import Manifest
from smtrain.worker.checkpoint.native import pruning
from smtrain.worker.checkpoint.native.files import (
    model_file,
    optimizer_file,
    read_by,
    read_whole,
    write_safetensors,
)
from smtrain.worker.checkpoint.native.reader import NativeSource, StateReader
from smtrain.worker.checkpoint.targets import Native
from smtrain.worker.checkpoint.training_state import KINDS
from smtrain.worker.checkpoint.verifying import verify
from tests.tiers import examples
from tests.worker.checkpoint.models import configs, newest_complete

LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 13,
}


def whole(config: dict[str, Any]) -> dict[str, dict[str, torch.Tensor]]:
    """Distinct numbers for every element of every kind."""
    out: dict[str, dict[str, torch.Tensor]] = {}
    at = 0
    for kind in KINDS:
        out[kind] = {}
        for spec in ModelShape.from_config(config).specs:
            out[kind][spec.name] = torch.arange(at, at + spec.size, dtype=torch.float32).view(
                spec.shape
            )
            at += spec.size
    return out


def cut(layout: Layout, name: str, tp: int, tensor: torch.Tensor) -> torch.Tensor:
    """An independent statement of what a shard is."""
    shard = layout.shard(name, tp)
    if shard.dim is None:
        return tensor.clone()
    index = [i for a, b in shard.ranges for i in range(a, b)]
    out = torch.zeros(layout.local_shape(name, tp))
    out.narrow(shard.dim, 0, len(index)).copy_(
        tensor.index_select(shard.dim, torch.tensor(index, dtype=torch.int64))
    )
    return out


def write(
    path: Path,
    config: dict[str, Any],
    tp: int = 1,
    pp: int = 1,
    dp: int = 1,
    precision: Precision = "fp32",
    step: int = 1,
) -> dict[str, dict[str, torch.Tensor]]:
    """Write a checkpoint as an engine on (tp, pp, dp) does."""
    layout, values, files = Layout(ModelShape.from_config(config), tp, pp), whole(config), {}
    tables = [layout.flat_table(p) for p in range(pp)]
    dtype = getattr(torch, BY_PRECISION[precision].name)
    shards = [-(-t.size // dp) for t in tables]
    for p in range(pp):
        for t in range(tp):
            local = {
                n: cut(layout, n, t, values["master"][n]).to(
                    torch.float32 if keeps_fp32(n) else dtype
                )
                for n in layout.names(p)
            }
            files[model_file(t, p)] = write_safetensors(path / model_file(t, p), local)
            state = {}
            for kind in KINDS[1:] if precision == "fp32" else KINDS:
                flat = torch.zeros(shards[p] * dp)
                for name, at, size in tables[p].entries:
                    flat[at : at + size] = cut(layout, name, t, values[kind][name]).reshape(-1)
                state[kind] = flat.split(shards[p])
            for d in range(dp):
                name = optimizer_file(d, t, p)
                files[name] = write_safetensors(path / name, {k: v[d] for k, v in state.items()})
    about = Manifest(
        step=step,
        optimizer_steps=step,
        topology={"tp": tp, "pp": pp, "dp": dp},
        precision=precision,
        config=config,
        flat=[[list(e) for e in t.entries] for t in tables],
        shard=shards,
        files=files,
        state={"step": step},
    )
    manifest.write_manifest(path, about)
    return values


def trained_specs(shape: ModelShape) -> list[Spec]:
    """The parameters that the optimizer has a state of."""
    return [spec for spec in shape.specs if not keeps_fp32(spec.name)]


meshes = st.tuples(st.sampled_from([1, 2, 4, 8]), st.integers(1, 2), st.integers(1, 3))
files_are_slow = settings(
    max_examples=examples(20),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@files_are_slow
@given(configs(), meshes, st.sampled_from(PRECISIONS), st.data())
def test_any_slice_of_the_weights(
    tmp_path_factory: Any,
    config: dict[str, Any],
    mesh: tuple[int, int, int],
    precision: Precision,
    data: st.DataObject,
) -> None:
    tp, pp, dp = mesh
    assume(not ModelShape.from_config(config).mesh_faults(tp, pp))
    folder = tmp_path_factory.mktemp("checkpoint")
    values = write(folder, config, tp, pp, dp, precision)["master"]
    source = NativeSource(folder)
    assert source.names() == sorted(values)
    assert source.config == config
    for name in source.names():
        expected = values[name].to(getattr(torch, source.dtype(name).name))
        assert source.shape(name) == tuple(expected.shape)
        assert torch.equal(source.read(name), expected)
    for name in data.draw(st.lists(st.sampled_from(source.names()), min_size=3, max_size=3)):
        expected = source.read(name)
        dim = data.draw(st.integers(0, expected.ndim - 1))
        start = data.draw(st.integers(0, expected.shape[dim] - 1))
        stop = data.draw(st.one_of(st.none(), st.integers(start + 1, expected.shape[dim])))
        until = expected.shape[dim] if stop is None else stop
        assert torch.equal(
            source.read(name, dim, start, stop), expected.narrow(dim, start, until - start)
        )


@files_are_slow
@given(configs(), meshes, meshes, st.sampled_from(PRECISIONS))
def test_any_cut_of_the_state_from_any_other(
    tmp_path_factory: Any,
    config: dict[str, Any],
    old: tuple[int, int, int],
    new: tuple[int, int, int],
    precision: Precision,
) -> None:
    shape = ModelShape.from_config(config)
    assume(not shape.mesh_faults(old[0], old[1]) and not shape.mesh_faults(new[0], new[1]))
    folder = tmp_path_factory.mktemp("checkpoint")
    values = write(folder, config, *old, precision)
    reader, layout = StateReader(folder), Layout(shape, new[0], new[1])
    for spec in trained_specs(shape):
        for tp in range(new[0]):
            for kind in KINDS:
                read = reader.read(kind, spec.name, layout, tp)
                assert torch.equal(read, cut(layout, spec.name, tp, values[kind][spec.name]))


@files_are_slow
@given(
    configs(), meshes, st.sampled_from(PRECISIONS), st.sampled_from([97, 1000, 1 << 20]), st.data()
)
def test_what_a_rank_saved_is_read_once_with_the_crc32_of_all_its_bytes(
    tmp_path_factory: Any,
    config: dict[str, Any],
    mesh: tuple[int, int, int],
    precision: Precision,
    read: int,
    data: Any,
) -> None:
    tp, pp, dp = mesh
    assume(not ModelShape.from_config(config).mesh_faults(tp, pp))
    folder = tmp_path_factory.mktemp("checkpoint")
    write(folder, config, *mesh, precision)
    rank = data.draw(st.integers(0, tp * pp * dp - 1))
    t, d, p = rank % tp, rank // tp % dp, rank // (tp * dp)
    held, pieces, length = (
        load_file(folder / optimizer_file(d, t, p)),
        dict[str, list[Any]](),
        dict[str, int](),
    )

    def put(kind: str, at: int, numbers: Any) -> None:
        values = numbers.view("f4")
        assert at == length.get(kind, 0)
        length[kind] = at + len(values)
        pieces.setdefault(kind, []).append(values.copy())

    with patch("smtrain.worker.checkpoint.native.reader._READ", read * 4):
        name, crc = StateReader(folder).own_part(d, t, p, put, crc=True)
    assert pieces.keys() == held.keys()
    assert all(
        np.array_equal(np.concatenate(parts), held[kind].numpy()) for kind, parts in pieces.items()
    )
    about = manifest.Manifest.read(folder)
    assert crc == about.files[name]["crc32"]
    assert {name} == read_whole(about, mesh, rank) <= read_by(about, mesh, rank)
    assert read_whole(about, (tp, pp, dp + 1), rank) == set()


@pytest.mark.parametrize("change", ["kind", "size", "dtype"])
def test_other_tensors_than_a_rank_saved_are_refused(tmp_path: Path, change: str) -> None:
    write(tmp_path, LLAMA, precision="bf16")
    path = tmp_path / optimizer_file(0, 0, 0)
    held = load_file(path)
    if change == "kind":
        held["other"] = held["master"].clone()
    elif change == "size":
        held["master"] = held["master"][:-2]
    else:
        held["master"] = held["master"].to(torch.bfloat16)
    about = manifest.Manifest.read(tmp_path)
    about.files[optimizer_file(0, 0, 0)] = write_safetensors(path, held)
    manifest.write_manifest(tmp_path, about)
    with pytest.raises(
        CheckpointError, match=r"its tensors are not those that manifest\.json says"
    ):
        StateReader(tmp_path).own_part(0, 0, 0, lambda *_: None, crc=False)


def test_files_are_ordinary_safetensors(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 5),
        "b.weight": torch.randn(7).bfloat16(),
        "view": torch.randn(4, 6)[1:3],
        "one": torch.tensor(2.0),
    }
    about = write_safetensors(tmp_path / "x.safetensors", tensors)
    loaded = load_file(tmp_path / "x.safetensors")
    assert loaded.keys() == tensors.keys()
    assert all(torch.equal(loaded[n], tensors[n]) for n in tensors)
    assert (tmp_path / "x.safetensors").stat().st_size == about["size"]
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"], "no partial file is left"


def test_only_complete_checkpoints_have_no_fault(tmp_path: Path) -> None:
    assert newest_complete(tmp_path / "none") is None
    for step in (1, 2, 3, 4, 10):
        write(manifest.step_folder(tmp_path, step), LLAMA, 2, step=step)
    (tmp_path / "step_00000010" / manifest.NAME).unlink()
    (tmp_path / "step_00000004" / model_file(1, 0)).unlink()
    with open(tmp_path / "step_00000003" / model_file(0, 0), "ab") as file:
        file.write(b"more")
    (tmp_path / "step_99999999.tmp").mkdir()
    assert newest_complete(tmp_path) == tmp_path / "step_00000002"
    faults = {path.name: str(manifest.fault(path)) for _, path in manifest.checkpoints(tmp_path)}
    assert "no manifest.json" in faults["step_00000010"]
    assert f"{model_file(1, 0)} is missing" in faults["step_00000004"]
    assert "bytes instead of" in faults["step_00000003"]
    with pytest.raises(CheckpointError, match="is not whole"):
        NativeSource(tmp_path / "step_00000004")


def test_one_flipped_bit_is_found(tmp_path: Path) -> None:
    write(tmp_path, LLAMA, 2)
    verify(tmp_path)
    path = tmp_path / optimizer_file(0, 1, 0)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert manifest.fault(tmp_path) is None, "sizes alone cannot tell"
    with pytest.raises(
        CheckpointError, match=r"dp000_tp001_pp000.safetensors is damaged, it has crc32"
    ):
        verify(tmp_path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot be read"),
        ("[]", "not the manifest of an smtrain checkpoint"),
        ('{"format": "other"}', "not the manifest of an smtrain checkpoint"),
        (
            json.dumps({"format": manifest.FORMAT, "version": 99}),
            "format version 99, this smtrain reads 1",
        ),
        (json.dumps({"format": manifest.FORMAT, "version": 1, "step": 3}), "is not complete"),
    ],
)
def test_a_manifest_that_is_none_is_named(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / manifest.NAME).write_text(text)
    with pytest.raises(CheckpointError, match=words):
        Manifest.read(tmp_path)


def broken(path: Path) -> None:
    (path / model_file(0, 0)).unlink()


def prune(folder: Path, keep: int) -> None:
    """Prune as one rank with one disk."""
    line = Lineage.of(folder, "")
    pruning.prune(line, keep, None, manifest, pruning.RankGroup(lambda value: [value], 0, 0))


@pytest.mark.parametrize(
    ("whole_steps", "broken_steps", "keep", "left"),
    [
        ([1, 2, 3], [], 2, [2, 3]),
        ([1, 2, 3], [], 5, [1, 2, 3]),
        ([1], [2, 3], 1, [1, 2, 3]),
        ([1, 4], [2, 5], 1, [4, 5]),
        ([], [1, 2], 1, [1, 2]),
        ([1, 3], [2], 2, [1, 2, 3]),
    ],
)
def test_pruning_keeps_the_newest_whole_ones(
    whole_steps: list[int], broken_steps: list[int], keep: int, left: list[int], tmp_path: Path
) -> None:
    for step in whole_steps + broken_steps:
        write(manifest.step_folder(tmp_path, step), LLAMA, step=step)
    for step in broken_steps:
        broken(manifest.step_folder(tmp_path, step))
    before = newest_complete(tmp_path)
    prune(tmp_path, keep)
    assert [step for step, _ in manifest.checkpoints(tmp_path)] == left
    assert newest_complete(tmp_path) == before
    prune(tmp_path, keep)
    assert [step for step, _ in manifest.checkpoints(tmp_path)] == left


def test_keeping_none_is_no_pruning(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keep = 0"):
        prune(tmp_path, 0)


@settings(files_are_slow, max_examples=examples(24))
@given(
    configs(),
    meshes,
    st.tuples(st.sampled_from([1, 2, 4]), st.integers(1, 2)),
    st.sampled_from(PRECISIONS),
    st.sampled_from([None, *PRECISIONS]),
)
@pytest.mark.full
def test_a_checkpoint_in_another_cut_keeps_its_state(
    tmp_path_factory: Any,
    config: dict[str, Any],
    old: tuple[int, int, int],
    new: tuple[int, int],
    precision: Precision,
    dtype: Precision | None,
) -> None:
    shape = ModelShape.from_config(config)
    assume(not shape.mesh_faults(old[0], old[1]) and not shape.mesh_faults(*new))
    folder = tmp_path_factory.mktemp("checkpoint")
    write(manifest.step_folder(folder / "old", 7), config, *old, precision, step=7)
    target = folder / "new"
    convert(folder / "old", target, to=Native(tp=new[0], pp=new[1], dtype=dtype))
    newest = newest_complete(target)
    assert newest == manifest.step_folder(target, 7)
    verify(newest)
    was, now = StateReader(folder / "old" / "step_00000007"), StateReader(newest)
    assert (now.manifest.optimizer_steps, now.manifest.state) == (7, {"step": 7})
    assert now.manifest.precision == (dtype or precision)
    whole, source = Layout(shape), NativeSource(newest)
    for spec in shape.specs:
        if keeps_fp32(spec.name):
            assert torch.equal(now.wide_weight(spec.name), was.wide_weight(spec.name))
    for spec in trained_specs(shape):
        for kind in KINDS:
            assert torch.equal(
                now.read(kind, spec.name, whole, 0), was.read(kind, spec.name, whole, 0)
            )
        trained = was.read("master", spec.name, whole, 0)
        weights = source.read(spec.name)
        assert torch.equal(weights, trained.to(weights.dtype))


def test_a_damaged_state_is_not_converted(tmp_path: Path) -> None:
    write(manifest.step_folder(tmp_path / "old", 7), LLAMA, 2, step=7)
    path = tmp_path / "old" / "step_00000007" / optimizer_file(0, 1, 0)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="is damaged, it has crc32"):
        convert(tmp_path / "old", tmp_path / "new", to=Native(tp=1))
    assert not (tmp_path / "new").exists()
