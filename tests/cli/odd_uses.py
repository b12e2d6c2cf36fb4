"""Wrong uses with odd files, places, names and combinations, one a row as in newcomers.py."""

from __future__ import annotations

import json
import os
from pathlib import Path

from tests.cli.newcomers import Row
from tests.conftest import LLAMA

FILES: list[Row] = [
    ("config show huge.yaml", 2, "larger than 1 MiB"),
    ("config show noise.bin", 2, "not a text file"),
    ("config show empty.bin", 2, "is empty; a config needs"),
    ("config show /dev/zero", 2, "not a regular file"),
    ("config show pipe.jsonl", 2, "not a regular file"),
    ("config show dangling", 2, "it is a link to nothing"),
    ("config show loop", 2, "Too many levels"),
    ("set data.path=/dev/zero", 2, "is a device, a pipe or a socket | give a file"),
    ("set data.path=pipe.jsonl", 2, "is a device, a pipe or a socket"),
    ("set data.path=loop", 2, "a link that leads back to itself"),
    ("set data.path=only-weights", 2, "holds no file of text"),
    ("set model.path=only-weights", 2, "copy config.json"),
    ("set model.path=no-layers", 2, "has no hidden_size"),
    ("set model.path=bert", 2, "smtrain cannot train"),
    ("set model.path=hybrid", 2, "such as Mamba-2, by mamba_d_state), which smtrain cannot"),
    ("plan run.yaml --model hybrid", 2, "such as Mamba-2, by mamba_d_state), which smtrain cannot"),
    ("check hybrid", 2, "such as Mamba-2, by mamba_d_state), which smtrain cannot"),
    ("convert hybrid to --to native", 2, "such as Mamba-2, by mamba_d_state), which smtrain cannot"),
    ("set model.path=demo://tiny-lama", 2, "did you mean demo://tiny-llama?"),
    ("set data.path=demo://tiny-llama", 2, "is not a demo text"),
    ("data prepare pipe.jsonl to --model tokenizer", 2, "is a device, a pipe or a socket"),
    ("data prepare loop to --model tokenizer", 2, "a link that leads back to itself"),
    ("data prepare /dev/null to --model tokenizer", 2, "is a device, a pipe or a socket"),
    ("data prepare nulls.jsonl to --model tokenizer", 2, "is null, not a string"),
    ("data prepare numbers.jsonl to --model tokenizer", 2, "not an object"),
    ("data prepare array.jsonl to --model tokenizer", 2, "not an object"),
    ("data prepare bad.jsonl.gz to --model tokenizer", 2, "not a whole gzip file"),
    ("data prepare bad.parquet to --model tokenizer", 2, "cannot be read as Parquet"),
    ("data prepare zip.zip to --model tokenizer", 2, "warc, tar or text."),
    ("data prepare text to --model noise.bin", 2, "noise.bin is a file"),
    ("data report text --model noise.bin", 2, "noise.bin is a file"),
    ("data inspect noise.bin", 2, "noise.idx is missing"),
    ("plan run.yaml --prices noise.toml", 2, "name a TOML file of prices"),
    ("plan run.yaml --machine-file noise.bin", 2, "smtrain help gpus"),
    ("plan run.yaml --measured log.jsonl", 2, "no steps with a loss"),
    ("plan run.yaml --model /dev/null", 2, "is not a folder"),
    ("compare noise.bin losses.jsonl", 2, "no line of a training step"),
    ("compare losses.jsonl nowhere.jsonl", 2, "no such file or folder"),
    ("report losses.jsonl", 2, "cannot be a run's name"),
    ("convert short-weights to --to nxd", 2, "not a complete safetensors file"),
    ("convert noise.bin to --to hf", 2, "noise.bin is a file"),
    ("checkpoint verify only-weights", 2, "has no config.json"),
    ("checkpoint diff short-weights model", 2, "not a complete safetensors file"),
    ("generate short-weights --prompt x", 2, "not a complete safetensors file"),
    ("generate model noise.bin", 2, "not UTF-8 text"),
    ("generate model pipe.jsonl", 2, "not a regular file"),
    ("generate model empty.bin", 2, "holds no prompts"),
    ("push noise.bin me/x", 2, "noise.bin is a file"),
]  # fmt: skip
PLACES: list[Row] = [
    ("init /proc/x/new.yaml --model model --data text --machines here", 2, "no such folder"),
    ("init run.yaml/new.yaml --model model --data text --machines here", 2, "run.yaml is a file"),
    ("doctor --json noise.bin/x", 2, "noise.bin is a file"),
    ("doctor --page /proc/x.html", 2, "/proc: no such file"),
    ("data report text --out /proc/x.html", 2, "smtrain: /proc/x.html: no such"),
    ("data report text --out text", 2, "is a folder; name a file in it"),
    ("data export taken /proc/x", 2, "smtrain: /proc/x: no such"),
    ("data prepare text run.yaml/x --model tokenizer", 2, "run.yaml is a file; name a folder"),
    ("tune run.yaml --over train.lr=1e-4,2e-4 --out run.yaml/x", 2, "run.yaml is a file"),
    ("evaluate model --tasks mmlu --out noise.bin/x", 2, "noise.bin is a file"),
    ("demo --tiny --out run.yaml/x", 2, "run.yaml is a file"),
    ("download nope run.yaml/x", 2, "run.yaml is a file"),
    ("SMTRAIN_HOME=run.yaml list", 2, "it is a file"),
    ("SMTRAIN_HOME=/proc/x list", 2, "set SMTRAIN_HOME to a folder"),
    ("config set /proc/version train.steps=5", 2, "keys and values at the top"),
    ("config set text train.steps=5", 2, "it is a folder"),
]  # fmt: skip
WORDS: list[Row] = [
    ("init new.yaml --model '' --data text --machines here", 2, "--model: is an empty name"),
    ("init new.yaml --model model --data '' --machines here", 2, "--data: is an empty name"),
    ("init new.yaml --model demo://tiny-lama --data text --machines here", 2, "demo://tiny-llama?"),
    ("init new.yaml --model hf:// --data text --machines here", 2, "must look like hf://"),
    ("init new.yaml --model model --data text --machines gpu", 2, "say here, or"),
    ("init new.yaml --model model", 2, "no terminal to ask on"),
    ("config set run.yaml =5", 2, "must look like"),
    ("config set run.yaml train=5", 2, "it is a section"),
    ("config set run.yaml 'train.lr=1e-4 train.steps=5'", 2, "a number is needed"),
    ("config show run.yaml --set train.steps=5 --set train.steps=x", 2, "a whole number"),
    ("plan run.yaml --machines ml.p5.48xlarge", 2, "must look like"),
    ("plan run.yaml --machines ml.p5.48xlarge:1000000", 2, "must look like"),
    ("plan run.yaml --deadline 0", 2, "a number above 0"),
    ("set train.warmup_steps=99999", 2, "use at most that"),
    ("run run.yaml run.yaml", 2, "give each its own name"),
    ("run run.yaml --target kubernetes --dry-run", 2, "smtrain help kubernetes"),
    ("tune run.yaml --over train.lr=1e-4,1e-4", 2, "leave one out"),
    ("tune run.yaml --over train.lr=a,b", 2, "a number is needed"),
    ("tune run.yaml --over train.lr=1e-4,2e-4 --over train.lr=3e-4,4e-4", 2, "given twice"),
    ("iam policy run.yaml --target slurm", 2, "is slurm, and jobs there need no policy"),
    ("pipeline run.yaml --target kubernetes", 2, "need no pipeline; add --target aws"),
    ("list --name '['", 2, "letters, digits and hyphens"),
    ("list --target kubernetes", 2, "SMTRAIN_KUBERNETES"),
    ("pool list --target slurm", 2, "so it is local or aws"),
    ("undeploy nope --target slurm", 2, "target: got 'slurm'; endpoints are SageMaker's"),
    ("SMTRAIN_TARGET=slurm undeploy nope", 2, "SMTRAIN_TARGET is 'slurm'"),
    ("register nope --instance moon", 2, "--instance: 'moon' is no instance type"),
    ("deploy nope --instance ml.t2.nano", 2, "--instance: 'ml.t2.nano' | ml.t2.large?"),
    ("deploy model --instance ''", 2, "--instance: '' is no"),
    ("deploy model --instance ml.g5.xlarge --instances 0", 2, "smtrain: --instances: got 0; give"),
    ("image verify ''", 2, "cannot be the name of an image"),
    ("image pull 'A B'", 2, "cannot be the name of an image"),
    ("deploy model --instance ml.g5.xlarge --for -1h", 2, "a duration looks like"),
    ("evaluate model --tasks ''", 2, "names no task"),
    ("convert model to --to hf --pp 2", 2, "has no effect"),
    ("convert model to --to hf --max-shard-size -5GB", 2, "a size like 5GB"),
    ("images --region us-moon-1", 2, "name a region such as"),
    ("cluster network run.yaml --cidr 10.0.0.0/33", 2, "10.42.0.0/16"),
    ("pool release 'a b'", 2, "cannot be a job's name"),
    ("local clean --older-than ''", 2, "a duration looks like"),
    ("help ../../etc/passwd", 2, "there is no page"),
]  # fmt: skip
ODD = {"odd files": FILES, "odd places": PLACES, "odd words": WORDS}


