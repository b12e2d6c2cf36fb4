"""Conversion at the speed of the disk: HF -> NxD tp8 pp2 and back, compared with `cp -r` and with a
conversion in memory.

A bf16 Llama with grouped queries and random weights is written under --folder (default: a temporary
folder), and its shards for NxD. Every round runs our conversions to NxD and to Megatron's two
forms, our merge of a LoRA adapter, the shards back, and the two conversions written
straightforwardly with torch. Before each of ours a cp -r of its input is timed for comparison.
Every target is deleted at once, so that each run gets recently used pages: on a virtual machine
pages that were free for longer cost twice the time. The page cache should have space for three
times the model; otherwise the disk and the kernel's page reclaim are measured. Wall times are
medians of whole processes, with Python's start and our imports (`start_s`); memory is the peak
RssAnon of the converting process (without pages of files). Our conversions read each byte of the
source once and check its crc32. Dirty pages are flushed before every measurement, so that no run
pays for those of another. The first of --billions is compared with the conversion in memory too;
the keys of every other size end in it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SHAPES = {
    "0.3": {
        "hidden_size": 1024,
        "num_hidden_layers": 18,
        "num_attention_heads": 16,
        "intermediate_size": 2816,
    },
    "1.2": {
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "intermediate_size": 5632,
    },
    "2.4": {
        "hidden_size": 2560,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "intermediate_size": 7168,
    },
}
CONVERT_CODE = (
    "import sys; from smtrain import HuggingFace, Megatron, Nxd, convert; convert(sys.argv[1],"
    " sys.argv[2], {how})"
)
TO_NXD = CONVERT_CODE.format(how='to=Nxd(tp=8, pp=2, qkv="grouped")')
TO_TORCH_DIST = CONVERT_CODE.format(how="to=Megatron()")
TO_TORCH = CONVERT_CODE.format(how='to=Megatron(form="torch", tp=8, pp=2)')
TO_HF = CONVERT_CODE.format(how="to=HuggingFace()")
MERGE_CODE = (
    "import sys; from smtrain import HuggingFace, Megatron, Nxd, convert; convert(*sys.argv[1::2],"
    " {how})".format(how="to=HuggingFace(), merge_adapter=sys.argv[2]")
)
RANK = 16
IN_MEMORY_TO_NXD = """
import os, sys, json, torch
from safetensors.torch import load_file
from pathlib import Path
src, dst = map(Path, sys.argv[1:])
state = {}
for file in src.glob("*.safetensors"): state |= load_file(file)
c = json.loads((src / "config.json").read_text())
L, tp, pp = c["num_hidden_layers"], 8, 2
os.makedirs(dst / "model")
for p in range(pp):
    for t in range(tp):
        out = {}
        cut = lambda n, d: state[n].chunk(tp, d)[t].clone()
        if p == 0: out["model.embed_tokens.weight"] = cut("model.embed_tokens.weight", 0)
        for i in range(p * L // pp, (p + 1) * L // pp):
            b = f"model.layers.{i}."
            for x in "qkv": out[b + f"self_attn.qkv_proj.weight_{x}"] = cut(b + f"self_attn.{x}_proj.weight", 0)
            out[b + "self_attn.o_proj.weight"] = cut(b + "self_attn.o_proj.weight", 1)
            out[b + "mlp.gate_up_proj.weight"] = torch.cat([cut(b + f"mlp.{x}_proj.weight", 0) for x in ("gate", "up")])
            out[b + "mlp.down_proj.weight"] = cut(b + "mlp.down_proj.weight", 1)
            for x in ("input_layernorm", "post_attention_layernorm"): out[b + x + ".weight"] = state[b + x + ".weight"]
        if p == pp - 1:
            out["model.norm.weight"] = state["model.norm.weight"]
            out["lm_head.weight"] = cut("lm_head.weight", 0)
        torch.save(out, dst / f"model/dp_rank_00_tp_rank_{t:02d}_pp_rank_{p:02d}.pt")
"""
IN_MEMORY_TO_HF = """
import os, sys, json, torch
from safetensors.torch import save_file
from pathlib import Path
src, dst = map(Path, sys.argv[1:])
tp, pp, state = 8, 2, {}
for p in range(pp):
    ranks = [torch.load(src / f"model/dp_rank_00_tp_rank_{t:02d}_pp_rank_{p:02d}.pt", weights_only=True)
             for t in range(tp)]
    for n in ranks[0]:
        parts = [r[n] for r in ranks]
        if "norm" in n: state[n] = parts[0]
        elif "o_proj" in n or "down_proj" in n: state[n] = torch.cat(parts, 1)
        elif "gate_up" in n:
            halves = [x.chunk(2) for x in parts]
            for k, x in enumerate(("gate", "up")): state[n.replace("gate_up", x)] = torch.cat([h[k] for h in halves])
        elif "weight_" in n:
            state[n.replace("qkv_proj.weight_" + n[-1], n[-1] + "_proj.weight")] = torch.cat(parts)
        else: state[n] = torch.cat(parts)
os.makedirs(dst)
save_file(state, dst / "model.safetensors", {"format": "pt"})
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--billions", nargs="+", choices=SHAPES, default=["1.2", "0.3", "2.4"])
    parser.add_argument("--folder", type=Path, help="folder for the model and its conversions")
    options = parser.parse_args()
    result: dict[str, Any] = {}
    for size in options.billions:
        with tempfile.TemporaryDirectory(dir=options.folder, prefix="bench-convert-") as folder:
            figures = measure(
                Path(folder), size, options.rounds, memory=size == options.billions[0]
            )
        result |= (
            figures
            if size == options.billions[0]
            else {f"{k}_{size}b": v for k, v in figures.items()}
        )
    print(
        json.dumps(result) if options.json else "\n".join(f"{k:22} {v}" for k, v in result.items())
    )


def measure(folder: Path, size: str, rounds: int, memory: bool) -> dict[str, Any]:
    """One model's figures, with those of the conversion in memory or without."""
    model = folder / "hf"
    write_model(model, SHAPES[size])
    write_adapter(folder / "adapter", model)
    shards = folder / "nxd"
    run_timed([sys.executable, "-c", TO_NXD, str(model), str(shards)])
    cases = [
        ("to_nxd", TO_NXD, [model]),
        ("to_torch_dist", TO_TORCH_DIST, [model]),
        ("to_torch", TO_TORCH, [model]),
        ("merge", MERGE_CODE, [model, folder / "adapter"]),
        ("to_hf", TO_HF, [shards]),
    ]
    if memory:
        cases += [
            ("memory_to_nxd", IN_MEMORY_TO_NXD, [model]),
            ("memory_to_hf", IN_MEMORY_TO_HF, [shards]),
        ]
    runs: dict[str, list[Run]] = {}
    runs["start"] = [
        run_timed([sys.executable, "-c", "import smtrain.worker.checkpoint.convert"])
        for _ in range(3)
    ]
    written_bytes: dict[str, int] = {}

    def run(name: str, command: list[str]) -> None:
        target = folder / "target"
        os.sync()
        runs.setdefault(name, []).append(run_timed([*command, str(target)]))
        written_bytes[name] = sum(p.stat().st_size for p in target.rglob("*") if p.is_file())
        shutil.rmtree(target)

    for _ in range(rounds):
        for name, code, read in cases:
            if not name.startswith("memory"):
                run(f"cp_{name}", ["cp", "-r", str(read[0])])
            run(name, [sys.executable, "-c", code, *map(str, read)])
    seconds = {
        name: statistics.median(run.seconds for run in measured_runs)
        for name, measured_runs in runs.items()
    }
    # ratio to the cp just before: other load on the machine affects both alike
    ratios = {
        name: statistics.median(
            a.seconds / b.seconds for a, b in zip(runs[name], runs[f"cp_{name}"], strict=True)
        )
        for name in runs
        if f"cp_{name}" in runs
    }
    result: dict[str, Any] = {f"{name}_over_cp": round(value, 3) for name, value in ratios.items()}
    if memory:
        result["over_memory"] = round(
            max(seconds[n] / seconds[f"memory_{n}"] for n in ("to_nxd", "to_hf")), 3
        )
    result |= {"peak_mib": peak(runs, "to_nxd", "to_hf"), "merge_peak_mib": peak(runs, "merge")}
    result["megatron_peak_mib"] = peak(runs, "to_torch_dist", "to_torch")
    if memory:
        peaks = [run.peak_mib for name in ("to_nxd", "to_hf") for run in runs[f"memory_{name}"]]
        result["memory_peak_mib"] = round(max(peaks))
    result |= {f"{name}_s": round(value, 2) for name, value in seconds.items()}
    result |= {
        f"{n}_cpu_s": round(statistics.median(run.cpu for run in measured_runs), 2)
        for n, measured_runs in runs.items()
    }
    return result | {
        f"{name}_written_mb": round(value / 1e6) for name, value in written_bytes.items()
    }


def peak(runs: dict[str, list[Run]], *names: str) -> int:
    """The highest peak, in MiB."""
    return round(max(run.peak_mib for name in names for run in runs[name]))


class Run(NamedTuple):
    """One process, from its start to its end."""

    seconds: float
    cpu: float
    """User and system seconds."""
    peak_mib: float
    """MiB of RssAnon."""


def run_timed(command: list[str]) -> Run:
    """Run a process to its end."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    environment.pop(
        "PYTHONDONTWRITEBYTECODE", None
    )  # as an installed package: compiled once, not in every process
    began = time.perf_counter()
    process = subprocess.Popen(command, env=environment)
    peak, has_ended = 0.0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not has_ended.wait(0.02):
            try:
                text = Path(f"/proc/{process.pid}/status").read_text()
            except OSError:
                return
            sizes = [line.split()[1] for line in text.splitlines() if line.startswith("RssAnon")]
            peak = max(peak, int(sizes[0]) / 1024 if sizes else 0)

    watcher = threading.Thread(target=watch)
    watcher.start()
    _, status, used = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    has_ended.set()
    watcher.join()
    if status:
        raise SystemExit(f"{command[:3]} ended with {process.returncode}")
    return Run(seconds, used.ru_utime + used.ru_stime, peak)


def write_model(folder: Path, sizes: dict[str, int]) -> None:
    """A Hugging Face folder with random weights, a block in memory at a time."""
    import torch

    from smtrain.core.model.shape import ModelShape
    from smtrain.worker.checkpoint.dtypes import BF16
    from smtrain.worker.checkpoint.huggingface import safetensors
    from smtrain.worker.checkpoint.tensor_files import Tensor

    config = {
        "model_type": "llama",
        "vocab_size": 32000,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
        **sizes,
    }
    specs = ModelShape.from_config(config).specs
    container = safetensors.container(
        "model.safetensors", {s.name: Tensor(BF16, s.shape) for s in specs}
    )
    noise = torch.randn(1 << 22).bfloat16().view(torch.uint8).numpy().tobytes()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    with (folder / "model.safetensors").open("wb") as file:
        file.write(container.fixed_blocks[0][1])
        while (remaining_bytes := container.end - file.tell()) > 0:
            start = file.tell() % 4093 * 2  # no two tensors alike
            file.write(noise[start : start + min(remaining_bytes, len(noise) - 8192)])


def write_adapter(folder: Path, model: Path) -> None:
    """A LoRA adapter of every linear layer, as PEFT writes it in fp32."""
    import torch
    from safetensors.torch import save_file

    from smtrain.core.model.shape import ModelShape

    linear = [
        s
        for s in ModelShape.from_config(json.loads((model / "config.json").read_text())).specs
        if s.name.endswith("_proj.weight")
    ]
    factors = {}
    for spec in linear:
        rows, columns = spec.shape
        name = f"base_model.model.{spec.name.removesuffix('.weight')}"
        factors[f"{name}.lora_A.weight"] = torch.randn(RANK, columns)
        factors[f"{name}.lora_B.weight"] = torch.randn(rows, RANK)
    folder.mkdir()
    save_file(factors, folder / "adapter_model.safetensors")
    names = sorted({spec.name.split(".")[-2] for spec in linear})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 2 * RANK, "target_modules": names}
    (folder / "adapter_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    main()
