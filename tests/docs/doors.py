"""The first pages of a newcomer: their commands, and what stands in for machines and accounts that
are not here.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.docs.pages import ROOT, Command, blocks, commands

Site = Callable[[Path, Path, Mapping[str, str]], AbstractContextManager[dict[str, str]]]
TINY = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}
SENTENCES = "\n\n".join(f"A river of {n} miles runs from the hills to the sea." for n in range(400))


@dataclass(frozen=True)
class Door:
    """A page, and how to type its commands here."""

    page: str
    site: Site
    """Prepare the folder as the page says (`site(root, folder, environment)`); gives further
    variables of the environment.
    """
    stand_ins: Mapping[str, str] = field(default_factory=dict)
    """Pieces of the page's commands, and what stands in for each."""
    edits: Mapping[str, Callable[[Path, Mapping[str, str]], None]] = field(default_factory=dict)
    """By the beginning of a command, the reader's work after it (`edit(folder, environment)`)."""

    def commands(self) -> Iterator[Command]:
        """The commands and the lines of Python of the page in its order, without those that install
        or belong to other tools.
        """
        for block in blocks(ROOT / self.page):
            if block.tag == "console":
                yield from commands(block)
            elif block.tag == "python":
                yield Command(block.line, f"python - <<'END'\nimport smtrain\n{block.text}\nEND", 0)
            elif block.tag == "text":
                yield from (
                    Command(number, line, 0)
                    for number, line in enumerate(block.text.splitlines(), block.line)
                    if line.startswith(("smtrain ", "jupyter lab "))
                )

    def edit(self, command: str, folder: Path, environment: Mapping[str, str]) -> None:
        """Do the reader's work after this command."""
        for beginning, do in self.edits.items():
            if command.startswith(beginning):
                do(folder, environment)

    def fill(self, command: str, said: str) -> str:
        """The command with its stand-ins, and the name of the train job that was printed before."""
        for page_text, here in self.stand_ins.items():
            command = command.replace(page_text, here)
        jobs = re.findall(r"\b[\w-]+-train-[0-9a-f]{8}\b", said)
        return re.sub(r"\bJOB\b", jobs[-1] if jobs else "JOB", command)


def config_of(page: str) -> dict[str, Any]:
    """The page's only whole config."""
    texts = [block.text for block in blocks(ROOT / page) if block.tag == "yaml"]
    (text,) = [text for text in texts if text.startswith("name:")]
    config: dict[str, Any] = yaml.safe_load(text)
    return config


def shrink(config: dict[str, Any], data: Path | str) -> None:
    """Put a tiny model, some text and few short steps in place of the real ones."""
    config["model"]["path"] = "demo://tiny-llama"
    config["data"]["path"] = str(data)
    config["train"] |= {"steps": 3, "seq_len": 64, "global_batch_size": 2, "save_interval": 2}
    config["train"].pop("warmup_steps", None)


