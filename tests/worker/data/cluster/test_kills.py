"""Machines as processes that are killed at random write the same bytes as one machine.

$SMTRAIN_KILLS sets the number of kills (default 1).
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from smtrain.worker.data.clean.cleaning import Cleaning
from smtrain.worker.data.prepare.prepare import prepare
from smtrain.worker.data.prepare.prepare_options import PrepareOptions
from tests.worker.data.cluster.hosts import free_address

KILLS = int(os.environ.get("SMTRAIN_KILLS", "1"))
HOST = """
import sys, time
from pathlib import Path
from smtrain.worker.data.clean.cleaning import Cleaning
from smtrain.worker.data.prepare.cluster.coordinator import MeetingPoint
from smtrain.worker.data.prepare.prepare import assist, prepare
from smtrain.worker.data.prepare.prepare_options import PrepareOptions
rank, count, host, port, source, out, model = sys.argv[1:]
meeting = MeetingPoint((host, int(port)), int(count), 4 << 20, leaves_within=1)
options = PrepareOptions(seq_len=32, workers=1, cleaning=Cleaning(deduplicate=True))
if rank == "0":
    def slowly(_):
        time.sleep(0.05)  # so that there is something to kill
    prepare(source, Path(out), Path(model), options, machines=meeting, progress=slowly)
else:
    assist(source, Path(model), options, meeting)
"""


@pytest.mark.full  # the gate has test_machines.py, and one machine that is killed in test_prepare.py
def test_killed_again_and_again_it_ends_in_the_same_bytes(tmp_path: Path, tokenizer_folder: Path) -> None:
    draw = random.Random(11)
    text = tmp_path / "text"
    text.mkdir()
    for number in range(3):
        rows = [json.dumps({"text": f"the words of text {draw.randrange(20_000)} " * 12}) for _ in range(20_000)]
        (text / f"{number}.jsonl").write_text("\n".join(rows))
    prepare(
        text,
        tmp_path / "wanted",
        tokenizer_folder,
        PrepareOptions(seq_len=32, cleaning=Cleaning(deduplicate=True)),
        progress=lambda _: None,
    )
    wanted = {path.name: path.read_bytes() for path in (tmp_path / "wanted").iterdir()}
    out, kills = tmp_path / "out", 0
    made: dict[str, Any] = {}
    running: list[subprocess.Popen[str]] = []
    try:
        while not made:
            count = draw.randrange(2, 4)
            address = free_address()
            running = [
                subprocess.Popen(
                    [
                        sys.executable, "-c", HOST, str(rank), str(count), address[0], str(address[1]), str(text),
                        str(out), str(tokenizer_folder),
                    ],
                    stderr=subprocess.PIPE, text=True,
                )
                for rank in range(count)
            ]  # fmt: skip
            if kills < KILLS:
                victim = draw.randrange(count)
                _work_begins(out, running, draw.randrange(6))
                if running[victim].poll() is None:
                    running[victim].send_signal(signal.SIGKILL)
                    kills += 1
            status = running[0].wait(300)
            for process in running[1:]:
                process.kill()  # SageMaker ends the others when one fails; they may have ended already
            assert status in (0, -signal.SIGKILL), running[0].stderr and running[0].stderr.read()
            _reap(running)
            if status == 0 and kills < KILLS:  # it ended before enough kills: begin again
                assert {path.name: path.read_bytes() for path in out.iterdir()} == wanted
                for path in out.iterdir():
                    path.unlink()
            elif status == 0:
                made = {path.name: path.read_bytes() for path in out.iterdir()}
    finally:
        for process in running:
            process.kill()
        _reap(running)
    assert made == wanted


def _work_begins(out: Path, running: list[subprocess.Popen[str]], shares: int) -> None:
    """Wait until so many shares are on the disk or in order, or the first machine has ended."""
    while running[0].poll() is None:
        with suppress(FileNotFoundError):  # not begun yet, or just done
            shares_there = [name for name in os.listdir(out / ".tokens.partial") if name.startswith("share-")]
            if len(shares_there) >= min(shares, 2) and (shares < 3 or _size(out) > shares * 1_000_000):
                return
        time.sleep(0.01)


def _size(out: Path) -> int:
    try:
        return (out / ".tokens.partial/tokens.bin").stat().st_size
    except OSError:
        return 0


def _reap(running: list[subprocess.Popen[str]]) -> None:
    for process in running:
        process.wait()
        if process.stderr is not None:
            process.stderr.close()
