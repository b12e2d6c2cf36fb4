"""What an image lacks, as exact releases with the hashes of their wheels; nothing that it has is ever moved.

pip names the newest release of each that fits the image's Python; what those need in turn is asked the same way, unless
the image has it. So the packages of the image, which were made for each other, stay as they are.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.markers import default_environment
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from smtrain.client.launch import pip
from smtrain.core.errors import LocalError

SECONDS = 300
ROUNDS = 30


@dataclass(frozen=True)
class Interpreter:
    """The Python of an image, as pip is told of it."""

    python: str
    """Its version, 3.12.3."""
    machine: str

    def options(self) -> list[str]:
        """Options of pip that choose wheels for it."""
        return pip.options(".".join(self.python.split(".")[:2]), self.machine)

    def environment(self) -> dict[str, str]:
        """What markers of requirements ask for."""
        return {
            **{key: str(value) for key, value in default_environment().items()},
            "python_version": ".".join(self.python.split(".")[:2]), "python_full_version": self.python,
            "platform_machine": self.machine, "sys_platform": "linux", "os_name": "posix",
            "platform_system": "Linux", "implementation_name": "cpython",
            "platform_python_implementation": "CPython", "implementation_version": self.python,
        }  # fmt: skip


@dataclass(frozen=True)
class Pin:
    """One release of a package, and the wheel that was chosen."""

    name: str
    version: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.name}=={self.version} \\\n    --hash=sha256:{self.sha256}"


def resolve(lacking: list[str], has: dict[str, str], interpreter: Interpreter) -> list[Pin]:
    """The pins that make an image whole.

    `lacking` are requirements, `has` the image's packages and versions. Raises `LocalError` where pip finds no release
    that fits, or one needs another release of what the image has.
    """
    asked: dict[str, Requirement] = {}
    for line in lacking:
        _add(asked, Requirement(line.partition("#")[0].strip()), has, "smtrain", interpreter, told_to_be_lacking=True)
    for _ in range(ROUNDS if asked else 0):
        before = {name: str(requirement) for name, requirement in asked.items()}
        found = _report(list(before.values()), interpreter)
        for entry in found:
            told = entry["metadata"]
            extras = asked[canonicalize_name(told["name"])].extras or {""}
            for text in told.get("requires_dist") or []:
                try:
                    need = Requirement(text)
                except InvalidRequirement:
                    continue
                environment = interpreter.environment()
                if need.marker is None or any(need.marker.evaluate({**environment, "extra": e}) for e in extras):
                    _add(asked, need, has, f"{told['name']} {told['version']}", interpreter)
        if {name: str(requirement) for name, requirement in asked.items()} == before:
            return sorted((_pin(entry) for entry in found), key=lambda pin: pin.name)
    if asked:
        raise LocalError(f"what {', '.join(lacking)} need was not settled in {ROUNDS} rounds")
    return []


def _add(
    asked: dict[str, Requirement], need: Requirement, has: dict[str, str], by: str, interpreter: Interpreter, *,
    told_to_be_lacking: bool = False,
) -> None:  # fmt: skip
    """Ask for a package too, unless the image has it."""
    name = canonicalize_name(need.name)
    need.marker = None
    if name in has and not told_to_be_lacking:
        if not need.specifier.contains(has[name], prereleases=True):
            raise LocalError(
                f"{by} needs {need}, and the image has {name} {has[name]}, which belongs to what it was made for; "
                "choose another base image"
            )
        return
    if name in has:
        raise LocalError(
            f"the image has {name} {has[name]}, and the stages need {need}; choose a newer base image, as what it has "
            "is never replaced"
        )
    old = asked.get(name)
    if old is not None:
        need.extras = need.extras | old.extras
        need.specifier = SpecifierSet(",".join(sorted({*map(str, need.specifier), *map(str, old.specifier)})))
    asked[name] = need


def _pin(entry: dict[str, Any]) -> Pin:
    told = entry["metadata"]
    return Pin(
        canonicalize_name(str(told["name"])), str(told["version"]),
        entry["download_info"]["archive_info"]["hashes"]["sha256"],
    )  # fmt: skip


def _report(requirements: list[str], interpreter: Interpreter) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        text = _pip(
            "install", "--dry-run", "--ignore-installed", "--no-deps", "--report=-", f"--target={folder}",
            *interpreter.options(), *requirements,
        )  # fmt: skip
    found: list[dict[str, Any]] = json.loads(text)["install"]
    return found


def download(lock: Path, interpreter: Interpreter, folder: Path) -> list[Path]:
    """The wheels of a lock file, fetched by pip and compared with their hashes. Raises `LocalError`."""
    folder.mkdir(parents=True, exist_ok=True)
    _pip(
        "download", "--no-deps", "--require-hashes", f"--dest={folder}", f"--requirement={lock}",
        *interpreter.options(),
    )  # fmt: skip
    return sorted(folder.glob("*.whl"))


def _pip(command: str, *arguments: str) -> str:
    try:
        return pip.run(command, *arguments, seconds=SECONDS)
    except OSError as error:
        raise LocalError(f"pip: {error}") from None
