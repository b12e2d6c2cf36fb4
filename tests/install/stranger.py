"""A newcomer: runs the commands of README.md in a folder with the files that they name.

`python stranger.py README EXAMPLES FOLDER` runs them in the calling environment, as
scripts/stranger does after a real installation; tests/install/test_stranger.py does a shorter run.
Only Python's standard library is imported.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_FENCES = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_PLACEHOLDER = re.compile(r"\b[A-Z]{2,}\b|\b[A-Z]\b")
# Commands that only look use the README's own config for AWS; the rest run on this machine with
# the tiny model.
_LOOKS = ("plan CONFIG", "check CONFIG", "iam policy CONFIG", "config show CONFIG", "--dry-run")
_ON_AWS = ("check CONFIG", "--dry-run")
# The README only names these, so the newcomer asks for their help.
_ASKED = ("data", "convert", "checkpoint", "pool", "init")
CONFIG_JSON = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
"""The config.json of Llama-3.2-1B, which the README's config names; planning needs no weights."""
TOKENIZER_JSON = {
    "version": "1.0",
    "added_tokens": [],
    "pre_tokenizer": {"type": "Whitespace"},
    "model": {"type": "WordLevel", "vocab": {"a": 0, "<end>": 1}, "unk_token": "a"},
}


@dataclass(frozen=True)
class Typed:
    """A command, its seconds and its output."""

    command: str
    seconds: float
    status: int
    output: str
    errors: str


class Stranger:
    """A newcomer in a folder with the files that the README's commands name."""

    def __init__(
        self, readme: Path, examples: Path, folder: Path, environment: dict[str, str]
    ) -> None:
        self.readme = readme.read_text("utf-8")
        self.folder = folder
        self.environment = {
            **{name: value for name, value in environment.items() if not name.startswith("AWS_")},
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        shutil.copytree(examples, folder / "examples")
        config = next(text for tag, text in self.blocks if tag == "yaml")
        (folder / "aws.yaml").write_text(config, "utf-8")
        model = folder / "Llama-3.2-1B"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(CONFIG_JSON))
        (model / "tokenizer.json").write_text(json.dumps(TOKENIZER_JSON))
        (model / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
        header = b'{"__metadata__":{"format":"pt"}}'
        (model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
        (folder / "corpus").mkdir()
        (folder / "corpus/a.jsonl").write_text(json.dumps({"text": "a " * 5000}) + "\n")

    @property
    def blocks(self) -> list[tuple[str, str]]:
        """(tag, text) of the README's fenced blocks."""
        return _FENCES.findall(self.readme)

    def commands(self) -> Iterator[str]:
        """The README's smtrain commands, each alone: of `list | status JOB` the second is `smtrain
        status JOB`.
        """
        top = set(re.findall(r"^ +([a-z]+) ", self.type("smtrain --help").output, re.MULTILINE))
        for _, text in self.blocks:
            for line in re.findall(r"^(?:\$ )?(smtrain .*)$", text, re.MULTILINE):
                first, *others = re.split(r" \| ", re.split(r"\s+#|  +|;|\s\[", line)[0])
                yield first
                group = first.split()[1]
                yield from (
                    f"smtrain {'' if other.split()[0] in top else group + ' '}{other}"
                    for other in others
                )

    def type(self, command: str) -> Typed:
        began = time.monotonic()
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        return Typed(command, time.monotonic() - began, done.returncode, done.stdout, done.stderr)

    def python(self) -> Typed:
        """Run the README's Python: a whole run of the tiny model, then its train job."""
        text = next(text for tag, text in self.blocks if tag == "python")
        (self.folder / "first.py").write_text(
            f"{text}\nprint('JOB', job.name, run.loss[0], run.loss[-1])\n", "utf-8"
        )
        return self.type(f"{self.environment.get('STRANGER_PYTHON', 'python')} first.py")

    def walk(self) -> Iterator[Typed]:
        """Run everything: first commands without account and training, then the run, then commands
        that look at it.
        """
        commands = list(dict.fromkeys(self.commands()))
        looks = [c for c in commands if c.split()[1] in _ASKED or any(look in c for look in _LOOKS)]
        looks += [c for c in commands if not named(c) and c not in looks and c != "smtrain list"]
        for command in looks:
            yield self.type(self.filled(command, "aws.yaml"))
        trained = self.python()
        yield trained
        job = re.search(r"^JOB (\S+)", trained.output, re.MULTILINE)
        for command in [c for c in commands if c not in looks] if job else []:
            typed = self.type(
                self.filled(command, "examples/tiny-llama.yaml", job[1] if job else "")
            )
            yield self.advised(typed) or typed

    def advised(self, refused: Typed) -> Typed | None:
        """Run the command that a refusal suggests, as a user would; None if it suggests none."""
        advice = re.search(r"`(smtrain [^`]*)`", refused.errors)
        if refused.status != 2 or not advice:
            return None
        return self.type(advice[1].replace("FOLDER", "fetched") + " --target local")

    def filled(self, command: str, config: str, job: str = "") -> str:
        """The command with the newcomer's own names in place of the README's words in capitals."""
        if command.split()[1] in _ASKED:
            words = [word for word in command.split()[:3] if re.fullmatch(r"[a-z]+", word)]
            return f"{' '.join(words)} --help"
        on_aws = any(look in command for look in _ON_AWS)
        local = named(command) and not on_aws and not any(look in command for look in _LOOKS)
        text = command.replace("CONFIG", config).replace("JOB", job).replace("FOLDER", "fetched")
        return text + (" --target aws" if on_aws else " --target local" if local else "")


def named(command: str) -> bool:
    """True if the command names a config or a job that the newcomer has to provide."""
    return bool(_PLACEHOLDER.search(command))


def faults(typed: Typed) -> list[str]:
    """Output that a newcomer would see as a failure."""
    problems = []
    if typed.status != 0:
        problems.append(f"exited with {typed.status}")
    if "Traceback (most recent call last)" in typed.output + typed.errors:
        problems.append("showed a traceback")
    if not (typed.output + typed.errors).strip():
        problems.append("said nothing")
    return problems


def main(readme: str, examples: str, folder: str) -> int:
    """Print one line per command; return the number of failures."""
    Path(folder).mkdir(parents=True)
    stranger = Stranger(Path(readme), Path(examples), Path(folder), dict(os.environ))
    failed = 0
    for typed in stranger.walk():
        wrong = faults(typed)
        failed += bool(wrong)
        print(
            f"{'FAILED' if wrong else 'ok':6} {typed.seconds:6.1f} s  {typed.command}", flush=True
        )
        if wrong:
            print(f"       {', '.join(wrong)}\n{typed.output[-2000:]}{typed.errors[-2000:]}")
    return failed


if __name__ == "__main__":
    sys.exit(min(1, main(*sys.argv[1:4])))
