"""Run a program repeatedly without importing it again: a process that has loaded it forks for each
run.

python -m tests.faults.zygote MODULE     reads {"argv": [...], "out": file, "limit": s} per line, answers a status
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

ROOT = Path(__file__).parents[2]
HUNG = -9


class Zygote:
    """The client of the forking process."""

    def __init__(self, module: str, environment: dict[str, str]) -> None:
        kept = {
            k: v
            for k, v in os.environ.items()
            if not k.startswith(("SMTRAIN_", "RANK", "WORLD_SIZE", "MASTER_"))
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.zygote", module],
            cwd=ROOT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**kept, **environment},
        )

    def run(self, argv: list[str], out: Path, limit: float = 120.0) -> tuple[int, str]:
        """Exit status (`HUNG` after `limit` seconds) and output."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(
            json.dumps({"argv": argv, "out": str(out), "limit": limit}) + "\n"
        )
        self._process.stdin.flush()
        return int(self._process.stdout.readline()), out.read_text(errors="replace")

    def close(self) -> None:
        self._process.communicate()


def main() -> None:
    module = importlib.import_module(sys.argv[1])
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            os._exit(_run(module, request))
        print(_wait(child, request["limit"]), flush=True)


def _run(module: object, request: dict[str, object]) -> int:
    out = os.open(str(request["out"]), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdout, sys.stderr = (os.fdopen(fd, "w", buffering=1) for fd in (1, 2))
    try:
        return int(module.main(request["argv"]) or 0)  # type: ignore[attr-defined]
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()


def _wait(child: int, limit: float) -> int:
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return HUNG


if __name__ == "__main__":
    main()
