"""Jobs of the local control plane, followed while its API throttles, fails and hangs up, and its
log is late.

The follow is the same for every job, whichever SDK created it. `SMTRAIN_FOLLOW_LINES=10000` is the
size of issue 3.
"""

from __future__ import annotations

import hashlib
import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

import smtrain
from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.client.follow.follower import Follower
from smtrain.core.protocol.log_lines import Line
from testing.plane import Plane, SyntheticJob, digest_of, plane
from tests import tiers
from tests.typed import typed

# eight hosts in the gate
HOSTS, LINES = tiers.examples(32), int(os.environ.get("SMTRAIN_FOLLOW_LINES", "300"))


@pytest.fixture(scope="module")
def control(local_home: Path) -> Plane:
    return plane(local_home)


@pytest.fixture
def calm(control: Plane) -> Iterator[Plane]:
    control.calm()
    yield control
    control.calm()


def by_host(lines: Iterator[Line] | list[Line]) -> dict[str, list[str]]:
    hosts: dict[str, list[str]] = defaultdict(list)
    for line in lines:
        hosts[line.host].append(line.text)
    return hosts


def same(job: SyntheticJob, hosts: dict[str, list[str]]) -> bool:
    """By count and by hash; late lines may be out of order."""
    return all(
        len(hosts[host]) == len(job.expected(host))
        and digest_of(sorted(hosts[host])) == digest_of(sorted(job.expected(host)))
        for host in (f"algo-{n + 1}" for n in range(job.hosts))
    )


