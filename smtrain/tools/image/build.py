"""Build an image with every package that the stages import, so that its jobs install nothing."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name

from smtrain.client.launch import wheels
from smtrain.client.launch.image_inspect import ImageContents
from smtrain.core.config import Stage
from smtrain.core.errors import LocalError
from smtrain.core.facts import table
from smtrain.core.facts.images import contents_known, torch_of
from smtrain.core.files import only_writer, replacing_files
from smtrain.core.protocol.entrypoints import WORDS, entrypoints_folder, requirements
from smtrain.core.text import Say
from smtrain.plane.docker import explain_docker_errors, sentence
from smtrain.tools.image.lock import Interpreter, Pin, download, resolve
from smtrain.version import __version__

LOCK, REQUIREMENTS = "requirements.lock", "requirements.txt"
PLACE = "/opt/smtrain"
LABEL = "smtrain.lock"
"""Label of an image built here: the first characters of its lock file's sha256."""


@dataclass(frozen=True)
class Recipe:
    """A base image and the packages that are added to it."""

    base: str
    user: str
    """The user of the base's containers; empty for root or unknown."""
    interpreter: Interpreter
    pins: tuple[Pin, ...]
    """Packages that every image needs and the base lacks."""
    extras: str
    """Entries of wheels.txt that it lacks, as pip reads them."""
    requirements: tuple[str, ...] = ()
    """Requirements of the stages, if the packages of the base are unknown: it gets those that it
    lacks.
    """

    @property
    def lock(self) -> str:
        """The lock file: exact releases and hashes."""
        head = (
            f"# What {self.base} lacks for the stages of smtrain {__version__}; from `smtrain image"
            " build`.\n"
        )
        return head + "".join(f"{pin}\n" for pin in self.pins) + self.extras

    @property
    def dockerfile(self) -> str:
        """The Dockerfile; its context also holds the lock file and the folder wheels."""
        as_root, restore_user = (
            ("USER root\n", f"USER {self.user}\n")
            if self.user not in ("", "root", "0")
            else ("", "")
        )
        head = (
            f"# From `smtrain image build` ({__version__}): jobs from this image install nothing at"
            " start.\n"
        )
        if self.requirements:
            # pip leaves a package that satisfies a requirement alone; the constraints keep it from
            # replacing the rest.
            return (
                f"{head}# What {self.base} has is unknown here: its own packages stay, and it gets"
                f" missing ones.\nFROM {self.base}\n{as_root}COPY {LOCK} {REQUIREMENTS}"
                f" {PLACE}/\nCOPY wheels {PLACE}/wheels\nRUN python3 -m pip list"
                f" --disable-pip-version-check --format=freeze >{PLACE}/had.txt \\\n    &&"
                " PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --no-cache-dir \\\n     "
                f" --disable-pip-version-check --no-index --find-links={PLACE}/wheels \\\n      -c"
                f" {PLACE}/had.txt -r {PLACE}/{REQUIREMENTS} \\\n    && rm -rf"
                f" {PLACE}/wheels\n{restore_user}"
            )
        install = (
            "RUN PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --no-cache-dir"
            f" --disable-pip-version-check \\\n      --no-index --find-links={PLACE}/wheels"
            f" --no-deps --require-hashes -r {PLACE}/{LOCK} \\\n    && rm -rf {PLACE}/wheels\n"
        )
        return (
            f"{head}FROM {self.base}\n{as_root}COPY {LOCK} {PLACE}/{LOCK}\nCOPY wheels"
            f" {PLACE}/wheels\n{install}{restore_user}"
        )

    def write(self, folder: Path, say: Say) -> None:
        """Replace the build context in a folder: Dockerfile, lock file, wheels.

        Raises `LocalError` if a wheel is missing, or if another process writes them.
        """
        with (
            only_writer(folder / LOCK, LocalError),
            replacing_files(folder, LOCK, "Dockerfile", REQUIREMENTS, "wheels") as new,
        ):
            (new / "Dockerfile").write_text(self.dockerfile, "utf-8")
            (new / LOCK).write_text(self.lock, "utf-8")
            if self.requirements:
                (new / REQUIREMENTS).write_text(
                    "".join(f"{line}\n" for line in self.requirements), "utf-8"
                )
            say(
                f"downloading {self.count} wheels for Python {self.interpreter.python} on"
                f" {self.interpreter.machine}"
            )
            download(new / LOCK, self.interpreter, new / "wheels")

    @property
    def count(self) -> int:
        """Number of packages to add."""
        return len(self.pins) + self.extras.count("==")


