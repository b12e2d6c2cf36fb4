"""The engine uses what contract.py lists, and the library has it."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import smtrain.worker.engine.nxd as package
from smtrain.worker.engine.nxd.contract import METHODS, PIPELINE, USED
from tests.worker.engine.nxd import shim

SOURCES = sorted(Path(package.__file__).parent.glob("*.py"))
LIBRARY = "neuronx_distributed"


def uses(path: Path) -> Iterator[tuple[str, set[str], int]]:
    """(module:name, arguments by name, number of arguments by position) of each use in a file."""
    tree = ast.parse(path.read_text())
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == LIBRARY:
            for alias in node.names:
                full = f"{node.module}:{alias.name}"
                names[alias.asname or alias.name] = full
                if f"{node.module}.{alias.name}" not in {key.split(":")[0] for key in USED}:
                    yield full, set(), 0
        assert not (
            isinstance(node, ast.Import)
            and any(a.name.split(".")[0] == LIBRARY for a in node.names)
        ), path
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in names
        ):
            full = names[node.value.id].replace(":", ".")
            if full in {key.split(":")[0] for key in USED}:
                yield f"{full}:{node.attr}", set(), 0
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
            keywords = {keyword.arg for keyword in node.keywords if keyword.arg is not None}
            yield names[node.func.id], keywords, len(node.args)


def test_the_engine_uses_no_name_and_no_argument_beyond_the_list() -> None:
    used: dict[str, set[str]] = {}
    for path in SOURCES:
        for name, keywords, positional in uses(path):
            assert name in USED, f"{path.name} uses {name}, which contract.py does not list"
            most = max((int(a[1:]) for a in USED[name] if a.startswith("*")), default=0)
            assert positional <= most, (
                f"{path.name} passes {positional} arguments to {name} by position"
            )
            beyond = keywords - set(USED[name])
            assert not beyond, (
                f"{path.name} passes {beyond} to {name}, which contract.py does not list"
            )
            used.setdefault(name, set()).update(keywords)
    assert used.keys() == USED.keys(), "listed and not used"
    for name, keywords in used.items():
        assert keywords == {a for a in USED[name] if not a.startswith("*")}, (
            f"{name}: listed and not passed"
        )


def test_the_pipelines_settings_are_those_of_the_list() -> None:
    tree = ast.parse((Path(package.__file__).parent / "library_config.py").read_text())
    method = next(
        n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "_pipeline"
    )
    returned = next(n for n in ast.walk(method) if isinstance(n, ast.Return))
    assert isinstance(returned.value, ast.Dict)
    assert {key.value for key in returned.value.keys if isinstance(key, ast.Constant)} == set(
        PIPELINE
    )


@pytest.mark.nxd
def test_the_library_has_every_name_and_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess
    import sys

    # A separate process: the stand-ins are not for this one.
    environment = {**os.environ, "NXD_CPU_MODE": "1", "PJRT_DEVICE": "CPU"}
    done = subprocess.run(
        [sys.executable, "-c", "from tests.worker.engine.nxd.test_contract import hold; hold()"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def hold() -> None:
    """Raise if the library lacks a listed name or argument."""
    shim.install()
    for key, arguments in USED.items():
        module, name = key.split(":")
        signature = inspect.signature(getattr(importlib.import_module(module), name))
        takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        for argument in arguments:
            if argument.startswith("*"):
                assert len(signature.parameters) >= int(argument[1:]), key
            else:
                assert argument in signature.parameters or takes_any, (
                    f"{key} has no argument {argument}"
                )
    for key, methods in METHODS.items():
        module, name = key.split(":")
        for method in methods:
            assert hasattr(getattr(importlib.import_module(module), name), method), (
                f"{key} has no {method}"
            )
    from neuronx_distributed.pipeline.model import NxDPPModel

    for setting in PIPELINE:
        assert setting in inspect.signature(NxDPPModel.__init__).parameters, setting
