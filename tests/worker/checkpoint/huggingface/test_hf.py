from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from smtrain.core.errors import CheckpointError
from smtrain.worker.checkpoint.huggingface.folder import HFSource
from smtrain.worker.checkpoint.huggingface.writer import write_hf
from tests.worker.checkpoint.folders import LLAMA, NEOX, hf_folder, weights_of


@pytest.mark.parametrize("limit", [10**9, 4000, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_written_weights_are_those_that_were_read(
    tmp_path: Path, limit: int, dtype: torch.dtype
) -> None:
    folder = hf_folder(tmp_path / "model", LLAMA, dtype)
    write_hf(HFSource(folder), tmp_path / "out", folder, max_shard_size=limit)
    files = sorted(tmp_path.glob("out/*.safetensors"))
    assert (len(files) > 1) == (limit < 10**9)
    held = {name: tensor for file in files for name, tensor in load_file(file).items()}
    original = load_file(folder / "model.safetensors")
    assert held.keys() == original.keys()
    assert all(
        torch.equal(held[name], original[name]) and held[name].dtype == dtype for name in held
    )
    assert weights_of(HFSource(tmp_path / "out")).keys() == original.keys()
    if limit == 4000:
        assert (
            max(
                sum(t.nbytes for t in load_file(f).values()) for f in files if len(load_file(f)) > 1
            )
            <= limit
        )


def test_slices_are_read_along_any_dimension(tmp_path: Path) -> None:
    source = HFSource(hf_folder(tmp_path / "model", LLAMA))
    name = "model.layers.1.self_attn.o_proj.weight"
    whole = source.read(name)
    assert source.shape(name) == tuple(whole.shape)
    assert torch.equal(source.read(name, 0, 3, 9), whole[3:9])
    assert torch.equal(source.read(name, 1, 5), whole[:, 5:])


def test_companions_go_along_and_the_config_names_the_type(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "model", LLAMA, torch.bfloat16)
    for name in ("tokenizer.json", "generation_config.json", "LICENSE.txt", "notes.md"):
        (folder / name).write_text(name)
    config = {**LLAMA, "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config))
    write_hf(HFSource(folder), tmp_path / "out", folder)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(
        [
            *(
                "LICENSE.txt",
                "config.json",
                "generation_config.json",
                "manifest.json",
                "model.safetensors",
                "notes.md",
            ),
            "tokenizer.json",
        ]
    )
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {
        **config,
        "dtype": "bfloat16",
        "head_dim": 4,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    }


def test_computed_buffers_a_tied_head_and_a_renamed_head_are_understood(tmp_path: Path) -> None:
    tied = hf_folder(tmp_path / "tied", {**LLAMA, "tie_word_embeddings": True})
    held = load_file(tied / "model.safetensors")
    held["lm_head.weight"] = held["model.embed_tokens.weight"].clone()
    held["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    save_file(held, tied / "model.safetensors")
    assert "lm_head.weight" not in HFSource(tied).names()
    neox = hf_folder(tmp_path / "neox", NEOX)
    held = load_file(neox / "model.safetensors")
    head = held.pop("embed_out.weight").clone()  # not a view of the overwritten file
    save_file({**held, "lm_head.weight": head}, neox / "model.safetensors")
    assert torch.equal(HFSource(neox).read("embed_out.weight"), head)


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    held = load_file(folder / "model.safetensors")
    change(held)
    save_file(held, folder / "model.safetensors")


def test_weights_that_are_not_of_the_config_are_refused(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "a", LLAMA)
    rewrite(folder, lambda held: held.pop("model.norm.weight"))
    with pytest.raises(CheckpointError, match=r"lacks the parameter model\.norm\.weight"):
        HFSource(folder)
    folder = hf_folder(tmp_path / "b", LLAMA)
    rewrite(folder, lambda held: held.update(extra=torch.ones(1)))
    with pytest.raises(
        CheckpointError, match="holds extra, which is no parameter of a llama model"
    ):
        HFSource(folder)
    folder = hf_folder(tmp_path / "c", LLAMA)
    (folder / "config.json").write_text(json.dumps({**LLAMA, "vocab_size": 99}))
    with pytest.raises(
        CheckpointError, match=r"embed_tokens\.weight has shape .* from the same model"
    ):
        HFSource(folder)
    folder = hf_folder(tmp_path / "d", LLAMA)
    rewrite(
        folder,
        lambda held: held.update({"model.norm.weight": held["model.norm.weight"].to(torch.int32)}),
    )
    with pytest.raises(CheckpointError, match="has the type I32"):
        HFSource(folder).dtype("model.norm.weight")


@pytest.mark.parametrize("keep", [0, 4, 60, 900, -1])
def test_a_cut_file_is_named(tmp_path: Path, keep: int) -> None:
    folder = hf_folder(tmp_path / "model", LLAMA)
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:keep])
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors is (empty|not a complete safetensors file)"
    ):
        HFSource(folder)


@pytest.mark.parametrize(
    "file", ["../model.safetensors", "/etc/passwd", "sub/x.safetensors", 7, ["x"]]
)
def test_an_index_that_points_elsewhere_is_refused(tmp_path: Path, file: object) -> None:
    folder = hf_folder(tmp_path / "in" / "model", LLAMA)
    (folder / "model.safetensors").rename(tmp_path / "in" / "model.safetensors")
    index = {"weight_map": {"model.norm.weight": file}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="not a file in its folder"):
        HFSource(folder)


def test_a_broken_index_and_a_missing_shard_are_named(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "model", LLAMA)
    write_hf(HFSource(folder), tmp_path / "out", max_shard_size=4000)
    index = tmp_path / "out" / "model.safetensors.index.json"
    whole = json.loads(index.read_text())
    first, second = sorted(set(whole["weight_map"].values()))[:2]
    moved = {name: second if file == first else file for name, file in whole["weight_map"].items()}
    index.write_text(json.dumps({"weight_map": moved}))
    with pytest.raises(CheckpointError, match=r"which model\.safetensors\.index\.json says it has"):
        HFSource(tmp_path / "out")
    index.write_text(json.dumps(whole))
    (tmp_path / "out" / first).unlink()
    with pytest.raises(CheckpointError, match=f"{first} is missing; copy this file into it"):
        HFSource(tmp_path / "out")
    (tmp_path / "out" / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=rf"lacks 1 of its 9 files of weights \({first}\)"):
        HFSource(tmp_path / "out")
    for content in ("", "[]", "{}", '{"weight_map": 3}', "[" * 100_000):
        index.write_text(content)
        with pytest.raises(
            CheckpointError, match=r"is (empty|not JSON|not a JSON object|not an index)"
        ):
            HFSource(tmp_path / "out")


def test_a_header_that_names_a_tensor_twice_is_refused(tmp_path: Path) -> None:
    """Readers would take different ones of two entries."""
    folder = hf_folder(tmp_path / "hf", LLAMA)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].rstrip()
    name, about = next((k, v) for k, v in json.loads(header).items() if k != "__metadata__")
    twice = header[:-1] + b"," + json.dumps({name: about}).encode()[1:-1] + b"}"
    path.write_bytes(len(twice).to_bytes(8, "little") + twice + data[8 + length :])
    with pytest.raises(CheckpointError, match=rf"it has '{name}' twice"):
        HFSource(folder)


def test_a_config_of_a_model_that_cannot_be_is_refused_at_once(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "hf", LLAMA)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 10**9}))
    with pytest.raises(
        CheckpointError, match=r"num_hidden_layers = 1e\+09 .* more than 10,000 are in no model"
    ):
        HFSource(folder)
