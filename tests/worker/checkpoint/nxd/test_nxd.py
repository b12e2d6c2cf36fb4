from __future__ import annotations

import json
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from smtrain.core.errors import CheckpointError
from smtrain.core.model.layout import Layout
from smtrain.core.model.shape import ModelShape
from smtrain.worker.checkpoint.convert import convert
from smtrain.worker.checkpoint.huggingface.folder import HFSource
from smtrain.worker.checkpoint.huggingface.writer import write_hf
from smtrain.worker.checkpoint.nxd.reader import NxDSource
from smtrain.worker.checkpoint.nxd.writer import write_nxd
from smtrain.worker.checkpoint.storage import place
from smtrain.worker.checkpoint.targets import HuggingFace, Nxd
from smtrain.worker.checkpoint.torch_files import zip as torchzip
from tests.tiers import examples
from tests.worker.checkpoint.folders import LLAMA, hf_folder, random_weights, same, weights_of

GOLDEN = Path(__file__).resolve().parents[5] / "shared" / "golden" / "nxd"
needs_golden = pytest.mark.skipif(
    not GOLDEN.is_dir(), reason=f"{GOLDEN} is missing: it is next to the checkout"
)

CONVERTED = [
    ("sep_tp2pp2", "llama_kv4", {"tp": 2, "pp": 2}),
    ("sep_tp2pp2_5layers", "llama_kv4_5layers", {"tp": 2, "pp": 2}),
    ("sep_tp2pp2_tied", "llama_kv4_tied", {"tp": 2, "pp": 2}),
    ("qkv_kv2_tp2pp2", "llama_kv2", {"tp": 2, "pp": 2, "qkv": "grouped"}),
    ("qkv_kv2_tp4pp2_m2", "llama_kv2", {"tp": 4, "pp": 2}),
    ("qkv16_kv4_tp8pp2_m2", "llama_kv4_16heads", {"tp": 8, "pp": 2}),
    ("fuse_kv4_tp4pp2", "llama_kv4", {"tp": 4, "pp": 2, "qkv": "fused"}),
    ("fuse_mha_tp8pp1", "llama_mha", {"tp": 8, "pp": 1, "qkv": "fused"}),
    ("sep_tp2pp2_xser", "llama_kv4", {"tp": 2, "pp": 2}),  # its tensors are in the .pt all the same
    ("qkv_kv4_tp4pp2_xser", "llama_kv4", {"tp": 4, "pp": 2, "qkv": "grouped"}),
]


