"""The rooms of docs/architecture.md: every package is on the page, and imports go one way, also
inside functions.
"""

from __future__ import annotations

import collections
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import grimp
import pytest

from smtrain.core.facts import parse

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text("utf-8")
ROOMS = ("cli", "client", "core", "plane", "stages", "tools", "worker")
MODULES = ("__init__.py", "__main__.py", "version.py")
MOST_LINES = 80


def test_every_package_is_on_the_page() -> None:
    layout = PAGE.partition("## Rooms")[2].partition("\n## ")[0]
    named = set(re.findall(r"^ +(?:\w+/ )*(\w+)/", layout, re.M)) | set(
        re.findall(r"(\w+)/", layout)
    )
    packages = {path.parent.name for path in (ROOT / "smtrain").glob("*/*/__init__.py")}
    assert packages | set(ROOMS) <= named, "docs/architecture.md does not name them"
    assert PAGE.count("\n") <= MOST_LINES


def test_the_package_has_seven_rooms() -> None:
    inside = [path for path in (ROOT / "smtrain").iterdir() if path.name != "__pycache__"]
    assert sorted(path.name for path in inside if path.is_dir()) == sorted(ROOMS)
    assert sorted(path.name for path in inside if path.suffix == ".py") == sorted(MODULES)


FLOORS = ("client", "worker", "worker.data", "worker.checkpoint")
"""Packages with their own contract."""


def test_the_contracts_have_no_exceptions() -> None:
    contracts = parse((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    layers = contracts[0]
    floors = [contract for contract in contracts[1:] if contract["type"] == "layers"]
    forbidden = [contract for contract in contracts if contract["type"] == "forbidden"]
    assert len(contracts) == 1 + len(floors) + len(forbidden)
    assert set(re.findall(r"\w+", " ".join(layers["layers"]))) == {*ROOMS, "__main__", "version"}
    assert [contract["containers"] for contract in floors] == [
        [f"smtrain.{name}"] for name in FLOORS
    ]
    assert all(contract["exhaustive"] for contract in (layers, *floors))
    assert [contract["source_modules"] for contract in forbidden] == [
        ["smtrain.client"],
        ["smtrain.worker"],
    ]
    assert not any(contract.get("ignore_imports") for contract in contracts)


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    """Imports of the package, those inside functions included, without those for type checkers."""
    return grimp.build_graph("smtrain", exclude_type_checking_imports=True, cache_dir=None)


def test_there_is_no_cycle(graph: grimp.ImportGraph) -> None:
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert cycles(imports) == []


def test_a_cycle_is_found() -> None:
    assert cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [{"b", "c"}]


def cycles(imports: Mapping[str, set[str]]) -> list[set[str]]:
    """Groups of modules that import each other."""
    reached = {module: _reached(imports, module) for module in imports}
    groups = [
        frozenset(other for other in reached[module] if module in reached[other])
        for module in imports
    ]
    return [set(group) for group in dict.fromkeys(groups) if group]


def _reached(imports: Mapping[str, set[str]], module: str) -> set[str]:
    modules: set[str] = set()
    waiting = [*imports[module]]
    while waiting:
        if (one := waiting.pop()) not in modules:
            modules.add(one)
            waiting += imports[one]
    return modules


def test_entry_scripts_import_only_what_a_job_gets() -> None:
    words = r"^\s*(?:from|import) smtrain\.(\w+)"
    rooms = {
        room
        for path in (ROOT / "entrypoints").glob("*.py")
        for room in re.findall(words, path.read_text(), re.M)
    }
    assert rooms <= {"core", "stages", "worker", "version"}


WRONG = (
    ("core/config/units.py", "smtrain.stages"),
    ("core/errors.py", "smtrain.plane.client"),
    ("stages/fetch.py", "smtrain.client.launch"),
    ("stages/train.py", "smtrain.worker.train"),
    ("plane/client.py", "smtrain.client.launch"),
    ("plane/docker.py", "smtrain.worker.train"),
    ("worker/data/summary.py", "smtrain.client.planner"),
    ("worker/data/manifest.py", "smtrain.plane.client"),
    ("worker/train/loop.py", "smtrain.tools.report"),
    ("client/planner/cost.py", "smtrain.worker.data"),
    ("client/launch/request.py", "smtrain.plane.server"),
    ("client/launch/inputs.py", "smtrain.tools.report"),
    ("client/planner/plan.py", "torch"),
    ("client/planner/plan.py", "smtrain.client.preflight.checks"),
    ("client/follow/job_cost.py", "smtrain.client.planner.cost"),
    ("client/prices.py", "smtrain.client.backends.base"),
    ("client/launch/request.py", "smtrain.client.runs.launch"),
    ("client/backends/slurm/checks.py", "smtrain.client.preflight.checks"),
    ("worker/data/read/split_files.py", "smtrain.worker.train.loop"),
    ("worker/data/checksums.py", "smtrain.worker.checkpoint.open"),
    ("worker/data/manifest.py", "smtrain.worker.data.read.hub"),
    ("worker/data/read/split_files.py", "smtrain.worker.data.clean.dedup"),
    ("worker/data/clean/dedup.py", "smtrain.worker.data.tokenize.samples"),
    ("worker/data/tokenize/samples.py", "smtrain.worker.data.pack.exchange"),
    ("worker/data/pack/exchange.py", "smtrain.worker.data.prepare.sft"),
    ("worker/checkpoint/storage.py", "smtrain.worker.checkpoint.torch_files.zip"),
    ("worker/checkpoint/torch_files/zip.py", "smtrain.worker.checkpoint.huggingface.folder"),
    ("worker/checkpoint/huggingface/folder.py", "smtrain.worker.checkpoint.native.reader"),
    ("worker/checkpoint/native/reader.py", "smtrain.worker.checkpoint.megatron.names"),
    ("worker/checkpoint/megatron/names.py", "smtrain.worker.checkpoint.nemo_megatron.names"),
    ("worker/checkpoint/nemo_megatron/names.py", "smtrain.worker.checkpoint.open"),
    ("worker/checkpoint/open.py", "smtrain.worker.checkpoint.export"),
    ("tools/report/page.py", "smtrain.cli"),
)
"""A module, and its forbidden imports."""


def test_a_wrong_import_is_refused_in_each_direction(tmp_path: Path) -> None:
    for folder in ("smtrain", "entrypoints"):
        shutil.copytree(
            ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "*.yaml")
        )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for file, wrong in WRONG:
        with (tmp_path / "smtrain" / file).open("a") as out:
            out.write(
                f"\n\ndef wrong() -> object:\n    import {wrong} as wrong\n\n    return wrong\n"
            )
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert f"Contracts: 0 kept, {3 + len(FLOORS)} broken." in done.stdout
    shown = re.sub(r"\s+", " ", done.stdout)
    for file, wrong in WRONG:
        module = "smtrain." + file.removesuffix(".py").replace("/", ".")
        assert re.search(rf"{re.escape(module)} -> {re.escape(wrong)}", shown), (module, wrong)


def test_no_class_name_stands_twice() -> None:
    counts = collections.Counter(
        name
        for path in (ROOT / "smtrain").rglob("*.py")
        for name in re.findall(r"^class (\w+)", path.read_text("utf-8"), re.M)
    )
    assert [name for name, count in counts.items() if count > 1] == []
