"""Folders of torch.distributed.checkpoint, written by torchtitan 0.3.0 and by torch's FSDP2 as
accelerate 1.15 calls it, on two ranks each, and folders of ours read by torch.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from smtrain.core.errors import CheckpointError
from smtrain.worker.checkpoint.convert import convert
from smtrain.worker.checkpoint.dcp.names import RowOrder
from smtrain.worker.checkpoint.dcp.reader import DcpSource
from smtrain.worker.checkpoint.dcp.state import DcpState
from smtrain.worker.checkpoint.dcp.stored_tensors import StoredTensors, TensorOfParts
from smtrain.worker.checkpoint.dtypes import FP32, tensor
from smtrain.worker.checkpoint.native.reader import NativeSource, StateReader
from smtrain.worker.checkpoint.native.writer import write_native
from smtrain.worker.checkpoint.open import newest_checkpoint, open_weights
from smtrain.worker.checkpoint.storage import place
from smtrain.worker.checkpoint.summary import inspect, verify
from smtrain.worker.checkpoint.targets import Dcp, HuggingFace, Native
from smtrain.worker.checkpoint.training_state import KINDS, TrainingState
from tests.worker.checkpoint.folders import LLAMA, hf_folder, random_weights, same, weights_of

GOLDEN = Path(__file__).parents[1] / "golden" / "dcp"
EXPECTED = json.loads((GOLDEN / "sha256.json").read_text())
"""Writer -> kind of state -> parameter -> digest, by torchtitan's own adapter and by FSDP2."""
CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 12,
    "tie_word_embeddings": False,
}
QWEN3 = {**LLAMA, "model_type": "qwen3", "head_dim": 4, "tie_word_embeddings": True}
SETTINGS = {
    "lr": 1e-3,
    "min_lr": 1e-4,
    "schedule": "linear",
    "warmup_steps": 2,
    "steps": 11,
    "betas": [0.9, 0.95],
    "eps": 1e-8,
    "weight_decay": 0.1,
}