def shards(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {p.name: torch.load(p, weights_only=True) for p in sorted(folder.glob("model/*.pt"))}


@needs_golden
@pytest.mark.parametrize(("name", "model", "how"), CONVERTED)
def test_equals_the_reference_converter_both_ways(
    tmp_path: Path, name: str, model: str, how: dict[str, Any]
) -> None:
    whole = HFSource(GOLDEN / "hf" / model)
    assert same(weights_of(NxDSource(GOLDEN / "convert" / name, whole.config)), weights_of(whole))
    write_nxd(whole, tmp_path / "out", Nxd(**how))
    ours, theirs = shards(tmp_path / "out"), shards(GOLDEN / "convert" / name)
    assert ours.keys() == theirs.keys()
    assert all(same(ours[file], theirs[file]) for file in ours)


@needs_golden
@pytest.mark.parametrize(
    "name", ["tp2pp2", "tp2pp1", "tp2dp2_zero1", "tp2pp2_qkv_kv2", "tp2pp2_5layers", "tp2pp2_xser"]
)
def test_reads_what_training_saved(name: str) -> None:
    meta = json.loads((GOLDEN / "train" / name / "meta.json").read_text())
    config = json.loads((GOLDEN / meta["hf_config"]).read_text())
    source = NxDSource(GOLDEN / "train" / name / meta["tag"], config)
    assert (source.tp, source.pp) == (meta["tp"], meta["pp"])
    assert same(weights_of(source), load_file(GOLDEN / "train" / name / "full_hf.safetensors"))


@needs_golden
def test_reads_the_older_folder_layout() -> None:
    config = json.loads((GOLDEN / "hf/llama_kv4/config.json").read_text())
    old = NxDSource(GOLDEN / "train/legacy_v1_tp2pp2", config)
    assert same(weights_of(old), load_file(GOLDEN / "train/tp2pp2/full_hf.safetensors"))


@needs_golden
@pytest.mark.parametrize("folder", ["nxd_tp2/step_0", "legacy_tp2"])
def test_gpt_neox_as_the_examples_save_it(tmp_path: Path, folder: str) -> None:
    config = json.loads((GOLDEN / "neox/config.json").read_text())
    full = load_file(GOLDEN / "neox/full_hf_426.safetensors")
    source = NxDSource(GOLDEN / "neox" / folder, config)
    wanted = {spec.name for spec in ModelShape.from_config(config).specs}
    assert same(
        weights_of(source), {name: tensor for name, tensor in full.items() if name in wanted}
    )
    write_nxd(source, tmp_path / "out", Nxd(tp=2, pp=1))
    for file, ours in shards(tmp_path / "out").items():
        theirs = torch.load(GOLDEN / "neox/nxd_tp2/step_0/model" / file, weights_only=True)
        assert same(ours, {name: tensor for name, tensor in theirs.items() if name in wanted})


@st.composite
def models(draw: st.DrawFn) -> tuple[dict[str, Any], int, int, dict[str, Any]]:
    """A config of any family, a mesh that cuts it, and a form of NxD's."""
    family = draw(st.sampled_from(["llama", "qwen2", "qwen3", "mistral", "gpt_neox"]))
    tp, pp = draw(st.sampled_from([1, 2, 3, 4])), draw(st.integers(1, 3))
    kv = draw(st.sampled_from([k for k in (1, 2, 3, 4, 6) if k % tp == 0 or tp % k == 0]))
    copies = max(1, tp // kv) * draw(st.sampled_from([1, 1, 2]))
    heads = kv * copies * draw(st.integers(1, 2))
    head_dim = 2 * draw(st.integers(1, 2))
    config: dict[str, Any] = {
        "model_type": family,
        "hidden_size": heads * head_dim,
        "intermediate_size": tp * draw(st.integers(1, 4)),
        "num_hidden_layers": (layers := pp + draw(st.integers(0, 2))),
        "num_attention_heads": heads,
        "vocab_size": draw(st.integers(tp, 23)),
        "tie_word_embeddings": family != "gpt_neox" and draw(st.booleans()),
    }
    if family != "gpt_neox":
        config |= {"num_key_value_heads": kv, "head_dim": head_dim}
        config["hidden_size"] += draw(st.sampled_from([0, 2]))  # not always heads x head_dim
    if family == "llama":
        config |= {"attention_bias": draw(st.booleans()), "mlp_bias": draw(st.booleans())}
    how: dict[str, Any] = {
        "qkv": draw(st.sampled_from([None, "grouped", "fused"])),
        "kv_order": draw(st.sampled_from(["tiled", "grouped"])),
        "form": draw(st.sampled_from(["pt", "xser"])),
    }
    if draw(st.booleans()):
        cuts = (
            st.lists(st.integers(0, layers - 2), min_size=pp - 1, max_size=pp - 1, unique=True)
            if pp > 1
            else st.just([])
        )
        how["cuts"] = sorted(draw(cuts))
    if family != "gpt_neox" and draw(st.booleans()):
        how["kv_multiplier"] = copies
    return config, tp, pp, how


@given(models(), models().map(lambda m: m[1:3]), st.sampled_from([torch.float32, torch.bfloat16]))
@settings(deadline=None, max_examples=examples(35))
def test_there_and_back_is_the_identity(
    tmp_path_factory: pytest.TempPathFactory, model: Any, other: tuple[int, int], dtype: torch.dtype
) -> None:
    config, tp, pp, how = model
    root = tmp_path_factory.mktemp("trip")
    original = random_weights(config, dtype)
    source = HFSource(hf_folder(root / "hf", config, dtype))
    write_nxd(source, root / "a", Nxd(tp=tp, pp=pp, **how))
    a = NxDSource(root / "a")
    assert (a.tp, a.pp) == (tp, pp)
    write_hf(a, root / "back")
    assert same(load_file(root / "back" / "model.safetensors"), original)
    if not ModelShape.from_config(config).mesh_faults(*other):
        convert(root / "a", root / "b", to=Nxd(tp=other[0], pp=other[1]))
        assert same(weights_of(NxDSource(root / "b")), original)


@given(st.data())
@settings(deadline=None, max_examples=examples(20))
def test_any_slice_of_any_parameter(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    config, tp, pp, how = data.draw(models())
    root = tmp_path_factory.mktemp("slice")
    original = random_weights(config)
    write_nxd(HFSource(hf_folder(root / "hf", config)), root / "nxd", Nxd(tp=tp, pp=pp, **how))
    source = NxDSource(root / "nxd")
    for name in data.draw(st.lists(st.sampled_from(source.names()), min_size=1, max_size=4)):
        dim = data.draw(st.integers(0, original[name].dim() - 1))
        start = data.draw(st.integers(0, original[name].shape[dim] - 1))
        stop = data.draw(st.integers(start + 1, original[name].shape[dim]))
        assert torch.equal(
            source.read(name, dim, start, stop), original[name].narrow(dim, start, stop - start)
        )
        assert source.shape(name) == tuple(original[name].shape)


def test_each_shard_has_the_size_of_its_part_alone(tmp_path: Path) -> None:
    convert(hf_folder(tmp_path / "hf", LLAMA), tmp_path / "out", to=Nxd(tp=2, pp=2))
    for tensors in shards(tmp_path / "out").values():
        assert all(
            t.untyped_storage().nbytes() == t.nbytes and t.is_contiguous() for t in tensors.values()
        )


@pytest.fixture
def converted(tmp_path: Path) -> Path:
    convert(hf_folder(tmp_path / "hf", LLAMA), tmp_path / "nxd", to=Nxd(tp=2, pp=2))
    return tmp_path / "nxd"


FIRST = "model/dp_rank_00_tp_rank_00_pp_rank_00.pt"


def change(folder: Path, file: str, how: Any) -> None:
    tensors = torch.load(folder / file, weights_only=True)
    how(tensors)
    torch.save(tensors, folder / file)
    (folder / "manifest.json").unlink(missing_ok=True)


def test_copies_that_differ_are_refused(converted: Path, tmp_path: Path) -> None:
    change(converted, FIRST, lambda t: t["model.layers.0.input_layernorm.weight"].add_(1))
    with pytest.raises(CheckpointError, match="differs from the copy that another tp rank holds"):
        weights_of(NxDSource(converted))
    write_nxd(HFSource(tmp_path / "hf"), tmp_path / "kv", Nxd(tp=4, pp=1))
    file = FIRST.replace("tp_rank_00", "tp_rank_02")  # tiled: ranks 0 and 2 share a head
    change(tmp_path / "kv", file, lambda t: t["model.layers.2.self_attn.qkv_proj.weight_v"].add_(1))
    with pytest.raises(CheckpointError, match="weight_v differs from the copy"):
        weights_of(NxDSource(tmp_path / "kv"))
    tied = hf_folder(tmp_path / "tied", {**LLAMA, "tie_word_embeddings": True})
    convert(tied, tmp_path / "t", to=Nxd(tp=2, pp=2))
    change(
        tmp_path / "t",
        FIRST.replace("pp_rank_00", "pp_rank_01"),
        lambda t: t["lm_head.weight"].add_(1),
    )
    with pytest.raises(
        CheckpointError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"
    ):
        weights_of(NxDSource(tmp_path / "t"))


def test_the_wrong_chip_order_is_noticed(tmp_path: Path) -> None:
    config = {**LLAMA, "num_attention_heads": 8}
    write_nxd(
        HFSource(hf_folder(tmp_path / "hf", config)),
        tmp_path / "out",
        Nxd(tp=4, pp=1, kv_order="grouped"),
    )
    assert same(weights_of(NxDSource(tmp_path / "out")), random_weights(config))
    (tmp_path / "out" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="kv_order"):
        weights_of(NxDSource(tmp_path / "out"))
    assert same(weights_of(NxDSource(tmp_path / "out", kv_order="grouped")), random_weights(config))


def test_what_does_not_fit_the_config_is_refused(converted: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    config = json.loads((converted / "config.json").read_text())
    with pytest.raises(
        CheckpointError,
        match=r"embed_tokens\.weight on tp rank 0 is \[20, 16\] instead of \[22, 16\]",
    ):
        NxDSource(converted, {**config, "vocab_size": 44})
    with pytest.raises(CheckpointError, match=r"lacks the parameter model\.layers\.3\."):
        NxDSource(converted, {**config, "num_hidden_layers": 4})
    with pytest.raises(CheckpointError, match=r"holds model\.layers\.2\..*no parameter"):
        NxDSource(converted, {**config, "num_hidden_layers": 2})
    change(converted, FIRST.replace("tp_rank_00", "tp_rank_01"), lambda t: t.pop(name))
    with pytest.raises(CheckpointError, match=r"down_proj\.weight on tp rank 1 is missing"):
        NxDSource(converted)


def test_a_folder_that_is_not_whole_is_refused(converted: Path) -> None:
    data = (converted / FIRST).read_bytes()
    (converted / FIRST).write_bytes(data[:-10])
    with pytest.raises(CheckpointError, match=f"{len(data) - 10} bytes instead of {len(data)}"):
        NxDSource(converted)
    (converted / FIRST).write_bytes(data)
    manifest = (converted / "manifest.json").read_text()
    (converted / "manifest.json").write_text(manifest.replace('"tp": 2', '"tp": 4'))
    with pytest.raises(CheckpointError, match="its manifest says otherwise"):
        NxDSource(converted)
    (converted / "manifest.json").unlink()
    (converted / FIRST).unlink()
    with pytest.raises(CheckpointError, match="lacks the shard of tp rank 0, pp rank 0"):
        NxDSource(converted)
    (converted / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        NxDSource(converted)


class Hostile:
    """An object whose pickle creates the file if it is loaded carelessly."""

    def __init__(self, makes: Path) -> None:
        self.makes = makes

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.makes),)


def test_hostile_and_cut_files_are_errors_and_leave_nothing(
    converted: Path, tmp_path: Path
) -> None:
    (converted / "manifest.json").unlink()
    good = (converted / FIRST).read_bytes()
    hostile = {"model.norm.weight": Hostile(tmp_path / "was-here")}
    torch.save(hostile, tmp_path / "hostile.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    bad = {f"cut at {n}": good[:n] for n in (0, 1, 100, len(good) // 2, len(good) - 1)}
    bad |= {"text": b"no checkpoint at all", "pickle": pickle.dumps(hostile)}
    bad |= {f: (tmp_path / f).read_bytes() for f in ("hostile.pt", "list.pt")}
    for name, data in bad.items():
        (converted / FIRST).write_bytes(data)
        with pytest.raises(CheckpointError, match=r"pp_rank_00\.pt"):
            convert(converted, tmp_path / "out", to=Nxd(tp=1, pp=1))
        assert not (tmp_path / "out").exists(), name
    assert not (tmp_path / "was-here").exists()
    torch.load(tmp_path / "hostile.pt", weights_only=False)  # it would have worked
    assert (tmp_path / "was-here").exists()
    assert not list(tmp_path.glob(".*"))


@needs_golden
def test_xser_is_written_as_training_saves_it(tmp_path: Path) -> None:
    golden = GOLDEN / "train/tp2pp2_xser"
    config = json.loads((GOLDEN / "hf/llama_kv4/config.json").read_text())
    write_nxd(NxDSource(golden / "step_3", config), tmp_path / "out", Nxd(tp=2, pp=2, form="xser"))
    assert same(weights_of(NxDSource(tmp_path / "out")), load_file(golden / "full_hf.safetensors"))
    for file in sorted((golden / "step_3/model").glob("*_00.pt")) + sorted(
        (golden / "step_3/model").glob("*_01.pt")
    ):
        ours = tmp_path / "out/model" / file.name
        assert same(referred(ours), referred(file))
        assert (
            torch.load(f"{ours}.info.pt", weights_only=True).keys()
            == torch.load(f"{file}.info.pt").keys()
        )


def referred(shard: Path) -> dict[str, torch.Tensor]:
    """An xser shard as torch_xla loads it."""
    names = torchzip.load(place(shard.parent), shard.name)
    return {
        n: torch.load(f"{shard}.tensors/tensor_{r.tid}.pt", weights_only=True)
        for n, r in names.items()
    }


def test_a_checkpoint_of_master_weights_alone_is_named_as_such(tmp_path: Path) -> None:
    write_nxd(
        HFSource(hf_folder(tmp_path / "hf", LLAMA)), tmp_path / "out", Nxd(tp=2, pp=1, form="xser")
    )
    (tmp_path / "out/manifest.json").unlink()
    for file in tmp_path.glob("out/model/*.tensors/*"):
        file.unlink()
    with pytest.raises(CheckpointError, match="avoid_saving_lower_precision_weights"):
        NxDSource(tmp_path / "out")


def test_the_older_xser_layout_is_read(tmp_path: Path) -> None:
    write_nxd(
        HFSource(hf_folder(tmp_path / "hf", LLAMA)), tmp_path / "new", Nxd(tp=2, pp=1, form="xser")
    )
    (tmp_path / "old").mkdir()
    for t in range(2):
        new, old = (
            tmp_path / f"new/model/dp_rank_00_tp_rank_0{t}_pp_rank_00.pt",
            tmp_path / "old/model",
        )
        old.mkdir(exist_ok=True)
        os.rename(new, old / f"tp_rank_0{t}_pp_rank_00")
        os.rename(f"{new}.tensors", old / f"tp_rank_0{t}_pp_rank_00.tensors")
    assert same(weights_of(NxDSource(tmp_path / "old", LLAMA)), random_weights(LLAMA))


def test_a_shard_is_an_ordinary_zip_and_maps_into_memory(converted: Path) -> None:
    for file in converted.glob("model/*.pt"):
        with zipfile.ZipFile(file) as archive:
            assert archive.testzip() is None
        mapped, read = (torch.load(file, weights_only=True, mmap=mmap) for mmap in (True, False))
        assert same(mapped, read)
        assert all(t.data_ptr() % 64 == 0 for t in mapped.values())


def test_files_that_changed_places_are_noticed(converted: Path) -> None:
    (converted / "manifest.json").unlink()
    other = converted / FIRST.replace("tp_rank_00", "tp_rank_01")
    a, b = (converted / FIRST).read_bytes(), other.read_bytes()
    (converted / FIRST).write_bytes(b)
    other.write_bytes(a)
    with pytest.raises(CheckpointError, match="it was saved as dp_rank_00_tp_rank_01_pp_rank_00"):
        NxDSource(converted)


def test_flipped_weights_are_noticed(converted: Path, tmp_path: Path) -> None:
    data = bytearray((converted / FIRST).read_bytes())
    at = data.index(
        random_weights(LLAMA)["model.layers.0.self_attn.q_proj.weight"][0].numpy().tobytes()
    )
    data[at + 5] ^= 64
    (converted / FIRST).write_bytes(data)
    with pytest.raises(CheckpointError, match=r"q_proj\.weight is not what was written"):
        convert(converted, tmp_path / "out", to=HuggingFace())
    assert not (tmp_path / "out").exists()


def test_forms_that_cannot_hold_the_heads_are_refused(tmp_path: Path) -> None:
    source = HFSource(hf_folder(tmp_path / "hf", LLAMA))
    with pytest.raises(CheckpointError, match="take the grouped form"):
        write_nxd(source, tmp_path / "out", Nxd(tp=4, pp=1, qkv="separate"))
    with pytest.raises(CheckpointError, match="take the fused form"):
        write_nxd(source, tmp_path / "out", Nxd(tp=2, pp=1, qkv="fused_mha"))
    mha = {**LLAMA, "num_key_value_heads": 4}
    write_nxd(
        HFSource(hf_folder(tmp_path / "mha", mha)),
        tmp_path / "out",
        Nxd(tp=2, pp=2, qkv="fused_mha"),
    )
    assert same(weights_of(NxDSource(tmp_path / "out")), random_weights(mha))
    rank = shards(tmp_path / "out")["dp_rank_00_tp_rank_01_pp_rank_00.pt"]
    q = random_weights(mha)["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(rank["model.layers.0.self_attn.qkv_proj.weight"][:8], q[8:])


def test_a_layout_is_the_same_one_as_the_engines(converted: Path) -> None:
    """Each rank's shard holds the part that the engine's layout gives that rank."""
    layout, weights = Layout(ModelShape.from_config(LLAMA), 2, 2), random_weights(LLAMA)
    name = "model.layers.2.self_attn.o_proj.weight"
    (start, stop), *rest = layout.shard(name, 1).ranges
    assert not rest
    rank = shards(converted)["dp_rank_00_tp_rank_01_pp_rank_01.pt"]
    assert torch.equal(rank[name], weights[name][:, start:stop])
