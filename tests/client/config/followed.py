"""Configs that a check refuses, and each way out that the sentence names.

A way is the part of the sentence that says what to do. Most are read: `set a.b: c`, `leave it out`,
`N would do`, `take ml.type`. With another part the case says what a user would write who follows
it.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from smtrain.core.protocol.container import PREPARED_FORMAT
from tests.conftest import LLAMA

OUT: Any = object()
"""The value of an omitted key."""
Values = Mapping[str, Any]
Change = Values | Callable[["Desk"], object]
Way = str | tuple[str, Change]
"""A part of the sentence that says what to do; with the change if it cannot be read from the words.
"""


@dataclass
class Desk:
    """A folder with the inputs of one config."""

    folder: Path
    raw: dict[str, Any]

    def do(self, change: Change) -> None:
        """Apply a change: values by key, in which `@` stands for the folder, or a function."""
        if callable(change):
            change(self)
            return
        for key, value in change.items():
            *sections, last = key.split(".")
            here = self.raw
            for section in sections:
                if not isinstance(here.get(section), dict):
                    here[section] = {}
                here = here[section]
            if value is OUT:
                here.pop(last, None)
            else:
                here[last] = json.loads(json.dumps(value).replace("@", str(self.folder)))

    def copy(self, folder: Path) -> Desk:
        """The same config with a copy of the inputs, so that each way starts from the fault."""
        shutil.copytree(self.folder, folder, symlinks=True)
        text = json.dumps(self.raw).replace(str(self.folder), str(folder))
        return Desk(folder, json.loads(text))


def read(way: str, key: str) -> Values:
    """The values that a part of a sentence about `key` says to set."""
    if found := re.fullmatch(r"set (\w+\.[\w.]+)(?:: | to )(\S+)", way):
        return {found[1]: yaml.safe_load(found[2])}
    if found := re.fullmatch(r"set it to (\S+)", way):
        return {key: yaml.safe_load(found[1])}
    if found := re.fullmatch(r"(?:take|choose) (ml\.\S+)", way):
        return {"compute.instance_type": found[1], "compute.processes_per_instance": OUT}
    if found_all := re.findall(r"\b(tp|pp|dp|cp|ep|train\.\w+) = (\d+)", way):
        return {
            name if "." in name else f"parallel.{name}": int(number) for name, number in found_all
        }
    if found := re.fullmatch(r"(?:\w+ = )?(\d+)(?: s)?(?: or| would do)", way):
        return {key: int(found[1])}
    if re.fullmatch(r"leave it out.*", way):
        return {key: OUT}
    raise ValueError(f"{way!r} cannot be read; name its change")


@dataclass(frozen=True)
class Case:
    """A change that breaks a config, a part of the sentence, and the ways out that the sentence
    names.
    """

    base: str
    broken: Change
    says: str
    ways: tuple[Way, ...]
    more: bool = False
    """Whether other faults are told with it."""


def case(base: str, broken: Change, says: str, *ways: Way, more: bool = False) -> Case:
    return Case(base, broken, says, ways, more)


def write(name: str, content: str | bytes | Mapping[str, Any]) -> Callable[[Desk], None]:
    """Write a file of the folder; a mapping as JSON."""

    def do(desk: Desk) -> None:
        path = desk.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = content if isinstance(content, (bytes, str)) else json.dumps(content)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())

    return do


def both(*changes: Change) -> Callable[[Desk], object]:
    return lambda desk: [desk.do(change) for change in changes]


def shape(**values: Any) -> Callable[[Desk], None]:
    """Change the model's config.json; None takes a key out."""

    def do(desk: Desk) -> None:
        path = desk.folder / "model/config.json"
        described = {**json.loads(path.read_text()), **values}
        path.write_text(json.dumps({k: v for k, v in described.items() if v is not OUT}))

    return do


def rename(old: str, new: str) -> Callable[[Desk], object]:
    return lambda desk: (desk.folder / old).rename(desk.folder / new)


def remove(name: str) -> Callable[[Desk], None]:
    return lambda desk: (desk.folder / name).unlink()