@pytest.fixture(params=["torchtitan", "accelerate"])
def writer(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def folder(tmp_path: Path, writer: str) -> Path:
    """A folder of each real writer, with config.json next to it."""
    return unpack(tmp_path / "from", writer)


def unpack(folder: Path, writer: str) -> Path:
    with tarfile.open(GOLDEN / f"{writer}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def digest(values: torch.Tensor) -> str:
    return hashlib.sha256(values.contiguous().numpy().tobytes()).hexdigest()[:16]


def state_of(source: Any) -> TrainingState:
    state = (
        StateReader.present(source)
        if isinstance(source, NativeSource)
        else DcpState.present(source)
    )
    assert state is not None
    return state


def moments(state: TrainingState, names: list[str]) -> dict[str, dict[str, str]]:
    return {
        kind: {name: digest(tensor(state.window(kind, name).copy(), FP32)) for name in names}
        for kind in KINDS
    }


def test_weights_and_state_of_the_real_writers_are_read_bit_for_bit(
    folder: Path, writer: str
) -> None:
    source = open_weights(folder)
    state = state_of(source)
    state.check()
    for name in source.names():
        source.check(name)
    assert moments(state, source.names()) == EXPECTED[writer]
    assert (state.step, state.optimizer_steps, state.precision) == (1, 1, "fp32")


def test_a_native_checkpoint_of_any_cut_gets_all_of_it_and_gives_it_back(
    tmp_path: Path, folder: Path, writer: str
) -> None:
    convert(folder, tmp_path / "run", to=Native(tp=1))
    native = open_weights(tmp_path / "run")
    assert isinstance(native, NativeSource)
    state = state_of(native)
    assert moments(state, native.names()) == EXPECTED[writer]
    assert native.manifest.state == {"imported": True, "spans": [[1, 0]], "samples": 0}
    with pytest.raises(CheckpointError, match=r"no record of the learning rate.*convert it to hf"):
        convert(tmp_path / "run", tmp_path / "dcp", to=Dcp())
    recorded = with_settings(tmp_path / "recorded", folder)
    for form in ("torchtitan", "accelerate"):
        convert(recorded, tmp_path / form, to=Dcp(form=form))
        again = open_weights(tmp_path / form)
        assert moments(state_of(again), again.names()) == EXPECTED[writer]
        assert verify(tmp_path / form) == len(again.names())


class Recorded(DcpState):
    """A state with the settings that a run of ours records."""

    @property
    def loop(self) -> dict[str, Any]:
        return {"settings": SETTINGS, "samples": 3, "seq_len": 5}


def with_settings(target: Path, folder: Path) -> Path:
    source = open_weights(folder)
    assert isinstance(source, DcpSource)
    index = source.optimizer_index()
    assert index is not None
    write_native(source, target, Native(), Recorded(source, index))
    return target


def test_torch_reads_ours_as_the_folder_that_torchtitan_wrote(tmp_path: Path) -> None:
    theirs = unpack(tmp_path / "from", "torchtitan")
    convert(with_settings(tmp_path / "run", theirs), tmp_path / "ours", to=Dcp())
    loaded = []
    for number, at in enumerate((theirs / "step-1", tmp_path / "ours")):
        dcp_to_torch_save(at, tmp_path / f"{number}.pt")
        loaded.append(torch.load(tmp_path / f"{number}.pt", weights_only=False))
    old, new = loaded
    assert set(old) - set(new) == {"dataloader"}
    assert set(old["optimizer"]) == set(new["optimizer"])
    flat = {name: value for name, value in old.items() if isinstance(value, torch.Tensor)}
    flat |= {
        name: value for name, value in old["optimizer"].items() if isinstance(value, torch.Tensor)
    }
    assert len(flat) == 12 + 3 * 10
    for name, value in flat.items():
        mine = new.get(name, new["optimizer"].get(name))
        assert mine.dtype == value.dtype
        assert torch.equal(mine, value), name
    assert new["train_state"] == {"step": 1, "ntokens_seen": 15}
    assert new["lr_scheduler"] == {"last_epoch": 1}
    groups = {
        name.rsplit(".", 1)[-1]: value
        for name, value in new["optimizer"].items()
        if name.startswith("param_groups.tok_embeddings.")
    }
    assert (groups["lr"], groups["initial_lr"], groups["weight_decay"]) == (1e-3, 1e-3, 0.1)
    assert groups["betas"] == (0.9, 0.95)
    assert new["optimizer"]["param_groups.norm.weight.weight_decay"] == 0.0


def test_torch_reads_the_form_of_accelerate(tmp_path: Path) -> None:
    theirs = unpack(tmp_path / "from", "accelerate")
    convert(with_settings(tmp_path / "run", theirs), tmp_path / "ours", to=Dcp(form="accelerate"))
    for name, key in (("pytorch_model_fsdp_0", "model"), ("optimizer_0", "optimizer")):
        loaded = []
        for number, at in enumerate((theirs, tmp_path / "ours")):
            dcp_to_torch_save(at / name, tmp_path / f"{number}.pt")
            loaded.append(torch.load(tmp_path / f"{number}.pt", weights_only=False)[key])
        old, new = loaded
        if key == "model":
            assert same(old, new)
            continue
        assert {n: sorted(state) for n, state in old["state"].items()} == {
            n: sorted(state) for n, state in new["state"].items()
        }
        for parameter, state in old["state"].items():
            assert same(state, new["state"][parameter])
        assert [sorted(group["params"]) for group in old["param_groups"]] == [
            sorted(group["params"]) for group in new["param_groups"]
        ]
        assert all(
            set(a) <= set(b) for a, b in zip(*(s["param_groups"] for s in loaded), strict=True)
        )


@pytest.mark.parametrize("config", [LLAMA, {**LLAMA, "tie_word_embeddings": True}, QWEN3])
@pytest.mark.parametrize("form", ["torchtitan", "accelerate"])
def test_a_model_comes_back_from_either_form(
    tmp_path: Path, config: dict[str, Any], form: Any
) -> None:
    whole = random_weights(config, torch.bfloat16)
    folder = hf_folder(tmp_path / "hf", config, torch.bfloat16)
    convert(folder, tmp_path / "dcp", to=Dcp(form=form))
    source = open_weights(tmp_path / "dcp")
    assert same(weights_of(source), whole)
    convert(tmp_path / "dcp", tmp_path / "back", to=HuggingFace())
    assert same(weights_of(open_weights(tmp_path / "back")), whole)
    at = tmp_path / "dcp" / ("" if form == "torchtitan" else "pytorch_model_fsdp_0")
    dcp_to_torch_save(at, tmp_path / "all.pt")
    loaded = torch.load(tmp_path / "all.pt", weights_only=False)
    names = set(loaded if form == "torchtitan" else loaded["model"])
    # A tied head is listed too, as loaders ask for it.
    assert "lm_head.weight" in names
    assert len(names) == len(whole) + bool(config["tie_word_embeddings"])
    facts = inspect(tmp_path / "dcp")
    assert (facts.kind, facts.hashes, facts.step) == ("dcp", True, None)


def test_the_rows_of_heads_are_found_in_any_window(tmp_path: Path) -> None:
    source = open_weights(hf_folder(tmp_path / "hf", LLAMA))
    name = "model.layers.0.self_attn.q_proj.weight"
    order = RowOrder((2, 0, 3, 1), 4, interleaved=True)
    tensors = StoredTensors(source, None, {"q": TensorOfParts(((name, order),))})
    whole = tensors.bits("q", [(0, 16), (0, 16)])
    plain = source.bits(name, [(0, 16), (0, 16)])
    # Head h of the parameter is stored as head order.heads[h], its halves alternating.
    assert (whole[order.rows(0, 16)] == plain).all()
    for start in range(16):
        for stop in range(start + 1, 17):
            part = tensors.bits("q", [(start, stop), (3, 9)])
            assert (part == whole[start:stop, 3:9]).all()


def test_the_newest_step_is_opened(tmp_path: Path) -> None:
    folder = unpack(tmp_path / "run", "torchtitan")
    (folder / "step-1").rename(folder / "step-9")
    (folder / "step-10").mkdir()
    for file in (folder / "step-9").iterdir():
        (folder / "step-10" / file.name).write_bytes(file.read_bytes())
    source = open_weights(folder)
    assert str(source.location).endswith("step-10")
    assert inspect(folder).step == 10
    assert newest_checkpoint(place(folder)) is None


def _with_key(folder: Path, old: str, new: str) -> None:
    """Rename a key of `.metadata`; both names have the same length."""
    assert len(old) == len(new)
    for file in folder.rglob(".metadata"):
        file.write_bytes(file.read_bytes().replace(old.encode(), new.encode()))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "layers.0.ffn_norm.weight",
            "layers.0.bad_norm.weight",
            "holds layers.0.bad_norm.weight, which is not read of a llama model of torchtitan;"
            " export it in torchtitan",
        ),
        ("tok_embeddings.weight", "decoder.layers.weight", "no metadata.json, which Megatron"),
    ],
)
def test_unknown_names_are_refused(tmp_path: Path, old: str, new: str, said: str) -> None:
    folder = unpack(tmp_path / "from", "torchtitan")
    _with_key(folder, old, new)
    with pytest.raises(CheckpointError, match=said):
        open_weights(folder)


