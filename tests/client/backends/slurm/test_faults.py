"""Faults in one job of three nodes with an arithmetic stage: its result is that of an undisturbed
job.

`SMTRAIN_SLURM_FAULTS=20` is the size of issue 16; `SMTRAIN_SLURM_SEED` chooses times and victims.
test_whole.py has the same faults for training.
"""

from __future__ import annotations

import hashlib
import os
import random
import threading
import time
from functools import partial
from pathlib import Path

from smtrain.client.jobs.job import Job
from smtrain.core.protocol.log_lines import Line
from tests.client.backends.slurm.conftest import Bench, wait_for
from tests.client.backends.slurm.daemons import Slurm
from tests.client.backends.slurm.faults import FAULTS, kill_controller

COUNT = int(os.environ.get("SMTRAIN_SLURM_FAULTS", "3"))
SEED = int(os.environ.get("SMTRAIN_SLURM_SEED", "1"))
NODES = 3
# Every node hashes its own chain and saves it at every fifth step and when it is told to end; the
# first one ends when its steps are done or when GO exists, so that a test decides when there has
# been enough.
CHAIN = """
import hashlib, json, os, signal, sys, time
ml, go = os.environ["SMTRAIN_ML_ROOT"], {go!r}
host = json.load(open(ml + "/input/config/resourceconfig.json"))["current_host"]
kept = ml + "/checkpoints/" + host
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
def save():
    with open(kept + ".part", "w") as out: out.write(f"{{step}} {{digest}}")
    os.replace(kept + ".part", kept)
step, digest = open(kept).read().split() if os.path.exists(kept) else (0, host)
step = int(step)
while not told and not (os.path.exists(go) and step >= int(open(go).read())):
    step, digest = step + 1, hashlib.sha256(f"{{digest}} {{step + 1}}".encode()).hexdigest()
    if step % 5 == 0:
        save()
    attempt = os.environ.get("SLURM_RESTART_COUNT", 0)
    print(f"step={{step}} loss=1.0 host={{host}} digest={{digest}} attempt={{attempt}}", flush=True)
    time.sleep(0.02)
save()
if not told:
    open(ml + "/model/" + host, "w").write(f"{{step}} {{digest}}")
"""


def undisturbed(host: str, steps: int) -> str:
    digest = host
    for step in range(1, steps + 1):
        digest = hashlib.sha256(f"{digest} {step}".encode()).hexdigest()
    return digest


def test_faults_change_nothing_and_every_line_is_seen_once(bench: Bench, tmp_path: Path) -> None:
    go = tmp_path / "go"
    job = bench.start(bench.place(restarts=100), CHAIN.format(go=str(go)), hosts=NODES)
    seen: list[Line] = []
    follower = threading.Thread(
        target=lambda: seen.extend(
            event for event in job.events(poll=0.3) if isinstance(event, Line)
        )
    )
    follower.start()
    chance, done = random.Random(SEED), 0

    def reached() -> int:
        return max((int(record["step"]) for record in job.records), default=0)

    def gets_on(before: int) -> None:
        wait_for(lambda: job.status != "InProgress" or reached() >= before + 6)
        assert job.status == "InProgress", job.explain()

    def starts() -> int:
        return (bench.shared / "run/jobs" / job.name / "history.jsonl").read_text().count('"start"')

    def begun_again(before: int) -> bool:
        return starts() > before or job.status != "InProgress"

    try:
        gets_on(0)
        while done < COUNT:
            fault = FAULTS[done] if done < len(FAULTS) else chance.choice(FAULTS)
            before, attempts = reached(), starts()
            print(f"{time.strftime('%T')} step {before}: {fault.__name__}", flush=True)
            if fault(bench.slurm, job, chance):
                done += 1
                if fault is not kill_controller:
                    wait_for(partial(begun_again, attempts))
            gets_on(before)
        last = reached() + 50
        go.write_text(str(last))
        assert bench.ended(job)["TrainingJobStatus"] == "Completed", job.explain()
    finally:
        if not go.exists():
            job.stop()
        follower.join()
    folder = bench.shared / "run/jobs" / job.name
    for number in range(1, NODES + 1):
        host = f"algo-{number}"
        steps, digest = (folder / "output/model" / host).read_text().split()
        assert digest == undisturbed(host, int(steps))
        written = [
            line.split(" ", 1)[1] for line in (folder / f"logs/{host}.log").read_text().splitlines()
        ]
        assert [hash_of(line.text) for line in seen if line.host == host] == [
            hash_of(line) for line in written
        ]


def hash_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def test_every_line_of_three_nodes_is_seen_once_while_slurmctld_restarts(
    bench: Bench, daemons: Slurm
) -> None:
    program = """
import os, sys, time
for number in range(400):
    print("line", number, os.environ["SLURM_NODEID"], flush=True)
    while number == 200 and not os.path.exists({go!r}): time.sleep(0.05)
"""
    go = bench.shared / "go"
    job = bench.start(bench.place(), program.format(go=str(go)), hosts=NODES)
    seen: list[str] = []
    for event in job.events(poll=0.2):
        if isinstance(event, Line):
            seen.append(event.text)
        if len(seen) >= 300 and not go.exists():
            kill_controller(daemons, job, random.Random(0))
            go.touch()
    assert job.status == "Completed"
    assert sorted(map(hash_of, seen)) == sorted(
        hash_of(f"line {number} {node}") for number in range(400) for node in range(NODES)
    )


def test_a_full_disk_fails_the_job_by_its_name_and_it_goes_on_where_there_is_room(
    bench: Bench, small_disk: Path, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    go.write_text("60")
    fills = """
import os
if not os.path.exists({full!r}):
    open({full!r}, "w").close()
    try:
        with open(ml + "/checkpoints/filler", "wb", buffering=0) as out:
            while True: out.write(b"x" * 4096)
    except OSError: pass
"""
    program = CHAIN.format(go=str(go)).replace(
        "while not told", fills.format(full=str(tmp_path / "full")) + "while not told"
    )
    place = bench.place(restarts=0)
    request = bench.request(program)
    assert place.submit(request)
    job = Job(request["TrainingJobName"], place)
    description = bench.ended(job)
    assert description["TrainingJobStatus"] == "Failed", description
    assert "No space left on device" in description["FailureReason"]
    (small_disk / "run/checkpoints" / job.name / "filler").unlink()
    assert place.submit({**request, "TrainingJobName": f"{job.name}-2"})
    again = Job(f"{job.name}-2", place)
    assert bench.ended(again)["TrainingJobStatus"] == "Completed", again.explain()
    steps, digest = (
        (small_disk / "run/jobs" / again.name / "output/model/algo-1").read_text().split()
    )
    assert (int(steps), digest) == (60, undisturbed("algo-1", 60))