def prepared(**changes: Any) -> Callable[[Desk], object]:
    """Write a prepared dataset's manifest for the base config, and name it."""
    manifest = {
        "format_version": PREPARED_FORMAT,
        "seq_len": 32,
        "samples": 9,
        "vocab_size": 512,
        "eos_id": 0,
        "objective": "pretrain",
        "files": {"tokens.bin": {"bytes": 4}},
    }
    manifest.update(changes)
    return both(
        {"data": {"prepared": "@/prepared"}},
        write("prepared/tokens.bin", b"abcd"),
        write("prepared/manifest.json", {k: v for k, v in manifest.items() if v is not OUT}),
    )


GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 512,
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 8,
    "n_positions": 256,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "float32",
}
NEOX = {
    "model_type": "gpt_neox",
    "architectures": ["GPTNeoXForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "max_position_embeddings": 256,
    "use_parallel_residual": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "torch_dtype": "float32",
}
MIXTRAL = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
OSS = {**MIXTRAL, "model_type": "gpt_oss", "router_aux_loss_coef": 0.9}
QWEN2_MOE = {**MIXTRAL, "model_type": "qwen2_moe", "num_experts": 4, "moe_intermediate_size": 32}
QWEN35 = {
    "model_type": "qwen3_5_text", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 16,
    "max_position_embeddings": 256, "torch_dtype": "float32",
}  # fmt: skip
BOX = {"devices": 4, "memory_gib": 24, "tflops": 80, "host_memory_gib": 256}
TEMPLATE = write("model/chat_template.jinja", "{{ messages }}")
WEIGHTS = b"\x08\0\0\0\0\0\0\0{}      "
PLAN = "arn:aws:sagemaker:us-east-1:123456789012:training-plan/p"
OWN = "123456789012.dkr.ecr.us-east-1.amazonaws.com/own:1"

BASES: dict[str, dict[str, Any]] = {
    "local": {
        "parallel": {"tp": 2, "pp": 2},
        "compute": {
            "instance_type": "ml.trn1.2xlarge",
            "instance_count": 2,
            "processes_per_instance": 2,
        },
    },
    "nxd": {
        "parallel": {"tp": 2, "pp": 2},
        "train": {"engine": "nxd"},
        "compute": {
            "instance_type": "ml.trn1.2xlarge",
            "instance_count": 2,
            "processes_per_instance": 2,
        },
    },
    "trn1": {"target": "aws", "compute": {"instance_type": "ml.trn1.32xlarge"}},
    "trn2": {"target": "aws", "compute": {"instance_type": "ml.trn2.48xlarge", "image": OWN}},
    "gpu": {"target": "aws", "compute": {"instance_type": "ml.p5.48xlarge"}},
    "pai": {
        "target": "pai-dlc",
        "machines": {"box": BOX},
        "compute": {"instance_type": "box", "image": "registry/train:1"},
        "pai": {
            "region": "cn-beijing",
            "storage": "oss://bucket/smtrain",
            "ecs_spec": "ecs.gn7e-c16g1.16xlarge",
        },
    },
    "kubernetes": {
        "target": "kubernetes",
        "machines": {"box": BOX},
        "compute": {"instance_type": "box", "image": "registry/train:1"},
        "kubernetes": {"storage": "s3://bucket/smtrain", "resources": {"nvidia.com/gpu": "4"}},
    },
    "slurm": {
        "target": "slurm",
        "cluster": {"shared": "/fsx/smtrain"},
        "compute": {"instance_type": "ml.p5.48xlarge"},
    },
}
"""Configs with nothing wrong, on top of a model and text on this machine."""


def begun(folder: Path, base: str) -> Desk:
    """A config of a kind with its inputs, and nothing wrong with it."""
    desk = Desk(folder, {})
    described = json.dumps(LLAMA)
    desk.do(
        both(write("model/config.json", described), write("model/tokenizer.json", "{}"), TEMPLATE)
    )
    desk.do(
        both(
            write("model/model.safetensors", WEIGHTS), write("text/a.jsonl", '{"text": "hello"}\n')
        )
    )
    desk.do({"name": "tiny", "model.path": "@/model", "data.path": "@/text"})
    aws = {"role": "arn:aws:iam::123456789012:role/training", "region": "us-east-1"}
    usual: dict[str, Any] = {
        "train": {"steps": 4, "seq_len": 32, "precision": "fp32"},
        "output": {"s3_uri": "s3://bucket/runs"},
        "compute": aws,
    }
    for section, values in (*usual.items(), *copy.deepcopy(BASES[base]).items()):
        whole = isinstance(values, str) or section not in desk.raw
        desk.raw[section] = values if whole else {**desk.raw[section], **values}
    return desk