@contextmanager
def home(root: Path, folder: Path, environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    yield {}


@contextmanager
def gpu(root: Path, folder: Path, environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """A ready config, whose machine's device is a process of this CPU, and a tiny model for the
    trials of doctor, which take all of their ten minutes with a model of the machine's size.
    """
    (folder / "tiny").mkdir()
    (folder / "tiny/config.json").write_text(json.dumps(TINY))
    (folder / "my-text").mkdir()
    (folder / "my-text/a.txt").write_text(SENTENCES)
    config = yaml.safe_load((ROOT / "examples/gpu/qwen3-8b-lora-24gb.yaml").read_text())
    shrink(config, folder / "my-text")
    config["machines"]["box"] |= {"kind": "cpu", "memory_gib": 8}
    (folder / "my-run.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    yield {}


@contextmanager
def slurm(root: Path, folder: Path, environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """The page's config on two nodes of a real Slurm, started here, typed on its head node."""
    from tests.client.backends.slurm.daemons import Slurm

    text, shared = folder / "text", root / "shared"
    for new in (text, shared):
        new.mkdir()
    (text / "a.txt").write_text(SENTENCES)
    config = config_of("docs/slurm.md")
    shrink(config, text)
    config["cluster"] = {"shared": str(shared), "time": "1h", "venv": sys.prefix}
    config["machines"]["node"] |= {"kind": "cpu", "devices": 1, "memory_gib": 4}
    (folder / "run.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    cluster = Slurm(root / "slurm", nodes=2)
    try:
        cluster.start()
        yield {"SLURM_CONF": str(cluster.conf)}
    finally:
        cluster.stop()


@contextmanager
def aws(root: Path, folder: Path, environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """The local control plane in place of AWS, with the page's bucket and text, and an image."""
    told = subprocess.run(
        ["smtrain", "local", "env"], env={**environment}, capture_output=True, text=True, check=True
    )
    words = shlex.split(told.stdout.replace("export ", ""))
    variables = dict(word.split("=", 1) for word in words)
    s3 = _client("s3", variables)
    s3.create_bucket(Bucket="my-bucket")
    s3.put_object(Bucket="my-bucket", Key="text/a.txt", Body=SENTENCES.encode())
    ecr = _client("ecr", variables)
    ecr.create_repository(repositoryName="smtrain")
    manifest = {
        "schemaVersion": 2,
        "layers": [],
        "config": {"size": 0, "digest": "sha256:" + "0" * 64},
    }
    manifest["mediaType"] = "application/vnd.docker.distribution.manifest.v2+json"
    ecr.put_image(repositoryName="smtrain", imageManifest=json.dumps(manifest), imageTag="1")
    yield {**variables, "SMTRAIN_TARGET": "aws"}


def _client(service: str, variables: Mapping[str, str]) -> Any:
    """A client of the control plane with these variables."""
    import boto3

    session: Any = boto3.Session(
        variables["AWS_ACCESS_KEY_ID"],
        variables["AWS_SECRET_ACCESS_KEY"],
        variables.get("AWS_SESSION_TOKEN"),
        variables["AWS_REGION"],
    )
    return session.client(service, endpoint_url=variables["AWS_ENDPOINT_URL"])


def set_aws_keys(folder: Path, variables: Mapping[str, str]) -> None:
    """Write the page's keys into the config, and those that make the run small."""
    file = folder / "run.yaml"
    config = yaml.safe_load(file.read_text())
    (text,) = [
        block.text for block in blocks(ROOT / "docs/first-run-aws.md") if block.tag == "yaml"
    ]
    for section, values in yaml.safe_load(text).items():
        config[section] = {**config.get(section, {}), **values}
    shrink(config, config["data"]["path"])
    registry = _client("ecr", variables).describe_repositories()["repositories"][0]
    config["compute"] |= {"image": f"{registry['repositoryUri']}:1", "processes_per_instance": 1}
    file.write_text(yaml.safe_dump(config, sort_keys=False))


def create_role(folder: Path, variables: Mapping[str, str]) -> None:
    """Create the page's role from the policies that its commands wrote, and name it."""
    iam, name = _client("iam", variables), "smtrain-training"
    trust, role = ((folder / f"{file}.json").read_text() for file in ("trust", "role"))
    iam.create_role(RoleName=name, AssumeRolePolicyDocument=trust)
    iam.put_role_policy(RoleName=name, PolicyName="smtrain", PolicyDocument=role)
    file = folder / "run.yaml"
    config = yaml.safe_load(file.read_text())
    config["compute"]["role"] = name
    file.write_text(yaml.safe_dump(config, sort_keys=False))


@contextmanager
def notebook(root: Path, folder: Path, environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """The notebooks next to the examples, as in a clone."""
    for name in ("notebooks", "examples"):
        shutil.copytree(ROOT / name, folder / name)
    shutil.copy(ROOT / "docs/llama.yaml", folder)
    yield {"MPLBACKEND": "Agg"}


DOORS = {
    "home": Door(
        "docs/first-run-here.md",
        home,
        {"demo://smollm2": "demo://tiny-llama", "train.steps=20": "train.steps=4"},
    ),
    "gpu": Door(
        "docs/first-run-gpu.md",
        gpu,
        {"--train": "--train --minutes 6 --model tiny", "chat NAME": "chat qwen3-8b-lora <<<Hello"},
    ),
    "slurm": Door("docs/slurm.md", slurm),
    "aws": Door(
        "docs/first-run-aws.md",
        aws,
        {"hf://EleutherAI/pythia-1.4b": "demo://tiny-llama", "ml.g5.12xlarge": "ml.g5.xlarge"},
        {"smtrain init": set_aws_keys, "smtrain iam policy run.yaml --caller": create_role},
    ),
    "notebook": Door(
        "docs/notebooks.md",
        notebook,
        {"jupyter lab notebooks/": "jupyter execute notebooks/4-local-mode.ipynb"},
    ),
}
