"""The first pages of a newcomer: their commands, and what stands in for machines and accounts that
are not here.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from tests.docs.pages import ROOT, Command, blocks, commands

Site = Callable[[Path, Path, Mapping[str, str]], AbstractContextManager[dict[str, str]]]
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
    skipped: tuple[str, ...] = ()
    """Beginnings of commands that a reader types elsewhere."""

    def commands(self) -> Iterator[Command]:
        """Our commands of the page in its order, with the ones that write their files."""
        for block in blocks(ROOT / self.page):
            if block.tag == "console":
                yield from (c for c in commands(block) if not c.text.startswith(self.skipped))
            elif block.tag == "text":
                yield from (
                    Command(number, line, 0)
                    for number, line in enumerate(block.text.splitlines(), block.line)
                    if line.startswith("smtrain ") and not line.startswith(self.skipped)
                )

    def fill(self, command: str, said: str) -> str:
        """The command with its stand-ins, and the name of the train job that was printed before."""
        for page_text, here in self.stand_ins.items():
            command = command.replace(page_text, here)
        jobs = re.findall(r"\b[\w-]+-train-[0-9a-f]{8}\b", said)
        return re.sub(r"\bJOB\b", jobs[-1] if jobs else "JOB", command)


def config_of(page: str) -> dict[str, dict[str, object]]:
    """The page's only whole config."""
    texts = [block.text for block in blocks(ROOT / page) if block.tag == "yaml"]
    (text,) = [text for text in texts if text.startswith("name:")]
    config: dict[str, dict[str, object]] = yaml.safe_load(text)
    return config


def shrink(config: dict[str, dict[str, object]], data: Path) -> None:
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
    """A ready config, whose machine's device is a process of this CPU."""
    (folder / "my-text").mkdir()
    (folder / "my-text/a.txt").write_text(SENTENCES)
    config = yaml.safe_load((ROOT / "examples/gpu/qwen3-8b-lora-24gb.yaml").read_text())
    shrink(config, folder / "my-text")
    config["machines"]["box"] |= {"kind": "cpu", "memory_gib": 8}
    (folder / "my-run.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    yield {}


@contextmanager
def slurm(root: Path, folder: Path, environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """The page's config on two nodes of a Slurm started here, typed on its head node."""
    from tests.client.backends.slurm.daemons import Slurm

    text, shared = folder / "text", root / "shared"
    for new in (text, shared):
        new.mkdir()
    (text / "a.txt").write_text(SENTENCES)
    config = config_of("docs/slurm.md")
    shrink(config, text)
    config["cluster"] = {"shared": str(shared), "time": "1h", "venv": sys.prefix}
    config["machines"]["node"] |= {"kind": "cpu", "devices": 1, "memory_gib": 4}  # type: ignore[operator]
    (folder / "run.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    cluster = Slurm(root / "slurm", nodes=2)
    try:
        cluster.start()
        yield {"SLURM_CONF": str(cluster.conf)}
    finally:
        cluster.stop()


@contextmanager
def aws(root: Path, folder: Path, environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """The local control plane as the account: bucket, model, text, image and role of the page."""
    told = subprocess.run(
        ["smtrain", "local", "env", "--json"], env=dict(environment), capture_output=True, text=True
    )
    yield json.loads(told.stdout)


def notebook(*_: object) -> AbstractContextManager[dict[str, str]]:
    raise NotImplementedError


DOORS = {
    "home": Door("docs/first-run-here.md", home, {"demo://smollm2": "demo://tiny-llama"}),
    "gpu": Door(
        "docs/first-run-gpu.md",
        gpu,
        {
            "doctor --train": "doctor --train --minutes 2",
            "chat NAME": "chat qwen3-8b-lora <<<Hello",
        },
    ),
    "slurm": Door("docs/slurm.md", slurm),
}