def test_the_state_of_another_optimizer_is_refused_and_its_weights_are_read(
    tmp_path: Path,
) -> None:
    folder = unpack(tmp_path / "from", "accelerate")
    _with_key(folder, "weight.exp_avg_sq", "weight.moment_max")
    with pytest.raises(
        CheckpointError, match=r"optimizer state moment_max, which AdamW does not have.*to hf"
    ):
        convert(folder, tmp_path / "run", to=Native())
    convert(folder, tmp_path / "hf", to=HuggingFace())
    assert len(weights_of(open_weights(tmp_path / "hf"))) == len(EXPECTED["accelerate"]["master"])


def test_damage_is_found(tmp_path: Path, folder: Path) -> None:
    file = next(path for path in sorted(folder.rglob("__1_0.distcp")) if path.stat().st_size)
    data = bytearray(file.read_bytes())
    file.write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match=r"missing or cut short|is not a complete torch"):
        convert(folder, tmp_path / "run", to=Native())
    file.unlink()
    with pytest.raises(CheckpointError, match="missing or cut short; copy this file again"):
        convert(folder, tmp_path / "run", to=Native())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("config", "form", "said"),
    [
        (
            {**LLAMA, "model_type": "mistral", "sliding_window": None},
            "torchtitan",
            "mistral models",
        ),
        ({**LLAMA, "attention_bias": True}, "torchtitan", "q_proj.bias, which torchtitan's llama"),
    ],
)
def test_models_without_the_form_are_refused(
    tmp_path: Path, config: dict[str, Any], form: Any, said: str
) -> None:
    folder = hf_folder(tmp_path / "hf", config)
    with pytest.raises(CheckpointError, match=said):
        convert(folder, tmp_path / "dcp", to=Dcp(form=form))
    assert not (tmp_path / "dcp").exists()


@pytest.mark.full
@pytest.mark.parametrize("is_tied", [False, True])
def test_accelerate_and_we_read_what_the_other_wrote(tmp_path: Path, is_tied: bool) -> None:
    """FSDP2 on two ranks, saved and loaded by accelerate's own functions."""
    pytest.importorskip("accelerate")

    def run(action: str, folder: Path) -> dict[str, Any]:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        script = Path(__file__).with_name("fsdp2.py")
        subprocess.run(
            [*command, "--nproc-per-node", "2", str(script), action, str(folder)], check=True
        )
        numbers: dict[str, Any] = torch.load(folder / "numbers.pt")
        return numbers

    (tmp_path / "theirs").mkdir()
    config = {**LLAMA, "tie_word_embeddings": is_tied}
    (tmp_path / "theirs/config.json").write_text(json.dumps(config))
    old = run("save", tmp_path / "theirs")
    source = open_weights(tmp_path / "theirs")
    assert state_of(source).optimizer_steps == 2
    for name, weight in weights_of(source).items():
        assert torch.equal(weight, old["model"][name])
        for moment in ("exp_avg", "exp_avg_sq"):
            bits = state_of(source).window(moment, name)
            assert torch.equal(tensor(bits.copy(), FP32), old["state"][name][moment])
    run_folder = with_settings(tmp_path / "run", tmp_path / "theirs")
    convert(run_folder, tmp_path / "ours", to=Dcp(form="accelerate"))
    new = run("load", tmp_path / "ours")
    assert same(old["model"], new["model"])
    assert old["state"].keys() == new["state"].keys()
    assert all(same(values, new["state"][name]) for name, values in old["state"].items())
    # Step 3 of a linear schedule with 2 steps of warm-up.
    assert new["lr"] == pytest.approx(1e-3)