def recipe(
    base: str,
    stages: Sequence[Stage],
    contents: ImageContents | None,
    user: str = "",
    needs: Sequence[str] = (),
) -> Recipe:
    """The packages to add to a base for these stages and for their data
    (core/protocol/entrypoints.py).

    Without `contents` the base is not here; the table of AWS's images says of older ones that they
    lack the wheels and the packages of `needs`. Raises `LocalError` if the base cannot be
    completed.
    """
    if contents is None:
        python = wheels.pythons(base)
        if len(python) > 1:
            raise LocalError(
                f"image {base} is not on this machine, and its name does not tell its Python"
                f" (py312): `smtrain image pull {base}` first, to look into it"
            )
        interpreter = Interpreter(
            f"3.{python[0][1:]}.0", table("images")["contents"]["architecture"]
        )
        if not contents_known(base):
            return _recipe_for_unknown_base(base, user, stages, needs, interpreter)
        return Recipe(
            base,
            user,
            interpreter,
            _standalone_pins(base, needs, interpreter),
            _extras(stages, None),
        )
    if "torch" not in contents.packages:
        raise LocalError(
            f"image {base} has no torch, which is not added; build on one that has (`smtrain"
            " images`)"
        )
    interpreter = Interpreter(contents.python, contents.machine)
    words = [*stages, *(WORDS[need] for need in needs)]
    missing_requirements = {
        line.partition("#")[0].strip()
        for word in words
        for line in contents.lacking["requirements"][word]
    }
    extras = _extras(stages, contents)
    travelling = [line.split()[0] for line in extras.splitlines() if "==" in line]
    # Wheels of wheels.txt are locked already, by the hashes for every Python; their own
    # requirements are not.
    pins = resolve([*sorted(missing_requirements), *travelling], contents.packages, interpreter)
    locked_names = {canonicalize_name(line.partition("==")[0]) for line in travelling}
    return Recipe(
        base, user, interpreter, tuple(pin for pin in pins if pin.name not in locked_names), extras
    )


def _recipe_for_unknown_base(
    base: str, user: str, stages: Sequence[Stage], needs: Sequence[str], interpreter: Interpreter
) -> Recipe:
    """A recipe for a base whose packages are unknown, but for torch: the wheels of all that the
    stages may lack.
    """
    file, words = (
        entrypoints_folder() / "requirements.txt",
        [
            *stages,
            *(WORDS[need] for need in needs),
        ],
    )
    lines = sorted({line for word in words for line in requirements(file, word)})
    extras = _extras(stages, None)
    travelling = [line.split()[0] for line in extras.splitlines() if "==" in line]
    locked_names = {canonicalize_name(line.partition("==")[0]) for line in travelling}
    pins = resolve([*lines, *travelling], {"torch": torch_of(base)}, interpreter)
    requirement_lines = tuple(sorted({*lines, *locked_names}))
    return Recipe(
        base,
        user,
        interpreter,
        tuple(pin for pin in pins if pin.name not in locked_names),
        extras,
        requirement_lines,
    )


def _standalone_pins(base: str, needs: Sequence[str], interpreter: Interpreter) -> tuple[Pin, ...]:
    """The pins of packages without their requirements: those would depend on the base's
    packages, which are not known and must not change.
    """
    lines = [
        line
        for need in needs
        for line in requirements(entrypoints_folder() / "requirements.txt", WORDS[need])
    ]
    pins = resolve(lines, {}, interpreter)
    if len(pins) > len(lines):
        raise LocalError(
            f"{' and '.join(needs)}: what {', '.join(lines)} need in turn depends on the packages"
            f" of image {base}, which is not on this machine; `smtrain image pull {base}` first, to"
            " look into it"
        )
    return tuple(pins)


def _extras(stages: Sequence[Stage], contents: ImageContents | None) -> str:
    """The entries of wheels.txt for these stages that the image lacks."""
    entries = []
    for entry in wheels.lock_file().read_text("utf-8").replace("\\\n", "\\\0").splitlines():
        head, _, comment = entry.partition("#")
        name = head.partition("==")[0].strip()
        if (
            "==" in head
            and set(comment.split()) & set(stages)
            and not (contents and name in contents.packages)
        ):
            entries.append(head.rstrip().replace("\\\0", "\\\n") + "\n")
    return "".join(entries)


def build(client: Any, recipe: Recipe, tag: str, say: Say) -> Any:
    """Build the image and tag it. Raises `LocalError` with the step that failed."""
    with tempfile.TemporaryDirectory(prefix="smtrain-image-") as context:
        recipe.write(Path(context), say)
        last = ""
        with explain_docker_errors(f"building {tag}"):
            steps = client.api.build(
                path=context,
                tag=tag,
                rm=True,
                forcerm=True,
                decode=True,
                network_mode="none",
                labels={LABEL: recipe_hash(recipe)},
            )
            for step in steps:
                text = str(step.get("stream") or "").strip()
                if "error" in step:
                    raise LocalError(
                        f"building {tag} failed: {sentence(RuntimeError(step['error']), last)}"
                    )
                if text.startswith("Step "):
                    last = text
                    say(f"  {text}")
        return client.images.get(tag)


def recipe_hash(recipe: Recipe) -> str:
    """A digest of the packages that are added."""
    return hashlib.sha256(recipe.lock.encode()).hexdigest()[:16]
