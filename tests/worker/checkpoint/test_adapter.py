"""Adapters as files: peft loads ours, merges equal peft's, and anything but plain LoRA is refused
by name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from smtrain.core.errors import CheckpointError, ConfigError
from smtrain.worker.checkpoint.convert import convert
from smtrain.worker.checkpoint.targets import HuggingFace, Nxd, Peft
from tests.worker.engine import cases

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::UserWarning"
)  # peft's and transformers'
CONFIG = cases.CONFIGS["llama-kv4"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model in bf16, as transformers saves it."""
    folder = tmp_path_factory.mktemp("base")
    cases.transformers_model(CONFIG).bfloat16().save_pretrained(folder)
    return folder


def peft_adapter(base: Path, folder: Path, **settings: Any) -> Any:
    """Save an adapter with large factors by peft; returns peft's model."""
    from peft import LoraConfig, get_peft_model  # two seconds that most workers need not spend

    values = {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "down_proj"],
        "task_type": "CAUSAL_LM",
        **settings,
    }
    torch.manual_seed(1)
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base, dtype="auto"), LoraConfig(**values)
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.05)
    model.save_pretrained(str(folder))
    return model


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_rslora": True, "target_modules": "all-linear"},
        {
            "rank_pattern": {"down_proj": 2, r"layers\.1\.self_attn\.q_proj": 6},
            "alpha_pattern": {"q_proj": 3},
        },
        {"rank_pattern": {"down_proj": 2}, "alpha_pattern": {"down_proj": 5}, "use_rslora": True},
        {"target_modules": ["lm_head", "v_proj"]},
    ],
    ids=["plain", "rslora", "patterns", "patterns-rslora", "head"],
)
def test_merging_is_peft_s(settings: dict[str, Any], base: Path, tmp_path: Path) -> None:
    theirs = peft_adapter(base, tmp_path / "adapter", **settings).merge_and_unload().state_dict()
    changed = convert(
        base, tmp_path / "merged", to=HuggingFace(), merge_adapter=tmp_path / "adapter"
    )
    ours, before = (
        load_file(tmp_path / "merged" / "model.safetensors"),
        load_file(base / "model.safetensors"),
    )
    differing = [name for name in ours if not torch.equal(ours[name], before[name])]
    assert changed is not None
    assert (
        changed.tensors
        == len(differing)
        == sum("lora_A" in n for n in load_file(tmp_path / "adapter" / "adapter_model.safetensors"))
    )
    largest = max(float((ours[n].float() - before[n].float()).abs().max()) for n in differing)
    assert changed.largest == largest > 0
    for name, values in ours.items():
        assert values.dtype == torch.bfloat16
        there = theirs[name].float()
        one_rounding = (
            there.abs() * 2**-7 + 1e-30
        )  # peft rounds twice: the delta may be rounded before it is added
        assert ((values.float() - there).abs() <= one_rounding).all(), name


def test_in_fp32_merging_is_peft_s_to_the_last_bits(base: Path, tmp_path: Path) -> None:
    convert(base, tmp_path / "wide", to=HuggingFace(dtype="fp32"))
    theirs = peft_adapter(tmp_path / "wide", tmp_path / "adapter").merge_and_unload().state_dict()
    convert(
        tmp_path / "wide", tmp_path / "merged", to=HuggingFace(), merge_adapter=tmp_path / "adapter"
    )
    for name, values in load_file(tmp_path / "merged" / "model.safetensors").items():
        torch.testing.assert_close(values, theirs[name], rtol=1e-6, atol=1e-7)


def test_merging_again_changes_nothing_and_an_interrupted_one_goes_on(
    base: Path, tmp_path: Path
) -> None:
    peft_adapter(base, tmp_path / "adapter")
    once = convert(base, tmp_path / "merged", to=HuggingFace(), merge_adapter=tmp_path / "adapter")
    file = tmp_path / "merged" / "model.safetensors"
    before = (file.stat().st_mtime_ns, file.read_bytes())
    assert (
        convert(base, tmp_path / "merged", to=HuggingFace(), merge_adapter=tmp_path / "adapter")
        == once
    )
    assert (file.stat().st_mtime_ns, file.read_bytes()) == before


