"""The requirements of containers and those of pip are one list (deptry compares it with the
imports).
"""

from __future__ import annotations

import re
import runpy
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import smtrain
from smtrain.core.extras import MODULES
from smtrain.core.facts import table
from smtrain.core.protocol.entrypoints import EXTRAS, packages

try:
    import tomllib
except ImportError:
    import tomli as tomllib  # type: ignore[no-redef]

REPOSITORY = Path(__file__).parents[2]
# Every image with a Neuron runtime has its own build; the launcher needs it only in those images.
OF_THE_IMAGE = {"torch", "packaging"}
_MODULE = {"fasttext-predict": "fasttext"}


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    return project


def by_name(lines: list[str]) -> dict[str, Requirement]:
    return {canonicalize_name(r.name): r for r in map(Requirement, lines)}


def of_the_file(name: str) -> dict[str, Requirement]:
    text = (REPOSITORY / "entrypoints" / name).read_text().replace("\\\n", " ")
    lines = [re.split(r"\s--hash|#", line)[0].strip() for line in text.splitlines()]
    return by_name([line for line in lines if line])


def test_containers_ask_for_what_the_extra_train_asks_for(project: dict[str, Any]) -> None:
    train = by_name(
        [*project["optional-dependencies"]["train"], *project["optional-dependencies"]["eval"]]
    )
    of_data = by_name(
        [line for extra in EXTRAS.values() for line in project["optional-dependencies"][extra]]
    )
    declared = by_name(project["dependencies"]) | train | of_data
    required, travelling = of_the_file("requirements.txt"), of_the_file("wheels.txt")
    for name, requirement in required.items():
        assert str(requirement.specifier) == str(declared[name].specifier), (
            f"{name} of entrypoints/requirements.txt"
        )
    assert of_data.keys() <= required.keys()
    for need, extra in EXTRAS.items():
        listed = packages(REPOSITORY / "entrypoints/requirements.txt", need)
        assert {*listed} == {
            r.name for r in map(Requirement, project["optional-dependencies"][extra])
        }, need
        modules = {_MODULE.get(name, name.replace("-", "_")) for name in listed}
        assert modules == {*MODULES[extra]}, f"{extra} in smtrain/core/extras.py"
    assert train.keys() - required.keys() - travelling.keys() == OF_THE_IMAGE
    for name, pinned in travelling.items():
        [version] = pinned.specifier
        if name in declared:
            assert declared[name].specifier.contains(version.version), (
                f"{name} of entrypoints/wheels.txt"
            )


def test_every_python_has_its_wheels_and_its_classifier(project: dict[str, Any]) -> None:
    pythons: list[str] = table("images")["contents"]["pythons"]
    dotted = [f"{python[0]}.{python[1:]}" for python in pythons]
    named = [line.rpartition(" ")[2] for line in project["classifiers"] if "Python :: 3." in line]
    assert named == dotted
    assert project["requires-python"] == f">={dotted[0]},<3.{int(pythons[-1][1:]) + 1}"
    text = (REPOSITORY / "entrypoints/wheels.txt").read_text()
    assert f"(CPython {dotted[0]} to {dotted[-1]}, x86_64 and aarch64)" in text
    for name in (
        "awkward-cpp",
        "zlib-ng",
    ):  # one wheel for each Python and architecture; every other wheel fits all
        entry = text.partition(f"\n{name}==")[2].partition("#")[0]
        assert entry.count("--hash=sha256:") == 2 * len(pythons), name


def test_every_requirement_has_a_floor(project: dict[str, Any]) -> None:
    extras: dict[str, list[str]] = project["optional-dependencies"]
    for line in [
        *project["dependencies"],
        *(line for name in extras if name != "dev" for line in extras[name]),
    ]:
        requirement = Requirement(line)
        floors = {specifier.operator for specifier in requirement.specifier}
        assert ">=" in floors or canonicalize_name(requirement.name) == "smtrain", line


def test_the_version_stands_in_one_place(project: dict[str, Any]) -> None:
    assert "version" in project["dynamic"]
    assert metadata.version("smtrain") == smtrain.__version__
    first = next(
        line
        for line in (REPOSITORY / "CHANGELOG.md").read_text().splitlines()
        if line.startswith("## ")
    )
    assert first.split()[1] == smtrain.__version__
    hook: dict[str, Any] = runpy.run_path(str(REPOSITORY / "scripts/docs_version.py"))
    assert hook["version"]() == smtrain.__version__
