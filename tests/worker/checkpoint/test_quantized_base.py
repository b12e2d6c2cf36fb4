"""Weights in 4 bits: folders that bitsandbytes wrote, and the base that a QLoRA adapter was trained
on, both as bitsandbytes unpacks them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from smtrain.core.errors import CheckpointError, ConfigError
from smtrain.core.model.quantized import is_quantized
from smtrain.core.model.shape import ModelShape
from smtrain.worker.checkpoint import dtypes, nf4
from smtrain.worker.checkpoint.adapter import QUANTIZED_KEY
from smtrain.worker.checkpoint.convert import convert
from smtrain.worker.checkpoint.huggingface.folder import HFSource
from smtrain.worker.checkpoint.targets import HuggingFace
from tests.worker.checkpoint.test_adapter import peft_adapter
from tests.worker.engine import cases

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
CONFIG = cases.config("llama", hidden_size=80, head_dim=20, intermediate_size=96)
"""Rows are no multiple of a block of 64."""
NAME = "model.layers.0.mlp.down_proj.weight"


def by_bitsandbytes(values: torch.Tensor, kind: str, nested: bool) -> tuple[torch.Tensor, Any]:
    packed, state = nf4.functional().quantize_4bit(
        values, blocksize=64, compress_statistics=nested, quant_type=kind
    )
    return packed, state


def unpacked(packed: torch.Tensor, state: Any) -> torch.Tensor:
    """The numbers of bitsandbytes, whose CPU kernel misreads rows without a whole number of
    blocks.
    """
    shape, state.shape = state.shape, torch.Size([1, state.shape.numel()])
    made: torch.Tensor = nf4.functional().dequantize_4bit(packed, state).view(shape)
    state.shape = shape
    return made


def linears(config: dict[str, Any]) -> set[str]:
    return {spec.name for spec in ModelShape.from_config(config).specs if is_quantized(spec)}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    cases.transformers_model(CONFIG).bfloat16().save_pretrained(folder)
    return folder


def write_4bit(
    base: Path, folder: Path, kind: str = "nf4", nested: bool = True, storage: Any = torch.uint8
) -> dict[str, torch.Tensor]:
    """Save a model as transformers saves one in 4 bits; returns the numbers that it stands for."""
    folder.mkdir()
    stored, numbers = dict[str, torch.Tensor](), load_file(base / "model.safetensors")
    for name, values in list(numbers.items()):
        if name not in linears(CONFIG):
            stored[name] = values
            continue
        packed, state = by_bitsandbytes(values, kind, nested)
        numbers[name] = unpacked(packed, state)
        stored[name] = packed.flatten().view(storage)[:, None]
        for part, tensor in state.as_dict(packed=True).items():
            stored[f"{name}.{part}"] = tensor
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": kind}
    described = json.loads((base / "config.json").read_text()) | {"quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(described))
    return numbers


@pytest.mark.parametrize(
    ("kind", "nested", "storage"),
    [
        ("nf4", True, torch.uint8),
        ("nf4", False, torch.uint8),
        ("fp4", True, torch.uint8),
        ("nf4", True, torch.bfloat16),
    ],
)
def test_a_folder_in_4_bits_reads_as_bitsandbytes_unpacks_it(
    kind: str, nested: bool, storage: Any, base: Path, tmp_path: Path
) -> None:
    numbers = write_4bit(base, tmp_path / "small", kind, nested, storage)
    source = HFSource(tmp_path / "small")
    assert {*source.widened} == linears(CONFIG)
    assert "quantization_config" not in source.config
    for name in source.names():
        assert torch.equal(source.read(name), numbers[name]), name
    # A slice of columns, as a tensor-parallel rank reads it.
    assert torch.equal(source.read(NAME, 1, 33, 70), numbers[NAME][:, 33:70])


def test_it_becomes_a_plain_model(base: Path, tmp_path: Path) -> None:
    numbers, said = write_4bit(base, tmp_path / "small"), list[str]()
    convert(tmp_path / "small", tmp_path / "plain", to=HuggingFace(), say=said.append)
    assert f"{len(linears(CONFIG))} tensors are bitsandbytes' 4 bits in" in said[0]
    written = load_file(tmp_path / "plain/model.safetensors")
    assert all(torch.equal(written[name], numbers[name]) for name in numbers)
    assert "quantization_config" not in json.loads((tmp_path / "plain/config.json").read_text())


@pytest.mark.parametrize("part", ["", ".absmax", ".nested_quant_map"])
def test_a_part_that_is_missing_is_named(part: str, base: Path, tmp_path: Path) -> None:
    write_4bit(base, tmp_path / "small")
    file = tmp_path / "small/model.safetensors"
    stored = load_file(file)
    del stored[NAME + part]
    save_file(stored, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=rf"and no {NAME}{part}; copy the file"):
        HFSource(tmp_path / "small")


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (b"not JSON", "no state that bitsandbytes wrote"),
        (b'{"quant_type": "int4"}', "of a format that smtrain does not read"),
        (
            b'{"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [80, 95],'
            b' "nested_blocksize": 256, "nested_offset": 0.1}',
            r"do not fit \[80, 95\] in blocks of 64",
        ),
    ],
)
def test_a_state_of_other_numbers_is_refused(
    state: bytes, reason: str, base: Path, tmp_path: Path
) -> None:
    write_4bit(base, tmp_path / "small")
    file = tmp_path / "small/model.safetensors"
    stored = load_file(file)
    stored[f"{NAME}.quant_state.bitsandbytes__nf4"] = torch.tensor(list(state), dtype=torch.uint8)
    save_file(stored, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=reason):
        HFSource(tmp_path / "small")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> HFSource:
    """A base in fp32, of which a training in bf16 quantises the rounded weights."""
    folder = tmp_path_factory.mktemp("wide")
    cases.transformers_model(CONFIG).save_pretrained(folder)
    return HFSource(folder)


@given(data=st.data())
def test_any_window_of_a_dequantised_base_is_that_of_the_whole(
    data: st.DataObject, wide: HFSource
) -> None:
    source = nf4.DequantizedSource(wide, "bf16")
    name = data.draw(st.sampled_from(sorted(source.names())))
    bounds = [
        sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))
        for n in source.shape(name)
    ]
    window = source.window(name, [(a, b) for a, b in bounds])
    values = wide.read(name)
    if name in linears(CONFIG):
        values = unpacked(*by_bitsandbytes(values.bfloat16(), "nf4", True)).float()
    assert torch.equal(window, values[tuple(slice(a, b) for a, b in bounds)])


def mark_quantized(adapter: Path, precision: str) -> None:
    """Let an adapter say that it was trained on a base in NF4, as ours do."""
    file = adapter / "adapter_model.safetensors"
    save_file(load_file(file), file, {"format": "pt", QUANTIZED_KEY: f"nf4 {precision}"})


def test_a_merge_is_peft_s_into_the_dequantised_base(base: Path, tmp_path: Path) -> None:
    numbers = write_4bit(base, tmp_path / "small")
    convert(tmp_path / "small", tmp_path / "plain", to=HuggingFace())
    merged = peft_adapter(tmp_path / "plain", tmp_path / "adapter").merge_and_unload().state_dict()
    mark_quantized(tmp_path / "adapter", "bf16")
    said: list[str] = []
    convert(
        base,
        tmp_path / "ours",
        to=HuggingFace(),
        merge_adapter=tmp_path / "adapter",
        say=said.append,
    )
    written = load_file(tmp_path / "ours/model.safetensors")
    for name in numbers:
        torch.testing.assert_close(written[name], merged[name], rtol=2**-7, atol=2**-9)
    assert "in NF4, unpacked again, as it was trained (bf16)" in said[0]
    # The original weights, on demand, with a measure of what that changes.
    convert(
        base,
        tmp_path / "original",
        to=HuggingFace(),
        merge_adapter=tmp_path / "adapter",
        merge_base="original",
        say=said.append,
    )
    originals = load_file(tmp_path / "original/model.safetensors")
    assert not torch.equal(originals[NAME], written[NAME])
    (sentence,) = [line for line in said if "merged into the original weights" in line]
    values = load_file(base / "model.safetensors")[NAME]
    deviation = float((numbers[NAME] - values).float().norm() / values.float().norm())
    assert float(sentence.partition("differ by ")[2].partition("%")[0]) == pytest.approx(
        100 * deviation, rel=0.2
    )


def test_an_adapter_of_another_tool_is_merged_as_the_user_says(base: Path, tmp_path: Path) -> None:
    peft_adapter(base, tmp_path / "adapter")
    for merge_base in (None, "dequantized", "original"):
        convert(
            base,
            tmp_path / str(merge_base),
            to=HuggingFace(),
            merge_adapter=tmp_path / "adapter",
            merge_base=merge_base,  # type: ignore[arg-type]
        )
    written = {
        folder: load_file(tmp_path / folder / "model.safetensors")[NAME]
        for folder in ("None", "dequantized", "original")
    }
    assert torch.equal(written["None"], written["original"])
    assert not torch.equal(written["None"], written["dequantized"])


def test_a_choice_without_an_adapter_is_refused(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="merge_base: chooses weights for merge_adapter"):
        convert(base, tmp_path / "out", to=HuggingFace(), merge_base="original")
    with pytest.raises(ConfigError, match="merge_base"):
        convert(
            base,
            tmp_path / "out",
            to=HuggingFace(),
            merge_adapter=base,
            merge_base="nf4",  # type: ignore[arg-type]
        )


def test_a_format_of_a_later_version_is_refused(base: Path, tmp_path: Path) -> None:
    peft_adapter(base, tmp_path / "adapter")
    file = tmp_path / "adapter/adapter_model.safetensors"
    save_file(load_file(file), file, {"format": "pt", QUANTIZED_KEY: "nf2 bf16"})
    with pytest.raises(CheckpointError, match="trained on a base in nf2 bf16, which this version"):
        convert(base, tmp_path / "out", to=HuggingFace(), merge_adapter=tmp_path / "adapter")


def test_a_model_in_memory_gets_the_same_weights(base: Path) -> None:
    model = cases.transformers_model(CONFIG).bfloat16()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    nf4.quantize_linears(model, ModelShape.from_config(CONFIG), "bf16")
    for name, parameter in model.named_parameters():
        expected = before[name]
        if name in linears(CONFIG):
            expected = unpacked(*by_bitsandbytes(expected, "nf4", True))
        assert torch.equal(parameter, expected), name
    assert dtypes.torch_type("bf16") == torch.bfloat16


def test_a_digest_tells_the_4_bit_form_of_a_base(base: Path, wide: HFSource) -> None:
    source = HFSource(base)
    digest = nf4.quantized_digest(source, "bf16")
    assert re.fullmatch(r"bitsandbytes \S+ [0-9a-f]{64}", digest)
    # Numbers that bf16 rounds are quantised as those of the bf16 folder.
    assert nf4.quantized_digest(wide, "bf16") == digest
    assert nf4.quantized_digest(wide, "fp32") != digest
