"""Sample configs of every target and objective, with options that are valid for them."""

from __future__ import annotations

import copy
import random
from typing import Any

_AWS: dict[str, Any] = {
    "compute": {"role": "arn:aws:iam::111122223333:role/training", "region": "us-west-2"},
    "output": {"s3_uri": "s3://bucket/runs"},
}
BOX = {
    "devices": 4,
    "memory_gib": 24,
    "tflops": 80,
    "link_gbs": 100,
    "network_gbs": 10,
    "host_memory_gib": 256,
}
TARGETS: dict[str, dict[str, Any]] = {
    "local": {
        "compute": {
            "instance_type": "ml.trn1.2xlarge",
            "instance_count": 2,
            "processes_per_instance": 2,
        }
    },
    "aws": {
        **_AWS,
        "compute": {**_AWS["compute"], "instance_type": "ml.p5.48xlarge", "max_run": "2d"},
    },
    "slurm": {
        "cluster": {
            "shared": "/fsx/smtrain",
            "partition": "gpu",
            "modules": ["cuda/12"],
            "setup": ["export A=1"],
            "sbatch": ["--mail-type=END"],
        },
        "compute": {"instance_type": "ml.p5.48xlarge"},
    },
    "pai-dlc": {
        "machines": {"box": BOX},
        "compute": {"instance_type": "box", "image": "registry/train:1"},
        "pai": {
            "region": "cn-beijing",
            "workspace": "12345",
            "storage": "oss://bucket/smtrain",
            "ecs_spec": "ecs.gn7e-c16g1.16xlarge",
            "data": [{"uri": "oss://text/a", "path": "/mnt/text"}],
        },
    },
}
_ADAPTER = {"train": {"adapter": {"type": "lora", "rank": 4, "targets": ["q_proj", "v_proj"]}}}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "pretrain": {"data": {"path": "pretrain"}},
    "sft": {"data": {"path": "sft", "format": "alpaca"}, "train": {"objective": "sft"}},
    "dpo": {
        "data": {"path": "dpo"},
        "train": {"objective": "dpo", "dpo": {"beta": 0.2, "loss": "robust"}},
    },
    "lora": {
        "data": {"path": "sft", "format": "alpaca"},
        "train": {"objective": "sft", **_ADAPTER["train"]},
    },
}
_VARIANTS = (*TARGETS, *OBJECTIVES)
_TEXT = (*TARGETS, "pretrain")
EXTRAS: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (_VARIANTS, {"parallel": {"tp": 2, "micro_batch_size": 1, "sequence_parallel": True}}),
    (("aws", "pai-dlc", "slurm", *OBJECTIVES), {"parallel": "auto"}),
    (_VARIANTS, {"train": {"validation": {"interval": 2, "fraction": 0.2}}}),
    (_TEXT, {"train": {"validation": {"path": "held-out.jsonl", "keep_best": True}}}),
    (
        _TEXT,
        {
            "train": {
                "batch_ramp": {"start": 64, "increment": 64, "samples": 640},
                "global_batch_size": 128,
            }
        },
    ),
    (_VARIANTS, {"evaluate": {"tasks": ["own"], "data": "task", "limit": 2}}),
    (_VARIANTS, {"generate": {"prompts": ["a", "b\nc"], "max_new_tokens": 4, "temperature": 0.5}}),
    (
        _TEXT,
        {"data": {"near_duplicates": {}, "pii": "mask", "phone_region": "DE", "filters": ["c4"]}},
    ),
    (
        _TEXT,
        {
            "data": {
                "fix_mojibake": True,
                "unicode": "nfc",
                "decontaminate": {"path": "held-out.jsonl"},
            }
        },
    ),
    (
        _TEXT,
        {
            "data": {
                "path": None,
                "sources": [
                    {"path": "pretrain", "weight": 1},
                    {"path": "held-out.jsonl", "weight": 2},
                ],
            }
        },
    ),
    (_VARIANTS, {"track": {"mlflow": "http://host:5000", "experiment": "e"}}),
    (_VARIANTS, {"notify": {"on": ["failed"], "webhook_env": "HOOK", "command": ["echo", "done"]}}),
    (
        _VARIANTS,
        {"compute": {"environment": {"NOTE": "it's $HOME", "B": "x"}}, "tags": {"team": "llm"}},
    ),
    (("aws", *OBJECTIVES), {"compute": {"spot": True, "max_wait": "3d", "retries": 2}}),
    (
        ("aws", *OBJECTIVES),
        {"compute": {"fallback_instance_types": ["ml.p5e.48xlarge"], "capacity_wait": "1h"}},
    ),
    (
        ("aws", *OBJECTIVES),
        {"network": {"subnets": ["subnet-1"], "security_group_ids": ["sg-1"], "isolation": True}},
    ),
    (
        ("aws", "slurm", *OBJECTIVES),
        {"compute": {"instance_type": "ml.trn2.48xlarge", "image": "registry/own:1"}},
    ),
    (_VARIANTS, {"machines": {"other": BOX}}),
    (
        (*TARGETS, "pretrain", "sft", "dpo"),
        {"model": {"rope": {"type": "yarn", "factor": 4}}, "checkpoint": {"keep": 3}},
    ),
    ((*TARGETS, "lora"), {"export": {"merge": True}}),
    (_TEXT, {"data": {"shard_size": 0.5, "workers": 2, "separator": "--", "max_bad": 3}}),
    (
        ("pai-dlc", "pretrain"),
        {
            "pai": {
                "command": "python3 own.py --x 'y'",
                "code": {"source": "code-1", "path": "/code"},
            }
        },
    ),
    (
        ("pai-dlc", *OBJECTIVES),
        {
            "pai": {
                "rdma": True,
                "grace": "10m",
                "error_monitoring": True,
                "error_monitoring_args": "--x y",
            }
        },
    ),
    (
        ("slurm", *OBJECTIVES),
        {
            "cluster": {
                "host": "login",
                "container": "/fsx/i.sqsh",
                "srun": ["--cpu-bind=none"],
                "cpu_sbatch": ["--mem=1G"],
                "hyperpod": True,
            }
        },
    ),
)
"""Options, with the targets and objectives for which they are valid."""


def _base(target: str) -> dict[str, Any]:
    base = {
        "name": "fuzz",
        "target": target,
        "model": {"path": "model"},
        "parallel": {},
        "train": {
            "steps": 4,
            "global_batch_size": 64,
            "seq_len": 32,
            "precision": "bf16",
            "lr": 1e-4,
        },
    }
    return merge_configs(base, TARGETS[target])


def merge_configs(base: dict[str, Any], override: dict[str, Any]) -> dict[str, Any]:
    """A copy of a config with the keys of another."""
    result = copy.deepcopy(base)
    for key, value in override.items():
        current = result.get(key)
        result[key] = (
            merge_configs(current, value)
            if isinstance(current, dict) and isinstance(value, dict)
            else copy.deepcopy(value)
        )
    return result


def valid(target: str, objective: str) -> dict[str, Any]:
    """A config without a fault."""
    return merge_configs(_base(target), OBJECTIVES[objective])


def sample(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """The label and the values of a probably valid config."""
    target, objective = rng.choice(sorted(TARGETS)), rng.choice(sorted(OBJECTIVES))
    raw = valid(target, objective)
    fitting = [extra for for_, extra in EXTRAS if target in for_ and objective in for_]
    for extra in rng.sample(fitting, rng.choice([0, 1, 1, 2, 3])):
        raw = merge_configs(raw, extra)
    return f"{target} {objective}", raw
