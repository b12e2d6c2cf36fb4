"""All cases of a range of seeds, in one process."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from smtrain.client.planner import probing
from smtrain.core.config.compute import MachineEntry
from smtrain.plane.client import shut_down
from testing.fuzz import commands, samples, world
from testing.fuzz.forms import LIGHT, Form
from testing.fuzz.inputs import InputCase, Inputs
from testing.fuzz.judge import Case, Fault, command, judge_case, offline


@dataclass
class Totals:
    """Counts and faults of all cases."""

    show: bool = False
    configs: int = 0
    inputs: int = 0
    cpu: float = 0.0
    slowest: float = 0.0
    faults: list[Fault] = field(default_factory=list)

    def add(self, case: Case) -> None:
        """Judge a case."""
        fault, took = judge_case(case)
        if self.show:
            sys.stderr.write(f"{case.label} ({took:.2f} s)\n")
        self.cpu += took
        self.slowest = max(self.slowest, took)
        if fault:
            self.faults.append(fault)
            sys.stderr.write(f"{fault.case}: {fault.kind}\n")


class World:
    """A folder with the inputs of all cases; the working directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = world.make(folder)
        os.chdir(folder)
        shutil.copytree(
            "model", Path(os.environ["SMTRAIN_HOME"], "demo/tiny-llama")
        )  # else a case would make it
        (folder / "run.yaml").write_text(yaml.safe_dump(samples.valid("local", "pretrain")))
        (folder / "talks.yaml").write_text(yaml.safe_dump(samples.valid("local", "sft")))
        (folder / "aws.yaml").write_text(yaml.safe_dump(samples.valid("aws", "pretrain")))
        self._ready: set[str] = set()

    def configs(
        self, seeds: Iterable[int], totals: Totals, skipped_names: Collection[str] = ()
    ) -> None:
        """Try mutated configs, on all commands but `skipped_names`."""
        names = [name for name in commands.COMMANDS if name not in skipped_names]
        for seed in seeds:
            case = commands.ConfigCase(seed, self.folder, names)
            self._start(case.name)
            totals.add(case)
            totals.configs += 1

    def _start(self, name: str) -> None:
        """Call a command once with a valid config, so that no case pays for its imports."""
        if name not in self._ready:
            self._ready.add(name)
            if name == "check":  # which starts the local control plane, and renders conversations
                for file in ("run.yaml", "talks.yaml"):
                    command("check", file, "--target", "local")
            file = "aws.yaml" if name in commands.OF_AWS else "run.yaml"
            answer = command(*commands.COMMANDS[name](file, random.Random(0)))
            assert answer.status == 0 or name in ("check", "serial", "template"), (name, answer)

    def inputs(self, seeds: Iterable[int], totals: Totals, names: Collection[str] = ()) -> None:
        """Try damaged inputs of all forms, or of those named."""
        forms = LIGHT if LIGHT.keys() >= set(names) and names else {**LIGHT, **_heavy()}
        forms = {name: form for name, form in forms.items() if name in (names or forms)}
        if "prepared" in forms:
            command(
                "data", "prepare", "pretrain", "whole-tokens", "--model", "model", "--seq-len", "32"
            )
        inputs = Inputs(forms, self.folder)
        for seed in seeds:
            totals.add(InputCase(seed, inputs, sorted(forms)))
            totals.inputs += 1


@contextlib.contextmanager
def world_of(folder: Path, patch: Any) -> Iterator[World]:
    """A world in a new folder, as the working directory, with a home for smtrain."""
    patch.setenv("SMTRAIN_HOME", str(folder / "home"))
    patch.setenv("HOME", str(folder))
    patch.chdir(folder)
    patch.setattr(
        probing, "_measure", lambda *_: MachineEntry(**samples.BOX)
    )  # it would take seconds of a case
    with offline(folder, patch):
        try:
            yield World(folder / "a/world")
        finally:
            shut_down()  # the control plane that `check` may have started


def _heavy() -> dict[str, Form]:
    from testing.fuzz.weights import HEAVY  # imports torch

    return HEAVY
