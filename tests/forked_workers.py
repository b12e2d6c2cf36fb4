"""Workers of pytest-xdist as forks of one Python that has imported all test files.

The imports take 25 CPU seconds, which each worker would spend. A worker still collects: it finds
the modules in `sys.modules`, rewritten for assertions. A file that cannot be imported is imported
again, and reported, by the worker.

    python -m tests.forked_workers serve DESCRIPTOR WORDS     imports and forks
    python -IS tests/forked_workers.py begin PREFIX NAME ...        is what xdist starts: it asks for a fork
    tests/forked_workers.py                                   is what the fork runs
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOM = 1 << 13
"""Bytes for the command lines of workers in ps and /proc."""


def use(config: pytest.Config) -> None:
    """Import the test files once, and let xdist start its workers as forks.

    Coverage must see the imports, so its workers make them.
    """
    workers = getattr(config.option, "tx", None)
    if not workers or set(workers) != {"popen"} or getattr(config.option, "cov_source", None):
        return
    listening = socket.socket(socket.AF_UNIX)
    name = f"smtrain-tests-{os.getuid()}-{secrets.token_hex(8)}"
    listening.bind(f"\0{name}")
    listening.listen()
    arguments = json.dumps([str(argument) for argument in config.invocation_params.args])
    # In the environment itself: a library may have set variables that os.environ does not show.
    os.environ["SMTRAIN_WARM_ROOM"] = "-" * 2 * ROOM
    words = ["-m", "tests.forked_workers", "serve", str(listening.fileno()), arguments, "-" * ROOM]
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        pass_fds=[listening.fileno()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    del os.environ["SMTRAIN_WARM_ROOM"]
    listening.close()

    def end() -> None:
        assert process.stdin
        assert process.stdout
        process.stdin.close()
        process.wait()
        process.stdout.close()

    config.add_cleanup(end)
    assert process.stdout
    if process.stdout.readline() == "ready\n":
        start = f"{sys.executable} -IS {Path(__file__).resolve()} begin {sys.prefix} {name}"
        config.option.tx = [f"popen//python={start}"] * len(workers)


def serve(descriptor: int, arguments: list[str]) -> None:
    """Import the files that pytest would collect with these arguments; then fork for each call."""
    environment = {k: v for k, v in os.environ.items() if k != "SMTRAIN_WARM_ROOM"}
    warm = _warm()
    gc.disable()
    before = dict(os.environ)
    import_files(arguments)
    warm.variables_of_imports = {k: v for k, v in os.environ.items() if before.get(k) != v}
    warm.preload()  # what many tests import when they run; it ends with gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # pytest ends the workers
    print("ready", flush=True)
    warm.serve(socket.socket(fileno=descriptor), environment)


def import_files(arguments: list[str]) -> None:
    """Import test files as pytest does: with its hook for assertions and its filters of warnings."""
    import warnings

    from _pytest.config import _prepareconfig, apply_warning_filters

    config = _prepareconfig([*arguments, "-s"])
    files = find_files(config.args, config.rootpath, config.getini("python_files"))
    with warnings.catch_warnings():
        apply_warning_filters(config.getini("filterwarnings"), [])
        for file in files:
            with contextlib.suppress(BaseException):  # one that skips itself, too
                importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
    # Otherwise each worker parses all modules at its first property, for values to try.
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # hypothesis expects to begin with a session
        importlib.import_module("hypothesis.internal.conjecture.providers")._get_local_constants()


def find_files(arguments: Iterable[str], folder: Path, patterns: Iterable[str]) -> Iterator[Path]:
    """Yield the test files that arguments such as `tests/core` or `tests/test_a.py::test_b` name."""
    for argument in arguments:
        path = (folder / argument.partition("::")[0]).resolve()
        files = path.rglob("*.py") if path.is_dir() else [path]
        for file in sorted(files):
            if file.is_relative_to(ROOT) and any(map(file.match, patterns)):
                yield file


def begin(prefix: str, name: str, words: list[str]) -> NoReturn:
    """Be a worker's process for xdist, while a fork is the worker; without one become it."""
    sys.prefix = prefix  # -S leaves it at the Python that the environment was made with
    copy = _warm().begin(name, [str(Path(__file__).resolve())], dict(os.environ), [0, 1, 2])
    if copy is None:
        os.execv(sys.executable, [sys.executable, *words])
    status = copy.wait()
    if status < 0:
        os.kill(os.getpid(), -status)
    os._exit(status & 0xFF)


def _warm() -> Any:
    """The module entrypoints/warm.py."""
    folder = str(ROOT / "entrypoints")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module("warm")
    finally:
        sys.path.remove(folder)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve", descriptor, arguments, _]:
            serve(int(descriptor), json.loads(arguments))
        case ["begin", prefix, name, *words]:
            begin(prefix, name, words)
        case _:
            del sys.argv[1:]
            os.environ.update(sys.modules["warm"].variables_of_imports)
            gc.unfreeze()
            exec(eval(sys.stdin.readline()), vars(sys.modules["__main__"]))
