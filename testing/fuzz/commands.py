"""Commands that read a config, and what their answers must be: scripts that bash reads, JSON and
YAML that parse.
"""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Callable
from pathlib import Path

import yaml

from smtrain.core.errors import ConfigError
from smtrain.stages import STAGES
from testing.fuzz import configs
from testing.fuzz.judge import Answer, broken_rule, command

BUDGET = ("--budget", "100", "--over", "train.lr=1e-4,2e-4")


def _config(path: str, rng: random.Random) -> tuple[str, ...]:
    target = rng.choice([*[""] * 12, "local", "aws", "slurm", "pai-dlc"])
    return (path, *(("--target", target) if target else ()))


def _stage(rng: random.Random) -> tuple[str, str]:
    return "--stage", rng.choice(STAGES)


COMMANDS: dict[str, Callable[[str, random.Random], tuple[str, ...]]] = {
    "run": lambda path, rng: ("run", *_config(path, rng), "--dry-run"),
    "uploads": lambda path, rng: ("run", *_config(path, rng), "--show-uploads"),
    "launch": lambda path, rng: ("launch", *_config(path, rng), "--dry-run", *_stage(rng)),
    "check": lambda path, rng: (
        "check",
        *_config(path, rng),
        *rng.choice([(), ("--json",), _stage(rng)]),
    ),
    "plan": lambda path, rng: (
        "plan",
        *_config(path, rng),
        *rng.choice([(), ("--json",), ("--best",)]),
    ),
    "show": lambda path, _: ("config", "show", path),
    "set": lambda path, _: ("config", "set", path, "train.lr=2e-4"),
    "policy": lambda path, rng: ("iam", "policy", *_config(path, rng)),
    "pipeline": lambda path, rng: ("pipeline", *_config(path, rng)),
    "tune": lambda path, _: ("tune", path, *BUDGET, "--target", "aws", "--dry-run"),
    "template": lambda path, _: ("cluster", "template", path),
    "network": lambda path, _: ("cluster", "network", path),
    "image": lambda path, _: ("image", "build", path, "--print"),
    "serial": lambda path, rng: ("run", path, "run.yaml", "--dry-run"),
}
OF_AWS = ("policy", "pipeline", "tune", "image", "template", "network", "check")
"""Commands that a config of target local, or of two runs of one name, ends early."""
_WEIGHTS = {"run": 8, "launch": 8, "check": 5, "plan": 5, "show": 3}


def command_fault(name: str, line: tuple[str, ...], path: Path) -> str:
    """Run a command on a config; the rule that it breaks, or empty text."""
    content = path.read_bytes()
    answer = command(*line)
    if rule := broken_rule(answer):
        return rule
    if answer.status != 0:
        return "changed the file: though it refused" if path.read_bytes() != content else ""
    if name in _ANSWER_CHECKS:
        return _ANSWER_CHECKS[name](answer, path)
    return _json(answer.out) if "--json" in line else ""


def _json(text: str) -> str:
    try:
        json.loads(text, parse_constant=_no_json)
    except ValueError as error:
        return f"no JSON: {error}"
    return ""


def _no_json(word: str) -> None:
    raise ValueError(f"{word} is no JSON")


def _requests(answer: Answer, _path: Path) -> str:
    """A dry run prints JSON, or the scripts of Slurm's jobs."""
    if not answer.out.startswith("#!"):
        return _json(answer.out)
    process = subprocess.run(["bash", "-n"], input=answer.out, text=True, capture_output=True)
    return f"no script: {process.stderr}" if process.returncode or process.stderr else ""


def _yaml(answer: Answer, _path: Path) -> str:
    try:
        yaml.safe_load(answer.out)
    except yaml.YAMLError as error:
        return f"no YAML: {error}"
    return ""


def _check_round_trip(answer: Answer, path: Path) -> str:
    """`config show` prints a config that means the same."""
    from smtrain.client.planner.resolve import load_config

    copy = path.with_name("shown.yaml")
    copy.write_text(answer.out, "utf-8")
    try:
        return (
            ""
            if load_config(copy) == load_config(path)
            else "another config: config show prints other values"
        )
    except ConfigError as error:
        return f"another config: {error}"


_ANSWER_CHECKS: dict[str, Callable[[Answer, Path], str]] = {
    "run": _requests,
    "launch": _requests,
    "policy": lambda answer, _: _json(answer.out),
    "pipeline": lambda answer, _: _json(answer.out),
    "tune": lambda answer, _: _json(answer.out),
    "show": _check_round_trip,
    "template": _yaml,
    "network": _yaml,
}


class ConfigCase:
    """The case of a seed: a config and a command, in the folder of `world.make`."""

    def __init__(self, seed: int, folder: Path, names: list[str]) -> None:
        self._rng, self.folder = random.Random(seed), folder
        self.name = self._rng.choices(names, [_WEIGHTS.get(name, 1) for name in names])[0]
        self.label = f"config {seed}"

    def run(self) -> str:
        """The broken rule, or empty text; `label` is complete after it."""
        label, content = configs.mutate_config(self._rng)
        path = self.folder / "fuzz.yaml"
        path.write_bytes(content)
        line = COMMANDS[self.name]("fuzz.yaml", self._rng)
        self.label += f": {label}: {' '.join(line)}"
        return command_fault(self.name, line, path)
