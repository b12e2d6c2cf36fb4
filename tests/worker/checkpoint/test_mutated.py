"""Damaged and hostile inputs: a named error and no output, or, if the damage changes nothing, the
same weights.

$SMTRAIN_MUTATIONS asks for more of them than a test run has time for, $SMTRAIN_MUTATED for some
kinds of sources alone.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from smtrain.core.errors import SmtrainError
from smtrain.worker.checkpoint.convert import convert
from smtrain.worker.checkpoint.huggingface.folder import HFSource
from smtrain.worker.checkpoint.huggingface.writer import write_hf
from smtrain.worker.checkpoint.targets import Megatron, Native, NemoMegatron, Nxd, make_target
from tests.tiers import examples
from tests.worker.checkpoint.folders import LLAMA, hf_folder, random_weights, same, weights_of

COUNT = int(os.environ.get("SMTRAIN_MUTATIONS", examples(400)))
FIRST = int(os.environ.get("SMTRAIN_FIRST_MUTATION", "0"))
TARGETS: list[Any] = ["hf", "nxd", "native", "megatron", "nemo-megatron"]
KINDS = os.environ.get("SMTRAIN_MUTATED", "").split()
CONFIG = {**LLAMA, "num_hidden_layers": 2}


class Hostile:
    def __init__(self, makes: Path) -> None:
        self.makes = makes

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.makes),)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("whole")
    original = hf_folder(root / "original", CONFIG)
    write_hf(HFSource(original), root / "hf")
    write_hf(HFSource(original), root / "sharded", max_shard_size=6000)
    convert(original, root / "pt", to=Nxd(tp=2, pp=2))
    convert(original, root / "xser", to=Nxd(tp=2, form="xser"))
    convert(original, root / "foreign", to=Nxd(tp=4, pp=1, qkv="grouped"))
    (root / "foreign/manifest.json").unlink()
    convert(original, root / "native", to=Native(tp=2))
    convert(original, root / "megatron", to=Megatron(form="torch", tp=2, pp=2))
    convert(original, root / "torch_dist", to=Megatron())
    convert(original, root / "nnm", to=NemoMegatron(form="xser", tp=2))
    convert(original, root / "nnm215", to=NemoMegatron(release="2.15", tp=2, pp=2))
    old = root / "bin"
    old.mkdir()
    shutil.copy(original / "config.json", old)
    weights = random_weights(CONFIG)
    parts = [dict(list(weights.items())[n::2]) for n in range(2)]
    for n, part in enumerate(parts):
        torch.save(part, old / f"pytorch_model-{n + 1:05d}-of-00002.bin")
    where = {
        name: f"pytorch_model-{n + 1:05d}-of-00002.bin"
        for n, part in enumerate(parts)
        for name in part
    }
    (old / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": where}))
    return {
        p.name: p for p in root.iterdir() if p.name in KINDS or (not KINDS and p.name != "original")
    }


def cut(path: Path, rng: random.Random, _: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: rng.randrange(len(data))])


def flip(path: Path, rng: random.Random, _other: Path) -> None:
    data = bytearray(path.read_bytes())
    # half of them in heads and ends, which locate everything else
    where = [
        range(len(data)),
        range(min(2000, len(data))),
        range(max(0, len(data) - 2000), len(data)),
    ]
    for _ in range(rng.choice([1, 1, 1, 8])):
        data[rng.choice(rng.choice(where))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def grow(path: Path, rng: random.Random, _: Path) -> None:
    path.write_bytes(path.read_bytes() + rng.randbytes(rng.randrange(1, 100)))


def remove(path: Path, _rng: random.Random, _: Path) -> None:
    path.unlink()


def swap(path: Path, rng: random.Random, _: Path) -> None:
    other = rng.choice([p for p in path.parent.iterdir() if p.is_file()])
    a, b = path.read_bytes(), other.read_bytes()
    path.write_bytes(b)
    other.write_bytes(a)


def hostile(path: Path, rng: random.Random, canary: Path) -> None:
    evil: Any = rng.choice(
        [
            Hostile(canary),
            {"model.norm.weight": Hostile(canary)},
            {"model": {"a": torch.zeros(2), "b": Hostile(canary)}},
        ]
    )
    if rng.random() < 0.3 or path.name.startswith("."):  # torch takes no such name
        path.write_bytes(pickle.dumps(evil))
    else:
        torch.save(evil, path)


def retype(path: Path, rng: random.Random, _: Path) -> None:
    if path.suffix == ".pt" and ".tensors" not in str(path):
        try:
            held = torch.load(path, weights_only=True)
        except Exception:
            return flip(path, rng, path)
        name = rng.choice(sorted(held, key=str))
        if isinstance(held[name], torch.Tensor):
            change: list[Callable[[torch.Tensor], Any]] = [
                lambda t: t.half(),
                lambda t: t.to(torch.int32),
                lambda t: t[:-1].clone(),
                lambda t: t.to_sparse(),
                lambda t: t.tolist(),
            ]
            held[name] = rng.choice(change)(held[name])
        torch.save(held, path)
        return None
    return header(path, rng, path)


def header(path: Path, rng: random.Random, _: Path) -> None:
    if path.suffix != ".safetensors":
        return flip(path, rng, path)
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    content = json.loads(data[8 : 8 + length])
    name = rng.choice([n for n in content if n != "__metadata__"])
    key, value = rng.choice(
        [
            ("dtype", "F16"),
            ("dtype", "I32"),
            ("dtype", "F8_E4M3"),
            ("dtype", None),
            ("shape", [1 << 60, 1 << 60]),
            ("shape", [-1, 4]),
            ("shape", "wide"),
            ("data_offsets", [0, 1 << 62]),
            ("data_offsets", [-8, 8]),
            ("data_offsets", [1]),
        ]
    )
    content[name][key] = value
    text = json.dumps(content).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    return None


def index(path: Path, rng: random.Random, canary: Path) -> None:
    file = path.parent / "model.safetensors.index.json"
    if not file.exists():
        return flip(path, rng, canary)
    content = json.loads(file.read_text())
    name = rng.choice(sorted(content["weight_map"]))
    outside = path.parent.parent / "outside.safetensors"
    shutil.copy(sorted(path.parent.glob("*.safetensors"))[0], outside)
    content["weight_map"][name] = rng.choice(
        [
            "../outside.safetensors",
            str(outside),
            "/etc/passwd",
            "",
            ".",
            "..",
            3,
            None,
            ["a"],
            "a\0b",
            "none.safetensors",
        ]
    )
    file.write_text(json.dumps(content))
    return None


MUTATIONS = [cut, flip, flip, flip, grow, remove, swap, hostile, retype, header, index]


def test_a_named_error_or_the_same_weights(sources: dict[str, Path], tmp_path: Path) -> None:
    original = random_weights(CONFIG)
    canary, work, out = tmp_path / "was-here", tmp_path / "work", tmp_path / "out"
    tally: Counter[str] = Counter()
    for n in range(FIRST, FIRST + COUNT):
        rng = random.Random(n)
        kind = rng.choice(sorted(sources))
        mutate = rng.choice(MUTATIONS)
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(sources[kind], work / "source")
        files = sorted(p for p in work.rglob("*") if p.is_file() and p.stat().st_size)
        if kind in (
            "foreign",
            "bin",
        ):  # nothing vouches for a config.json that describes another model of the same shapes
            files = [p for p in files if p.name != "config.json"]
        path = rng.choice(files)
        mutate(path, rng, canary)
        case = f"{n}: {kind}, {mutate.__name__} of {path.relative_to(work)}"
        try:
            convert(
                work / "source", out, to=make_target(rng.choice(TARGETS), tp=rng.choice([1, 2]))
            )
        except SmtrainError as error:
            tally["error" if str(error).strip() else "nothing said"] += 1
            assert not out.exists(), case
        except Exception as error:
            raise AssertionError(f"{case}: {error!r}") from error
        else:
            from smtrain.worker.checkpoint.open import open_weights

            assert same(weights_of(open_weights(out)), original), case
            tally["harmless"] += 1
            shutil.rmtree(out)
        assert not canary.exists(), case
        assert sorted(p.name for p in tmp_path.iterdir()) == ["work"], case
    print(f"{COUNT} mutated inputs: {dict(tally)}")
    assert tally["error"] > COUNT // 2
    assert not tally["nothing said"]
