"""One run, killed again and again wherever it hurts, with its newest checkpoint damaged in between.

The gate kills a run of one host once. `--full` kills one of two hosts three times, and mixtures
whose experts are divided: a Mixtral, latent attention with biases of the router, and gated delta
nets; and a run whose weights are cut, which saves in torch's distributed format.
`SMTRAIN_KILL_LOOP=100` is the size of issue 12; `SMTRAIN_KILL_LOOP_SEED` chooses the moments and
targets.
"""

from __future__ import annotations

import collections
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from botocore.exceptions import ClientError

import smtrain
from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.client.backends.sagemaker.s3 import list_objects
from smtrain.client.jobs.checkpoints import saved_steps
from smtrain.client.jobs.listing import list_jobs
from smtrain.core.config import Stage
from smtrain.core.protocol.uris import split_uri
from smtrain.plane.client import ensure_running, running_endpoint, shut_down
from tests import tiers
from tests.processes import commands, ranks, read

from .test_local_run import losses

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("SMTRAIN_KILL_LOOP", "3" if tiers.full() else "1"))
SEED = int(os.environ.get("SMTRAIN_KILL_LOOP_SEED", "1"))
# A run whose client is killed keeps running: on a busy machine it makes steps before the next
# client follows it.
STEPS = 30 + 7 * KILLS if tiers.full() else 16
HOSTS = 2 if tiers.full() else 1
KEEP = 2
# A short run would be over by then.
TARGETS = ("rank", "launcher", "host", "plane", "client")[: 5 if KILLS >= 10 else 4]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A separate control plane: it is killed too."""
    folder = tmp_path_factory.mktemp("kill-loop-home")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SMTRAIN_HOME", str(folder))
        yield folder
        shut_down()


EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02},
    "deepseek_v3": {
        **EXPERTS,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "q_lora_rank": 24,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
    },
    "qwen3_next": {
        **EXPERTS,
        "num_experts": 4,
        "shared_expert_intermediate_size": 24,
        "head_dim": 16,
        "full_attention_interval": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
}


@pytest.fixture(
    scope="module",
    params=["llama", *(pytest.param(name, marks=pytest.mark.full) for name in ("dcp", *MIXTURES))],
)
def config(
    home: Path,
    trained_inputs: dict[str, Path],
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    model = trained_inputs["model"]
    parallel: dict[str, Any] = {"tp": 2, "pp": 1, "micro_batch_size": 1}
    is_dcp = request.param == "dcp"
    if is_dcp:
        parallel["shard"] = "full"
    if request.param in MIXTURES:
        model = mixture(request.param, model, tmp_path_factory.mktemp("mixture") / "model")
        parallel = {"tp": 1, "pp": 1, "ep": 2, "micro_batch_size": 1}
    has_biases = request.param == "deepseek_v3"
    return {
        "name": f"reference-{request.param.replace('_', '-')}",
        "target": "local",
        "model": {"path": str(model), **({} if tiers.full() else {"init": "scratch"})},
        "data": {"path": str(trained_inputs["text"])},
        "parallel": parallel,
        "checkpoint": {"keep": KEEP, **({"format": "dcp"} if is_dcp else {})},
        "train": {
            "steps": STEPS,
            "global_batch_size": 16,
            "seq_len": 32,
            "precision": "fp32",
            "lr": 1e-3,
            "warmup_steps": 2,
            "save_interval": 2,
            **({"router_bias_update_rate": 0.01} if has_biases else {}),
        },
        "compute": {
            "instance_type": "ml.trn1.2xlarge",
            "instance_count": HOSTS,
            "processes_per_instance": 2,
        },
    }


def mixture(name: str, model: Path, folder: Path) -> Path:
    """A model with experts, and with the tokenizer of another model."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 512,
        "max_position_embeddings": 256,
        "hidden_size": 64,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    config = AutoConfig.for_model(name, **sizes | MIXTURES[name])
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def processes(home: Path, word: Callable[[bytes, bytes], bool]) -> list[int]:
    """Processes of this home for which `word(command line, environment)` holds."""
    return [
        pid
        for pid, line in commands().items()
        if pid != os.getpid() and word(line, read(pid, "environ"))
    ]


def victims(home: Path, job: str, target: str) -> list[int]:
    def of_job(environment: bytes) -> bool:
        return f"TRAINING_JOB_NAME={job}\0".encode() in environment + b"\0"

    folder = os.fsencode(home)
    if target == "plane":
        endpoint = running_endpoint(home)
        return [endpoint.pid] if endpoint else []
    if target == "host":
        return processes(
            home, lambda line, _: b"smtrain.plane.server.sandbox" in line and folder in line
        )
    if target == "launcher":
        return processes(home, lambda line, env: of_job(env) and b"launch.py" in line)
    return ranks(processes(home, lambda _, env: of_job(env)))


class Client:
    """`smtrain launch` in a separate process, whose lines are read as they come."""

    def __init__(self, path: Path) -> None:
        command = [
            sys.executable,
            "-m",
            "smtrain",
            "launch",
            str(path),
            "--stage",
            "train",
            "--plain",
        ]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.text: list[str] = []

    def until_step(self, more: int) -> bool:
        """Read until the `more`-th step of this attempt; False if it ended before."""
        assert self.process.stdout
        seen = 0
        for line in self.process.stdout:
            self.text.append(line)
            seen += bool(re.search(r"\| step=\d+ |^step=\d+ ", line))
            if seen >= more:
                return True
        return False

    def end(self, seconds: float) -> int:
        """Its exit status; its output is read to the end."""
        out, _ = self.process.communicate(timeout=seconds)
        self.text.append(out or "")
        return self.process.returncode