@pytest.mark.slow
def test_nothing_is_lost_and_nothing_doubled(calm: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    """30 % of the calls go wrong, lines and streams come up to 4 s late and out of order, pages are
    empty.
    """
    calm.delivery(late=2.0, reorder=0.1, late_streams=1.0, empty_pages=0.1, seed=1)
    calm.faults(
        operations=["logs:*", "sagemaker:Describe*"], throttle=0.15, errors=0.1, drops=0.05, seed=2
    )
    job = calm.synthetic_job(hosts=HOSTS, lines=LINES, seconds=3.0)
    follower = Follower(SageMakerBackend("local"), job.name)
    got = by_host(event for event in follower.events() if isinstance(event, Line))
    assert same(job, got)
    pages = HOSTS * LINES / 10_000
    assert (
        follower.patience.calls["filter_log_events"] < 150 + 30 * pages
    )  # not one per host and poll
    counts = calm.counts()["logs:FilterLogEvents"]
    assert counts["throttled"] + counts["failed"] + counts["dropped"] > 0
    assert counts["calls"] >= follower.patience.calls["filter_log_events"]


def test_in_time_order_where_lines_come_in_order(calm: Plane) -> None:
    job = calm.synthetic_job(hosts=8, lines=100, seconds=1.5)
    lines = [event for event in smtrain.Job(job.name).events() if isinstance(event, Line)]
    assert [line.timestamp for line in lines] == sorted(line.timestamp for line in lines)
    assert {host: digest_of(texts) for host, texts in by_host(lines).items()} == {
        f"algo-{n}": job.digest(f"algo-{n}") for n in range(1, 9)
    }
    assert by_host(smtrain.Job(job.name).lines("algo-3")) == {"algo-3": job.expected("algo-3")}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from smtrain.cli import main; main()", *arguments]


def test_two_interrupts_leave_the_job_running_and_resume_goes_on(calm: Plane) -> None:
    job = calm.synthetic_job(hosts=3, lines=400, seconds=2.0, held=True)
    with subprocess.Popen(
        command("logs", job.name, "-f", "--plain"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout
        assert process.stderr
        first = [process.stdout.readline() for _ in range(40)]
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        # Not communicate(): it passes over what readline() has read ahead.
        rest, errors = process.stdout.read(), process.stderr.read()
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert f"left {job.name} running" in rest
    assert f"smtrain logs {job.name} --follow --resume --target local" in rest
    assert smtrain.Job(job.name).status == "InProgress"
    calm.release(job)
    done = subprocess.run(
        command("logs", job.name, "-f", "--resume", "--plain"),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    shown = "".join(first) + rest + done.stdout
    lines = re.findall(r"^(algo-\d) \| (.*)$", shown, re.M)
    hosts: dict[str, list[str]] = defaultdict(list)
    for host, text in lines:
        hosts[host].append(text)
    assert same(job, hosts)
    assert shown.count(f"-- {job.name}: Training") == 1
    assert f"-- {job.name}: Completed " in done.stdout
    again = subprocess.run(
        command("logs", job.name, "-f", "--resume"),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert len(again.stdout.splitlines()) == 1


@pytest.mark.sample(3)
@pytest.mark.parametrize("moment", [40, 41, 150, 333, 700, 1201, 1700])
def test_an_interrupt_at_any_call_loses_and_doubles_no_line(calm: Plane, moment: int) -> None:
    """Press Ctrl-C on entry to the n-th function of smtrain.client.follow, and while a line is
    shown.
    """
    job = calm.synthetic_job(hosts=3, lines=60, seconds=2.0)
    handle = smtrain.Job(job.name)
    shown: list[str] = []
    calls = 0

    def trace(frame: FrameType, event: str, _: object) -> None:
        nonlocal calls
        if (
            event == "call"
            and "smtrain/client/follow/" in frame.f_code.co_filename
            and "interrupts" not in frame.f_code.co_filename
        ):
            calls += 1
            if calls == moment:
                os.kill(os.getpid(), signal.SIGINT)

    def say(text: str) -> None:
        if len(shown) == moment:
            os.kill(os.getpid(), signal.SIGINT)
        shown.append(text)

    sys.setprofile(trace)
    try:
        handle.follow(say=say)
    finally:
        sys.setprofile(None)
    assert calls >= moment
    assert any(f"left {job.name} running" in text for text in shown)
    handle.follow(say=shown.append, resume=True)
    lines = re.findall(r"^(algo-\d) \| (.*)$", "\n".join(shown), re.M)
    assert same(job, by_host([Line(host, 0, text) for host, text in lines]))
    assert shown.count(f"-- {job.name}: Training") == 1


def test_a_stopped_job_ends_the_follow(calm: Plane) -> None:
    job = calm.synthetic_job(hosts=2, lines=50, seconds=300.0)
    handle = smtrain.Job(job.name)
    threading.Timer(0.5, handle.stop).start()
    said: list[str] = []
    handle.follow(say=said.append)
    assert handle.known_status == "Stopped"
    assert f"-- {job.name}: Stopped" in said


TRACEBACK = [
    "[rank5]: Traceback (most recent call last):",
    '[rank5]:   File "loop.py", line 71, in train',
    "[rank5]: OSError: [Errno 28] No space left on device",
    "algo-2, rank 5: OSError: [Errno 28] No space left on device",
]
ECHO = [
    "[rank0]: Traceback (most recent call last):",
    "[rank0]: RuntimeError: Connection closed by peer [10.0.0.2]:4711",
]


def test_why_it_failed_is_the_same_text_everywhere(calm: Plane) -> None:
    job = calm.synthetic_job(
        hosts=2,
        lines=20,
        end="Failed",
        reason="AlgorithmError: , exit code: 1",
        last_words={"algo-2": TRACEBACK, "algo-1": ECHO},
    )
    handle = smtrain.Job(job.name)
    said: list[str] = []
    handle.follow(say=said.append)
    text = str(handle.explain())
    assert "first on algo-2, rank 5" in text
    assert (
        "SageMaker says: AlgorithmError: , exit code: 1\ncause: a disk of the instance is full\nto"
        " do: " in text
    )
    assert said[-1] == text
    with pytest.raises(smtrain.JobError) as caught:
        handle.check()
    assert str(caught.value).startswith(text)
    shown = subprocess.run(
        command("status", job.name), capture_output=True, text=True, check=True
    ).stdout
    assert shown.rstrip().endswith(text)
    assert "Connection closed by peer" not in shown


def test_on_a_terminal_there_is_a_panel(calm: Plane) -> None:
    job = calm.synthetic_job(hosts=2, lines=100, seconds=1.5)
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}
    process = subprocess.Popen(
        command("logs", job.name, "-f"), stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        shown += piece
    os.close(ours)
    assert process.wait() == 0
    text = re.sub(r"\x1b\[[0-?]*[ -/]*[@-~]", "", shown.decode())
    last = text[text.rindex("╭") :]
    assert f"{job.name} on local" in last
    assert "Completed" in last
    assert "step 10 of 10" in last
    assert "algo-2 | " in last


def test_a_notebook_shows_status_curve_and_cost(calm: Plane) -> None:
    job = calm.synthetic_job(hosts=2, lines=40)
    handle = smtrain.Job(job.name)
    while handle.status != "Completed":
        time.sleep(0.05)
    card = handle._repr_html_()
    for words in (job.name, "Completed", "<img", "cost: nothing, $"):
        assert words in card
    frame = handle.metrics()
    assert list(frame.index) == [1, 2, 3, 4]
    assert frame["loss"].tolist() == handle.loss
    figure = handle.plot()
    assert [axis.get_ylabel() for axis in figure.axes] == ["loss (nats per token)", "grad norm"]
    assert handle.cost().machines == "2 x ml.trn1.32xlarge"
    assert "no such job" in smtrain.Job("none-of-this-name", "local")._repr_html_()


def test_the_log_as_it_is_by_tail_since_grep_and_host(calm: Plane) -> None:
    job = calm.synthetic_job(hosts=3, lines=30)

    def logs(*options: str) -> list[str]:
        done = typed("logs", job.name, *options)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    assert len(logs()) == 90
    assert logs("--host", "algo-2", "--tail", "2") == [
        f"algo-2 | {text}" for text in job.expected("algo-2")[-2:]
    ]
    assert len(logs("--grep", "^step=")) == 3
    assert len(logs("--since", "1h")) == 90
    assert logs("--since", "2999-01-01") == []
    refused = typed("logs", job.name, "--since", "soon")
    assert (
        refused.returncode,
        refused.stderr.startswith("smtrain: --since soon: a duration looks like"),
    ) == (2, True)


def test_summaries_in_place_of_lines(calm: Plane) -> None:
    job = calm.synthetic_job(hosts=2, lines=100, held=True)
    summaries = command("logs", job.name, "-f", "--no-lines", "--every", "1s")
    with subprocess.Popen(summaries, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "InProgress (Training)" in line:
                calm.release(job)
    assert process.returncode == 0
    assert any("InProgress (Training)" in line for line in lines)
    assert all(line.startswith(f"-- {job.name}: ") for line in lines)
    assert "step 10 of 10" in lines[-1]


def test_digest_is_sha256() -> None:
    assert digest_of(["a", "b"]) == hashlib.sha256(b"a\nb").hexdigest()
