"""Workers of xdist are forks of a Python that has imported the test files."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from smtrain.plane.client import EXTENSION
from tests import forked_workers


def test_each_worker_of_xdist_is_a_fork() -> None:
    command = Path("/proc/self/cmdline").read_text()
    is_measured = any(name.startswith("COV_CORE") for name in os.environ)
    is_worker = "PYTEST_XDIST_WORKER" in os.environ and not is_measured
    assert ("tests/forked_workers.py" in command) == is_worker


def test_a_worker_has_the_variables_that_imports_set() -> None:
    importlib.import_module("testing.plane")  # which set it, here or before the fork
    assert os.environ[EXTENSION] == "testing.synthetic"


def test_arguments_lead_to_the_files_that_pytest_collects() -> None:
    folder = Path(__file__).parent
    this_file = folder.relative_to(forked_workers.ROOT) / "test_forked_workers.py::test_a"
    (found,) = forked_workers.find_files([str(this_file)], forked_workers.ROOT, ["test_*.py"])
    assert found == Path(__file__)
    files = set(forked_workers.find_files(["tests/scripts"], forked_workers.ROOT, ["test_*.py"]))
    assert files == set(folder.glob("test_*.py"))


@pytest.mark.parametrize("option", [{"cov_source": ["smtrain"]}, {"tx": []}, {}])
def test_workers_make_their_imports_if_forks_cannot(
    option: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With coverage, without workers, and if the Python that imports ends."""
    monkeypatch.setattr(sys, "executable", "false")
    endings: list[Any] = []
    options = SimpleNamespace(**{"tx": ["popen", "popen"], **option})
    config: Any = SimpleNamespace(
        option=options,
        invocation_params=SimpleNamespace(args=["tests"]),
        add_cleanup=endings.append,
    )
    before = list(options.tx)
    forked_workers.use(config)
    assert options.tx == before
    for end in endings:
        end()
    assert "SMTRAIN_WARM_ROOM" not in os.environ


ENDS: list[str | None] = []


@pytest.fixture(scope="class")
def library_with_variables() -> Iterator[None]:
    os.environ["TESTS_LIBRARY"] = "set"
    yield
    ENDS.append(os.environ.get("TESTS_LIBRARY"))


class TestVariablesOfALibrary:
    def test_last_as_long_as_the_fixture_that_loads_it(self, library_with_variables: None) -> None:
        assert os.environ["TESTS_LIBRARY"] == "set"


def test_variables_of_a_library_end_after_the_fixture_that_loads_it() -> None:
    """Otherwise all later commands of this worker would import everything again."""
    assert "TESTS_LIBRARY" not in os.environ
    assert set(ENDS) <= {"set"}, "the fixture still has them when it ends"
