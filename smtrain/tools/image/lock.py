"""Pin the packages that an image lacks to exact releases and hashes of their wheels.

pip names the newest release of each that fits the image's Python; their own requirements are
resolved the same way, unless the image has them. The image's packages, which were made for each
other, are never replaced.
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

from smtrain.client.launch import wheels
from smtrain.core.errors import LocalError

SECONDS = 300
ROUNDS = 30


@dataclass(frozen=True)
class Interpreter:
    """The Python of an image, in pip's terms."""

    python: str
    """Its version, 3.12.3."""
    machine: str

    def options(self) -> list[str]:
        """Options with which pip chooses wheels for it."""
        return wheels.pip_options(".".join(self.python.split(".")[:2]), self.machine)

    def environment(self) -> dict[str, str]:
        """Variables for the markers of requirements."""
        return {
            **{key: str(value) for key, value in default_environment().items()},
            "python_version": ".".join(self.python.split(".")[:2]),
            "python_full_version": self.python,
            "platform_machine": self.machine,
            "sys_platform": "linux",
            "os_name": "posix",
            "platform_system": "Linux",
            "implementation_name": "cpython",
            "platform_python_implementation": "CPython",
            "implementation_version": self.python,
        }


@dataclass(frozen=True)
class Pin:
    """A release of a package and the chosen wheel."""

    name: str
    version: str
    sha256: str

    def __str__(self) -> str:
        return f"{self.name}=={self.version} \\\n    --hash=sha256:{self.sha256}"


def resolve(
    missing_requirements: list[str], has: dict[str, str], interpreter: Interpreter
) -> list[Pin]:
    """Pin everything that an image lacks.

    `missing_requirements` are requirements, `has` the image's packages and versions. Raises
    `LocalError` if pip finds no release that fits, or one conflicts with a package of the image.
    """
    requirements: dict[str, Requirement] = {}
    for line in missing_requirements:
        _add(
            requirements,
            Requirement(line.partition("#")[0].strip()),
            has,
            "smtrain",
            interpreter,
            is_missing=True,
        )
    for _ in range(ROUNDS if requirements else 0):
        previous_texts = {name: str(requirement) for name, requirement in requirements.items()}
        report = _report(list(previous_texts.values()), interpreter)
        for entry in report:
            metadata = entry["metadata"]
            extras = requirements[canonicalize_name(metadata["name"])].extras or {""}
            for text in metadata.get("requires_dist") or []:
                try:
                    need = Requirement(text)
                except InvalidRequirement:
                    continue
                environment = interpreter.environment()
                if need.marker is None or any(
                    need.marker.evaluate({**environment, "extra": e}) for e in extras
                ):
                    _add(
                        requirements,
                        need,
                        has,
                        f"{metadata['name']} {metadata['version']}",
                        interpreter,
                    )
        if {name: str(requirement) for name, requirement in requirements.items()} == previous_texts:
            return sorted((_pin(entry) for entry in report), key=lambda pin: pin.name)
    if requirements:
        raise LocalError(
            f"what {', '.join(missing_requirements)} need was not settled in {ROUNDS} rounds"
        )
    return []


def _add(
    requirements: dict[str, Requirement],
    need: Requirement,
    has: dict[str, str],
    by: str,
    interpreter: Interpreter,
    *,
    is_missing: bool = False,
) -> None:
    """Want a package too, unless the image has it."""
    name = canonicalize_name(need.name)
    need.marker = None
    if name in has and not is_missing:
        if not need.specifier.contains(has[name], prereleases=True):
            raise LocalError(
                f"{by} needs {need}, and the image is built around {name}"
                f" {has[name]}; choose another base image"
            )
        return
    if name in has:
        raise LocalError(
            f"the image has {name} {has[name]}, and the stages need {need}; choose a newer base"
            " image, as its packages are never replaced"
        )
    old = requirements.get(name)
    if old is not None:
        need.extras = need.extras | old.extras
        need.specifier = SpecifierSet(
            ",".join(sorted({*map(str, need.specifier), *map(str, old.specifier)}))
        )
    requirements[name] = need


def _pin(entry: dict[str, Any]) -> Pin:
    metadata = entry["metadata"]
    return Pin(
        canonicalize_name(str(metadata["name"])),
        str(metadata["version"]),
        entry["download_info"]["archive_info"]["hashes"]["sha256"],
    )


def _report(requirements: list[str], interpreter: Interpreter) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        text = _pip(
            "install",
            "--dry-run",
            "--ignore-installed",
            "--no-deps",
            "--report=-",
            f"--target={folder}",
            *interpreter.options(),
            *requirements,
        )
    report: list[dict[str, Any]] = json.loads(text)["install"]
    return report


def download(lock: Path, interpreter: Interpreter, folder: Path) -> list[Path]:
    """Download the wheels of a lock file with pip, which checks their hashes.

    Raises `LocalError`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _pip(
        "download",
        "--no-deps",
        "--require-hashes",
        f"--dest={folder}",
        f"--requirement={lock}",
        *interpreter.options(),
    )
    return sorted(folder.glob("*.whl"))


def _pip(command: str, *arguments: str) -> str:
    try:
        return wheels.pip_run(command, *arguments, seconds=SECONDS)
    except OSError as error:
        raise LocalError(f"pip: {error}") from None
