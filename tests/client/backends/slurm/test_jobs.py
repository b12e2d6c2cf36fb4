"""Jobs on a real Slurm: they start, resume and end, by themselves or by another's action."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

import smtrain
from smtrain.client.jobs.job import Job
from smtrain.client.jobs.listing import list_jobs
from smtrain.core.errors import JobError
from smtrain.tools.report.gather import gather
from tests.client.backends.slurm.conftest import Bench, wait_for
from tests.client.backends.slurm.daemons import Slurm
from tests.client.backends.slurm.faults import queued

# A stage that counts steps up to LAST, one every PAUSE seconds, saves when it is told to end, and
# resumes from there.
COUNTS = """
import json, os, signal, sys, time
ml, pause, last = os.environ["SMTRAIN_ML_ROOT"], {pause}, {last}
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
kept = ml + "/checkpoints/step"
step = int(open(kept).read()) if os.path.exists(kept) else 0
print("begin", step, flush=True)
while step < last and not told:
    time.sleep(pause)
    step += 1
    print(f"step={{step}} loss=1.0 of={{last}}", flush=True)
    {fault}
open(kept, "w").write(str(step))
print("saved", step, flush=True)
"""


def counting(last: int = 3, pause: float = 0.1, fault: str = "pass") -> str:
    return COUNTS.format(last=last, pause=pause, fault=fault)


def texts(job: Job, host: str | None = None) -> list[str]:
    return [line.text for line in job.lines(host)]


def events(bench: Bench, job: Job) -> list[dict[str, Any]]:
    text = (bench.shared / "run/jobs" / job.name / "history.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_every_node_runs_the_stage_as_a_host(bench: Bench) -> None:
    program = """
