"""Scripts and commands in copies of a Python that has imported torch and transformers
(entrypoints/warm.py).

They are the real ones, in separate processes; only their imports were made before. A caller without
a copy starts a new Python.
"""

from __future__ import annotations

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from smtrain.core.protocol.entrypoints import entrypoints_folder
from smtrain.plane.server.warm import WarmPython
from tests import shared_imports

SHIM = """#!{python} -IS
import os, sys
sys.path.insert(0, {entrypoints!r})
import warm
sys.prefix = {prefix!r}
environment = {{key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}}
environment["TOKENIZERS_PARALLELISM"] = "false"
copy = warm.begin({name!r}, [{script!r}, *sys.argv[1:]], environment, [0, 1, 2])
if copy is None:
    os.execv({script!r}, [{script!r}, *sys.argv[1:]])
status = copy.wait()
if status < 0:
    os.kill(os.getpid(), -status)
os._exit(status)
"""


@cache
def _kept() -> WarmPython:
    """This test process's own; it ends with the test process."""
    return WarmPython(_without_pytest(os.environ))


def run(arguments: Sequence[str | Path], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """`subprocess.run([sys.executable, script, *words], env=env, capture_output=True,
    text=True)`.
    """
    client: Any = shared_imports.client()
    words = [str(word) for word in arguments]
    outputs = [os.pipe(), os.pipe()]
    null = os.open(os.devnull, os.O_RDONLY)
    copy = client.begin(
        _kept().name, words, _without_pytest(env), [null, outputs[0][1], outputs[1][1]]
    )
    for descriptor in (null, outputs[0][1], outputs[1][1]):
        os.close(descriptor)
    if copy is None:
        for reading, _ in outputs:
            os.close(reading)
        return subprocess.run(
            [sys.executable, *words], env=env, capture_output=True, text=True, check=False
        )
    said = ["", ""]

    def read(n: int) -> None:
        with open(outputs[n][0], encoding="utf-8") as stream:
            said[n] = stream.read()

    threads = [threading.Thread(target=read, args=(n,)) for n in (0, 1)]
    for thread in threads:
        thread.start()
    status = copy.wait()
    for thread in threads:
        thread.join()
    return subprocess.CompletedProcess(words, status, *said)


def name() -> str:
    """The socket of this test process's warm Python."""
    return _kept().name


@cache
def smtrain() -> Path:
    """The installed command, begun in a copy, by its own name in a folder for PATH."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    script = Path(folder) / "smtrain"
    filled = {
        "python": sys.executable,
        "prefix": sys.prefix,
        "entrypoints": str(entrypoints_folder()),
        "name": _kept().name,
        "script": str(Path(sys.executable).parent / "smtrain"),
    }
    script.write_text(SHIM.format(**filled))
    script.chmod(0o755)
    return script


def _without_pytest(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without pytest's variables, which change from test to test, so that server
    and callers compare equal. The rest are those that the launcher sets.
    """
    kept = {key: value for key, value in environment.items() if not key.startswith("PYTEST_")}
    return {**kept, "TOKENIZERS_PARALLELISM": "false"}
