"""A rank forked from torchrun equals a new Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from smtrain.core.protocol.entrypoints import entrypoints_folder

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are forked on Linux alone")

# Stands for torchrun: has handlers, a socket, a thread and an exit function when it
# forks.
PARENT = """
import atexit, json, os, signal, socket, sys, threading, time
sys.path.insert(0, os.environ["ENTRYPOINTS"])
from forking import Rank
atexit.register(print, "torchrun's exit function")
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda *_: print("torchrun's handler", flush=True))
listener = socket.create_server(("127.0.0.1", 0))
held = threading.Event()
threading.Thread(target=held.wait, daemon=True).start()
ranks = []
for n, how in enumerate(sys.argv[2:]):
    out = open(f"{n}.out", "w")
    environment = {**os.environ, "RANK": str(n), "HOW": how}
    ranks.append(Rank([sys.argv[1], "an argument"], environment, [out.fileno(), out.fileno()]))
time.sleep(0.2)
print(json.dumps([rank.wait(60) for rank in ranks]))
print(json.dumps([rank.pid for rank in ranks]))
"""
SCRIPT = """
import json, os, signal, sys, threading, time
how = os.environ["HOW"]
if how == "tell":
    listed = [int(fd) for fd in os.listdir("/proc/self/fd")]
    open_files = [fd for fd in listed if fd > 2 and os.path.exists(f"/proc/self/fd/{fd}")]
    print(json.dumps({
        "name": __name__, "argv": sys.argv, "rank": os.environ["RANK"], "session": os.getsid(0) == os.getpid(),
        "term": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
        "int": signal.getsignal(signal.SIGINT) == signal.default_int_handler,
        "blocked": len(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "files": open_files,
        "home": os.environ.get("HOME"),
    }))
    threading.Timer(0.3, print, ["a thread is waited for"]).start()
elif how == "raise":
    raise ValueError("a fault")
elif how == "text":
    sys.exit("a sentence")
elif how == "unflushed":
    sys.stdout.write("written")
    os._exit(0)
elif how.isdigit():
    sys.exit(int(how))
else:
    os.kill(os.getpid(), getattr(signal, how))
    time.sleep(60)
"""


def test_a_rank_begins_and_ends_like_a_python_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    hows = ["tell", "raise", "text", "unflushed", "0", "7", "SIGTERM", "SIGKILL"]
    done = subprocess.run(
        [sys.executable, "-c", PARENT, str(tmp_path / "script.py"), *hows],
        env={**os.environ, "ENTRYPOINTS": str(entrypoints_folder())},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    statuses, pids, own = done.stdout.splitlines()
    assert json.loads(statuses) == [0, 1, 1, 0, 0, 7, -15, -9]
    assert len(set(json.loads(pids))) == len(hows)
    assert own == "torchrun's exit function", "once, and nothing else of it ran in a rank"
    said = [(tmp_path / f"{n}.out").read_text() for n in range(len(hows))]
    told, thread = said[0].splitlines()
    assert json.loads(told) == {
        "name": "__main__",
        "argv": [str(tmp_path / "script.py"), "an argument"],
        "rank": "0",
        "session": True,
        "term": True,
        "int": True,
        "blocked": 0,
        "files": [],
        "home": os.environ.get("HOME"),
    }
    assert thread == "a thread is waited for"
    assert said[1].splitlines()[-1] == "ValueError: a fault"
    assert "forking" not in said[1], "the traceback begins with the script"
    assert said[2:] == ["a sentence\n", "written", "", "", "", ""]