import json, os
ml = os.environ["SMTRAIN_ML_ROOT"]
told = json.load(open(ml + "/input/config/resourceconfig.json"))
first = os.environ["SMTRAIN_MASTER_ADDR"]
print(told["current_host"], told["hosts"], told["network_interface_name"], first, flush=True)
open(ml + "/model/" + told["current_host"], "w").write("x")
open(ml + "/output/data/metrics.jsonl", "w").write("{}")
"""
    job = bench.start(bench.place(), program, hosts=2)
    description = bench.ended(job)
    assert description["TrainingJobStatus"] == "Completed", description
    assert texts(job) != []
    assert sorted(texts(job)) == [
        "algo-1 ['algo-1', 'algo-2'] lo 127.0.0.1",
        "algo-2 ['algo-1', 'algo-2'] lo 127.0.0.1",
    ]
    assert texts(job, "algo-2") == ["algo-2 ['algo-1', 'algo-2'] lo 127.0.0.1"]
    copied = job.download(bench.shared.parent / "copied")
    assert sorted(path.name for path in copied.iterdir()) == ["algo-1", "algo-2"]
    assert [listed.name for listed in list_jobs(job.target, name_contains=job.name)] == [job.name]


def test_a_stage_waits_for_the_one_before_and_never_runs_where_that_failed(bench: Bench) -> None:
    place = bench.place()
    first, broken = (
        bench.request("import time; time.sleep(1)"),
        bench.request("raise SystemExit('no such luck')"),
    )
    one = place.submit(first)
    assert one is not None
    two = place.submit(broken, [one])
    assert two is not None
    last = bench.start(place, "print('ran')", after=[two])
    assert bench.ended(last)["TrainingJobStatus"] == "Stopped"
    assert bench.ended(Job(first["TrainingJobName"], place))["TrainingJobStatus"] == "Completed"
    failed = Job(broken["TrainingJobName"], place)
    assert bench.ended(failed)["TrainingJobStatus"] == "Failed"
    assert "no such luck" in str(failed.explain())
    assert texts(last) == []


def test_the_signal_before_the_time_limit_saves_and_requeues_until_the_steps_are_done(
    bench: Bench,
) -> None:
    # Slurm looks at time limits twice a minute, and sends the signal up to a minute early.
    place = bench.place(time=60, save_before=40)
    waits = (
        "while step == 5 and not told and 'SLURM_RESTART_COUNT' not in os.environ: time.sleep(0.1)"
    )
    job = bench.start(place, counting(last=8, fault=waits))
    description = bench.ended(job)
    assert description["TrainingJobStatus"] == "Completed", (description, texts(job))
    seen = [text.split()[0] for text in texts(job) if text.startswith("step=")]
    assert seen == [f"step={n}" for n in range(1, 9)]
    assert [c["Status"] for c in description["SecondaryStatusTransitions"]] == [
        "Pending",
        "Training",
        "Interrupted",
        "Training",
        "Completed",
    ]
    again = next(event for event in events(bench, job) if event["event"] == "again")
    assert (again["why"], again["step"]) == ("limit", "5")
    account = gather("run", "slurm")
    assert (account.restarts, [record["step"] for record in account.records]) == (1, [*range(1, 9)])
    page = smtrain.report("run", bench.shared.parent / "page.html", target="slurm").read_text(
        "utf-8"
    )
    assert "restarts" in page
    assert account.config["cluster"] == {"shared": str(bench.shared), "time": 60, "save_before": 40}


def test_stop_saves_first_and_what_waits_is_taken_off_the_queue(bench: Bench) -> None:
    place = bench.place()
    job = bench.start(place, counting(last=1000))
    wait_for(lambda: "step=3 loss=1.0 of=1000" in texts(job))
    id_ = place.queued_id(job.name)
    assert id_ is not None
    behind = bench.start(place, "print('ran')", after=[id_])
    job.stop()
    assert bench.ended(job)["TrainingJobStatus"] == "Stopped"
    assert texts(job)[-1].startswith("saved ")
    assert bench.ended(behind)["TrainingJobStatus"] == "Stopped"


def test_a_job_that_waits_can_be_stopped(bench: Bench) -> None:
    place = bench.place()
    first = bench.start(place, counting(last=1000))
    id_ = place.queued_id(first.name)
    assert id_ is not None
    waiting = bench.start(place, "print('ran')", after=[id_])
    waiting.stop()
    assert bench.ended(waiting)["TrainingJobStatus"] == "Stopped"
    first.stop()
    assert bench.ended(first)["TrainingJobStatus"] == "Stopped"


@pytest.mark.parametrize("program", ["tar", "srun"])
def test_a_stop_while_a_job_begins_is_not_lost(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    """While its code is unpacked, and before its nodes have begun: both are slow on a large shared
    folder.
    """
    slow, begun = tmp_path / "slow", tmp_path / "begun"
    slow.mkdir()
    (slow / program).write_text(
        f'#!/bin/sh\ntouch {begun}\nsleep 3\nexec {shutil.which(program)} "$@"\n'
    )
    (slow / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{slow}:{os.environ['PATH']}")  # sbatch hands it on
    job = bench.start(bench.place(), counting(last=600))
    wait_for(begun.exists)
    job.stop()
    assert bench.ended(job)["TrainingJobStatus"] == "Stopped"
    assert len(job.loss) < 300


def test_a_failure_is_tried_again_and_not_at_the_same_step_twice(bench: Bench) -> None:
    fault = "os._exit(3) if step == 3 else open(kept, 'w').write(str(step))"
    job = bench.start(bench.place(), counting(last=5, fault=fault))
    description = bench.ended(job)
    assert description["TrainingJobStatus"] == "Failed"
    assert "status 3" in description["FailureReason"]
    assert [text for text in texts(job) if text.startswith("begin")] == ["begin 0", "begin 2"]


def test_a_failure_that_passes_does_not_end_a_job(bench: Bench) -> None:
    once = (
        "if step == 3 and not os.path.exists(ml + '/../../once'): open(ml + '/../../once', 'x');"
        " os._exit(3)"
    )
    job = bench.start(bench.place(), counting(last=5, fault=once))
    assert bench.ended(job)["TrainingJobStatus"] == "Completed"


def test_requeue_and_scancel_by_hand_are_no_success(bench: Bench) -> None:
    place = bench.place()
    waits = (
        "while step == 2 and not told and 'SLURM_RESTART_COUNT' not in os.environ: time.sleep(0.1)"
    )
    job = bench.start(place, counting(last=4, fault=waits))
    wait_for(lambda: "step=2 loss=1.0 of=4" in texts(job))
    id_ = place.queued_id(job.name)
    assert id_ is not None
    bench.slurm.run("scontrol", "requeue", id_)
    assert bench.ended(job)["TrainingJobStatus"] == "Completed"
    assert [text for text in texts(job) if text.startswith("begin")] == ["begin 0", "begin 2"]

    other = bench.start(place, counting(last=4000, pause=0.3))
    wait_for(lambda: "step=2 loss=1.0 of=4000" in texts(other))
    id_ = place.queued_id(other.name)
    assert id_ is not None
    bench.slurm.run("scancel", id_)
    assert bench.ended(other)["TrainingJobStatus"] == "Stopped"


def test_a_signal_to_a_job_that_slurm_has_not_cancelled_does_not_end_it(bench: Bench) -> None:
    waits = (
        "while step == 2 and not told and 'SLURM_RESTART_COUNT' not in os.environ: time.sleep(0.1)"
    )
    job = bench.start(bench.place(), counting(last=4, fault=waits), hosts=2)
    wait_for(lambda: texts(job).count("step=2 loss=1.0 of=4") == 2)
    id_ = queued(job)
    bench.slurm.run("scancel", "--signal=TERM", id_)
    assert bench.ended(job)["TrainingJobStatus"] == "Completed"
    assert next(event["why"] for event in events(bench, job) if event["event"] == "again") == "told"


def test_slurmctld_may_go_and_come_back(bench: Bench, daemons: Slurm) -> None:
    go = bench.shared / "go"
    waits = f"while step == 9 and not told and not os.path.exists({str(go)!r}): time.sleep(0.1)"
    job = bench.start(bench.place(), counting(last=30, fault=waits))
    wait_for(lambda: "step=9 loss=1.0 of=30" in texts(job))
    daemons.end("slurmctld")
    try:
        assert job.status == "InProgress"
        go.touch()
        wait_for(lambda: "step=30 loss=1.0 of=30" in texts(job))
    finally:
        daemons.start_controller()
    assert bench.ended(job)["TrainingJobStatus"] == "Completed"
    assert len(texts(job)) == len(set(texts(job))) == 32


def test_the_script_runs_by_plain_sbatch(bench: Bench) -> None:
    place = bench.place()
    request = bench.request(counting())
    folder = bench.shared / "run/jobs" / request["TrainingJobName"]
    folder.mkdir(parents=True)
    script = bench.shared.parent / "mine.sh"
    script.write_text(place.preview([request]))
    bench.slurm.run("sbatch", str(script))
    job = Job(request["TrainingJobName"], place)
    wait_for(lambda: (folder / "history.jsonl").exists())
    assert bench.ended(job)["TrainingJobStatus"] == "Completed"
    assert len(job.loss) == 3


def test_a_script_submitted_by_hand_is_listed_while_it_waits(bench: Bench) -> None:
    place = bench.place()
    request = bench.request(counting())
    name = request["TrainingJobName"]
    folder = bench.shared / "run/jobs" / name
    folder.mkdir(parents=True)
    assert list_jobs(place) == []
    script = bench.shared.parent / "mine.sh"
    script.write_text(place.preview([request]))
    bench.slurm.run("sbatch", "--hold", str(script))
    (job,) = list_jobs(place)
    assert (job.name, job.status) == (name, "InProgress")
    id_ = place.queued_id(name)
    assert id_ is not None
    bench.slurm.run("scontrol", "release", id_)
    assert bench.ended(job)["TrainingJobStatus"] == "Completed"
    assert len(job.loss) == 3


def test_a_script_whose_code_nobody_has_copied_says_so(bench: Bench) -> None:
    request = bench.request("")
    bundle = bench.shared / "code" / request["TrainingJobName"] / "bundle.tar.gz"
    bundle.unlink()
    assert bench.place().submit(request)
    description = bench.ended(Job(request["TrainingJobName"], bench.place()))
    assert f"{bundle} cannot be unpacked (tar" in description["FailureReason"]
    assert "a launch by the same version of smtrain copies it there" in description["FailureReason"]


def test_an_input_that_nobody_has_copied_is_the_reason_told(bench: Bench) -> None:
    request = bench.request("")
    source = {"S3DataType": "S3Prefix", "S3Uri": f"file://{bench.shared}/nowhere"}
    request["InputDataConfig"].append(
        {"ChannelName": "config", "DataSource": {"S3DataSource": source}}
    )
    assert bench.place().submit(request)
    description = bench.ended(Job(request["TrainingJobName"], bench.place()))
    assert f"{bench.shared}/nowhere: channel config is not there on" in description["FailureReason"]


def test_a_step_that_cannot_start_is_told_by_slurms_words(bench: Bench) -> None:
    job = bench.start(bench.place(srun=["--no-such-option"]), "")
    assert "no-such-option" in bench.ended(job)["FailureReason"]


def test_what_slurm_refuses_leaves_nothing(bench: Bench) -> None:
    request = bench.request("")
    with pytest.raises(JobError, match=r"was not submitted: .*partition"):
        bench.place(partition="nowhere").submit(request)
    assert not (bench.shared / "run/jobs" / request["TrainingJobName"]).exists()
    assert bench.place().submit(request)
    assert bench.place().submit(request) is None  # a name is taken once


def test_a_killed_rank_ends_the_step_on_all_nodes(bench: Bench) -> None:
    program = counting(last=600) + "\n"
    pid = "print('pid', os.getpid(), flush=True)\n"
    job = bench.start(
        bench.place(restarts=0), program.replace('print("begin"', pid + 'print("begin"', 1), hosts=2
    )
    wait_for(lambda: len([text for text in texts(job) if text.startswith("pid")]) == 2)
    os.kill(
        int(next(text for text in texts(job, "algo-2") if text.startswith("pid")).split()[1]),
        signal.SIGKILL,
    )
    description = bench.ended(job)
    assert description["TrainingJobStatus"] == "Failed", description