def test_a_merge_can_be_cut_for_nxd(base: Path, tmp_path: Path) -> None:
    peft_adapter(base, tmp_path / "adapter")
    convert(base, tmp_path / "merged", to=HuggingFace(), merge_adapter=tmp_path / "adapter")
    convert(base, tmp_path / "shards", to=Nxd(tp=2), merge_adapter=tmp_path / "adapter")
    convert(tmp_path / "shards", tmp_path / "back", to=HuggingFace(), config=base)
    ours, back = (load_file(tmp_path / name / "model.safetensors") for name in ("merged", "back"))
    assert all(torch.equal(ours[name], back[name]) for name in ours)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("peft_type", "IA3", "IA3"),
        ("use_dora", True, "DoRA"),
        ("bias", "all", "biases"),
        ("lora_bias", True, "biases"),
        ("modules_to_save", ["lm_head"], "modules_to_save"),
        ("init_lora_weights", "pissa", "'pissa'"),
        ("init_lora_weights", "pissa_niter_4", "pissa_niter_4"),
        ("init_lora_weights", "olora", "olora"),
        ("fan_in_fan_out", True, "fan_in_fan_out"),
        ("r", 0, "above 0"),
        ("r", 8, "rank 4"),
        ("alpha_pattern", {"(": 1}, "alpha_pattern"),
    ],
)
def test_what_is_no_plain_lora_is_refused_by_name(
    key: str, value: Any, says: str, base: Path, tmp_path: Path
) -> None:
    peft_adapter(base, tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    with pytest.raises(CheckpointError) as error:
        convert(base, tmp_path / "merged", to=HuggingFace(), merge_adapter=tmp_path / "adapter")
    assert says in str(error.value)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda f: save_file({n: t * 0 for n, t in load_file(f).items()}, f), "changes no weight"),
        (lambda f: save_file({n: t / 0 for n, t in load_file(f).items()}, f), "not finite"),
        (
            lambda f: save_file({n: t for n, t in load_file(f).items() if "lora_A" in n}, f),
            "only one factor",
        ),
        (
            lambda f: save_file(
                {**load_file(f), "base_model.model.lm_head.weight": torch.ones(2, 2)}, f
            ),
            "no factor",
        ),
        (
            lambda f: save_file(
                {n.replace("q_proj", "c_attn"): t for n, t in load_file(f).items()}, f
            ),
            "another model",
        ),
        (lambda f: f.rename(f.with_suffix(".bin")), "rename it to adapter_model.safetensors"),
        (lambda f: f.unlink(), "copy that too"),
        (lambda f: f.write_bytes(f.read_bytes()[:500]), "not a complete safetensors"),
        (lambda f: (f.parent / "adapter_config.json").write_text("{"), "is not JSON"),
    ],
)
def test_a_damaged_adapter_is_told_in_a_sentence(
    change: Any, says: str, base: Path, tmp_path: Path
) -> None:
    peft_adapter(base, tmp_path / "adapter")
    change(tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(CheckpointError) as error:
        convert(base, tmp_path / "merged", to=HuggingFace(), merge_adapter=tmp_path / "adapter")
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("before", ["", "module.", "_orig_mod."])
def test_the_form_of_older_versions_and_names_with_words_in_front_are_read(
    before: str, base: Path, tmp_path: Path
) -> None:
    peft_adapter(base, tmp_path / "adapter")
    convert(base, tmp_path / "expected", to=HuggingFace(), merge_adapter=tmp_path / "adapter")
    held = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    torch.save(
        {before + name: tensor for name, tensor in held.items()},
        tmp_path / "adapter" / "adapter_model.bin",
    )
    convert(
        base,
        tmp_path / "merged",
        to=HuggingFace(),
        merge_adapter=tmp_path / "adapter" / "adapter_config.json",
    )
    ours, theirs = (
        load_file(tmp_path / name / "model.safetensors") for name in ("merged", "expected")
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_an_adapter_is_no_model_and_a_model_no_adapter(base: Path, tmp_path: Path) -> None:
    peft_adapter(base, tmp_path / "adapter")
    with pytest.raises(CheckpointError, match="--merge-adapter"):
        convert(tmp_path / "adapter", tmp_path / "x", to=HuggingFace())
    with pytest.raises(CheckpointError, match="holds no adapter"):
        convert(base, tmp_path / "x", to=HuggingFace(), merge_adapter=base)
    with pytest.raises(CheckpointError, match="run with train"):
        convert(base, tmp_path / "x", to=Peft())
    with pytest.raises(ConfigError, match="to: peft"):
        convert(base, tmp_path / "x", to=Peft(), merge_adapter=tmp_path / "adapter")


def test_a_shared_head_is_not_merged(tmp_path: Path) -> None:
    config = cases.CONFIGS["qwen2"]
    cases.transformers_model(config).save_pretrained(tmp_path / "base")
    peft_adapter(tmp_path / "base", tmp_path / "adapter", target_modules=["lm_head"])
    with pytest.raises(CheckpointError, match="shares with its embedding"):
        convert(
            tmp_path / "base",
            tmp_path / "merged",
            to=HuggingFace(),
            merge_adapter=tmp_path / "adapter",
        )