def odd_files(folder: Path) -> None:
    """Write the files of the rows that other tables do not have."""
    (folder / "huge.yaml").write_bytes(b"name: x\n# " + b"y" * (1 << 21))
    noise = bytes(range(256)) * 400
    for name in ("noise.bin", "noise.toml", "bad.parquet"):
        (folder / name).write_bytes(noise)
    (folder / "empty.bin").write_bytes(b"")
    (folder / "nulls.jsonl").write_text('{"text": null}\n')
    (folder / "numbers.jsonl").write_text("1\n2\n")
    (folder / "array.jsonl").write_text('[{"text": "x"}]\n')
    (folder / "bad.jsonl.gz").write_bytes(b"\x1f\x8bnothing")
    (folder / "zip.zip").write_bytes(b"PK\x03\x04broken")
    (folder / "log.jsonl").write_text('{"step": "x"}\n')
    (folder / "losses.jsonl").write_text('{"step": 1, "loss": 2}\n{"step": 2, "loss": 1}\n')
    os.mkfifo(folder / "pipe.jsonl")
    (folder / "dangling").symlink_to("nothing")
    (folder / "loop").symlink_to("loop")
    for name, config in {
        "only-weights": None,
        "short-weights": LLAMA,
        "no-layers": {"model_type": "llama"},
        "bert": {"model_type": "bert", "hidden_size": 8},
        "hybrid": {**LLAMA, "model_type": "granitemoehybrid", "mamba_d_state": 128},
    }.items():
        (folder / name).mkdir()
        if config:
            (folder / name / "config.json").write_text(json.dumps(config))
    for name in ("only-weights", "hybrid"):
        (folder / name / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    (folder / "short-weights/model.safetensors").write_bytes(b"\xff\xff")
