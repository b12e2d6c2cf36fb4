"""docs/architecture.md names what there is: every package, and the modules of the packages that it lists in full."""

from __future__ import annotations

import collections
import re
import shutil
import subprocess
import sys
from pathlib import Path

from smtrain.core.facts import parse

ROOT = Path(__file__).parents[2]
LAYOUT = (ROOT / "docs/architecture.md").read_text("utf-8").partition("## The layout")[2].partition("\n## ")[0]


def sections() -> dict[str, str]:
    """What the layout says of each package, and of the modules beside them ("")."""
    found: dict[str, str] = {"": ""}
    package = ""
    for line in LAYOUT.splitlines():
        if match := re.match(r"  (\w+)/ ", line):
            package = match[1]
        elif re.match(r"  \w", line):
            package = ""
        found[package] = found.get(package, "") + line + "\n"
    return found


def test_every_package_and_module_is_in_the_layout() -> None:
    told = sections()
    packages = {path.parent.name for path in (ROOT / "smtrain").glob("*/__init__.py")}
    assert packages == set(told) - {""}
    whole = packages - {"cli", "preflight", "engine"}
    lost = [
        f"{path.parent.name}/{path.name}"
        for path in (ROOT / "smtrain").glob("*/*.py")
        if path.parent.name in whole and not path.name.startswith("_") and path.name not in told[path.parent.name]
    ]
    assert not lost, "docs/architecture.md does not name them"
    names = set(re.findall(r"\b(\w+\.py)\b", LAYOUT))
    gone = names - {path.name for path in (ROOT / "smtrain").rglob("*.py")}
    assert not gone, "docs/architecture.md names what there is not"


def test_its_floors_are_those_of_the_contract() -> None:
    page = (ROOT / "docs/architecture.md").read_text("utf-8")
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", page, re.M)
    contracts = parse((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"]
    floors = next(contract for contract in contracts if contract["name"] == "Floors")
    held = [re.split(r" [:|] ", layer) for layer in floors["layers"] if layer != "__main__"]
    told = [set(packages.split(", ")) for _, packages in rows]
    assert [int(number) for number, _ in rows] == list(range(len(rows), 0, -1))
    lowest = {name for layer in held[len(told) - 1 :] for name in layer}
    assert [*map(set, held[: len(told) - 1]), lowest] == told
    assert not floors.get("ignore_imports")


def test_wrong_imports_are_refused(tmp_path: Path) -> None:
    """Deliberately wrong imports, deep inside a function, break the contract that is about them."""
    for folder in ("smtrain", "entrypoints"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for file, line in (
        ("smtrain/core/config/units.py", "from smtrain.client.planner import api as wrong"),  # an arrow up
        ("smtrain/client/planner/cost.py", "import torch as wrong"),  # a library of the other half
        (
            "smtrain/worker/data/summary.py",
            "from smtrain.core.demo import inputs as wrong",
        ),  # what the bundle does not bring
    ):
        with (tmp_path / file).open("a") as out:
            out.write(f"\n\ndef wrong() -> object:\n    {line}\n\n    return wrong\n")
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "Contracts: 0 kept, 3 broken." in done.stdout
    for arrow in (
        "smtrain.core.config.units -> smtrain.client.planner.plan",
        "smtrain.client.planner.cost -> torch",
        "smtrain.worker.data.summary -> smtrain.core.demo.inputs",
    ):
        assert arrow in done.stdout


def test_no_class_name_stands_twice() -> None:
    found = collections.Counter(
        name
        for path in (ROOT / "smtrain").rglob("*.py")
        for name in re.findall(r"^class (\w+)", path.read_text("utf-8"), re.M)
    )
    assert [name for name, count in found.items() if count > 1] == []