def damage(target: SageMakerBackend, prefix: str, chance: random.Random) -> str | None:
    """Change one file of the newest whole checkpoint, if an older whole one exists to resume
    from.
    """
    whole = [step for step in saved_steps(target, prefix) if step.is_complete]
    if len(whole) < 2:
        return None
    bucket, key = split_uri(whole[-1].uri)
    items = [item for item in list_objects(target, whole[-1].uri) if item["Size"]]
    item = chance.choice(items)
    how = chance.choice(["flip", "zero", "cut", "gone"])
    body = bytearray(target.s3.get_object(Bucket=bucket, Key=item["Key"])["Body"].read())
    at = chance.randrange(len(body))
    if how == "flip":
        body[at] ^= 1 << chance.randrange(8)
    elif how == "zero":
        at = min(at, max(0, len(body) - 1024))
        body[at : at + 1024] = b"\1" * len(body[at : at + 1024])
    elif how == "cut":
        body = body[:at]
    if how == "gone":
        target.s3.delete_object(Bucket=bucket, Key=item["Key"])
    else:
        target.s3.put_object(Bucket=bucket, Key=item["Key"], Body=bytes(body))
    return f"{how} {item['Key'][len(key) :]} of {whole[-1].name}"


def final_hashes(target: SageMakerBackend, job: smtrain.Job) -> dict[str, str]:
    """sha256 of every file of the last checkpoint, as its manifest has them; torch gives every
    `.metadata` a new id.
    """
    import json

    uri = job.checkpoints[-1]
    bucket, key = split_uri(uri)
    body = target.s3.get_object(Bucket=bucket, Key=f"{key}manifest.json")["Body"].read()
    files = json.loads(body)["files"]
    return {name: files[name]["sha256"] for name in files if not name.endswith(".metadata")}


def test_killed_at_random_it_ends_bit_for_bit(
    home: Path,
    config: dict[str, Any],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    chance = random.Random(SEED)
    stages: tuple[Stage, ...] = (
        ("prepare", "convert", "train") if tiers.full() else ("prepare", "train")
    )
    prepared, *_, whole = (
        smtrain.launch(config, stage=stage, say=lambda _: None) for stage in stages
    )
    expected = losses(whole)
    assert sorted(expected) == list(range(1, STEPS + 1))
    hashes = final_hashes(SageMakerBackend("local"), whole)
    logged = {int(record["step"]): record for record in whole.records}

    name = config["name"].replace("reference", "battered")
    config = {**config, "name": name, "data": {"prepared": prepared.output}}
    path = tmp_path / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config))
    kills: collections.Counter[str] = collections.Counter()
    damaged: list[str] = []
    for _ in range(20 * KILLS):
        ensure_running(home)
        client = Client(path)
        if kills.total() >= KILLS:
            assert client.end(600 + 2 * STEPS) == 0, "".join(client.text)[-2000:]
            break
        if not client.until_step(chance.randint(1, 8)):
            client.end(60)
            said = "".join(client.text)
            if "Completed" in said or "done before" in said:
                break
            continue
        # What is hit is what runs now; the newest of the run's train jobs.
        job = list_jobs(SageMakerBackend("local"), name_contains=f"{name}-train-", limit=1)[0]
        target = chance.choice(TARGETS)
        found = [client.process.pid] if target == "client" else victims(home, job.name, target)
        if not found:
            client.process.kill()
            client.end(60)
            continue
        os.kill(chance.choice(found), signal.SIGKILL)
        kills[target] += 1
        client.end(180)  # no wait is endless
        ensure_running(home)
        if target != "client":
            wait_until_ended(job, 120)
            if chance.random() < 0.3 and (
                done := damage(
                    SageMakerBackend("local"), job.describe()["CheckpointConfig"]["S3Uri"], chance
                )
            ):
                damaged.append(done)
    print(f"kills: {dict(kills)}; damaged: {damaged}")
    record_property("tries", kills.total() + len(damaged))
    assert kills.total() >= 0.6 * KILLS, f"the run ended after {kills}"

    attempts = list_jobs(SageMakerBackend("local"), name_contains=f"{name}-train-", limit=1000)
    last = attempts[0]
    assert last.status == "Completed"
    seen: set[int] = set()
    for job in attempts:
        steps = [int(m[1]) for line in job.lines() if (m := re.match(r"step=(\d+) ", line.text))]
        assert len(steps) == len(set(steps)), f"{job.name} did a step twice"
        seen |= set(steps)
        for record in job.records:
            for key in ("loss", "grad_norm"):
                assert record[key] == logged[int(record["step"])][key], (job.name, record)
        with suppress(ClientError):  # killed with the plane, its output never came up
            exact = losses(job)
            assert {step: expected[step] for step in exact} == exact
    assert seen == set(range(1, STEPS + 1))
    assert final_hashes(SageMakerBackend("local"), last) == hashes

    prefix = last.describe()["CheckpointConfig"]["S3Uri"]
    assert sum(step.is_complete for step in saved_steps(SageMakerBackend("local"), prefix)) >= 1
    shut_down()
    deadline = time.monotonic() + 30
    while left := processes(
        home, lambda line, env: os.fsencode(home) in line or b"TRAINING_JOB_NAME=battered" in env
    ):
        assert time.monotonic() < deadline, f"left running: {left}"
        time.sleep(0.2)
    assert str(home) not in Path("/proc/self/mounts").read_text()
    assert not list(home.glob("**/hosts/*/ml")), "folders of ended hosts are left"


def wait_until_ended(job: smtrain.Job, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while job.status not in ("Completed", "Failed", "Stopped"):
        assert time.monotonic() < deadline, f"{job.name} does not end: {job.status}"
        time.sleep(0.1)
