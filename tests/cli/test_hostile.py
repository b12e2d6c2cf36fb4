"""Escape sequences, controls and bidi overrides of a job reach no terminal, notebook or file."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import smtrain
from smtrain.cli import main
from smtrain.client.follow.notebook import bundle_of
from smtrain.client.follow.progress import Progress
from smtrain.core.errors import ConfigError, JobError
from smtrain.core.protocol.log_lines import Line
from smtrain.core.text import clean, say
from smtrain.plane.client import ensure_running
from tests.cli.commands import FOLDER, JOB, calls, words

STEERING = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
"""Everything except tabs and line feeds that a terminal or a text renderer obeys."""
ATTACKS = {
    "title": "\x1b]0;owned\x07",
    "clipboard": "\x1b]52;c;b3duZWQ=\x1b\\",
    "link": "\x1b]8;;https://evil\x1b\\",
    "device control": "\x1bPq#0\x1b\\",
    "clear": "\x1b[2J\x1b[H",
    "colour": "\x1b[31m",
    "reset": "\x1bc",
    "one byte": "\x9b31m\x9d0;owned\x9c\x90q\x9c",
    "open": "\x1b]0;never closed",
    "bidi": "\u202e\u2066gnorw\u2069",
    "bell": "\x07\x08\x7f",
}
ALL = "".join(ATTACKS.values())
SCRIPT = f"""
import sys
evil = {ALL!r}
print("hello " + evil + "world")
print("step=1 of=nan loss=2.5 grad_norm=1e999 lr=1e-4 tokens_per_s=inf mfu=0.1" + evil)
print("step=2 of=4 loss=2.25 grad_norm=1 lr=1e-4 tokens_per_s=10" + evil)
print("10%\\r50%\\r" + evil + "done", "[bold red]markup[/bold red] <script>alert(1)</script>")
print("Traceback (most recent call last):\\n  File x" + evil + "\\nValueError: bad" + evil, file=sys.stderr)
import os, pathlib
pathlib.Path(os.environ.get("SMTRAIN_ML_ROOT", "/opt/ml") + "/output/failure").write_text("why " + evil + "it failed")
sys.exit(3)
"""


@given(st.text(st.sampled_from([*"ab\t\n\r [];\\0m", *ALL]), max_size=40))
def test_nothing_that_steers_is_left_whatever_is_cut_together(text: str) -> None:
    assert not STEERING.search(clean(text))
    assert clean(clean(text)) == clean(text)


@given(
    st.text(
        st.characters(exclude_categories=["Cc", "Cs", "Zl", "Zp"]).filter(
            lambda c: not STEERING.match(c)
        )
    )
)
def test_text_is_left_as_it_is(text: str) -> None:
    assert clean(text) == text
    assert clean(f"a\t{text}\nb") == f"a\t{text}\nb"


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_what_stands_around_an_attack_is_shown(attack: str) -> None:
    assert clean(f"before {attack}").startswith("before")
    assert clean(f"{attack}\nafter").endswith("\nafter")


def test_errors_of_ours_carry_no_attack() -> None:
    assert str(JobError(f"x{ALL}y")) == clean(f"x{ALL}y")
    assert not STEERING.search(str(ConfigError([ALL])) + "".join(ConfigError([ALL]).faults))


def test_what_the_encoding_lacks_is_printed_with_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, "ascii", write_through=True))
    say("loss ▁▂ ok")
    assert out.getvalue() == b"loss _. ok\n"


@pytest.fixture(scope="module")
def job(local_home: Path) -> smtrain.Job:
    """A hostile job that has failed."""
    endpoint, name = ensure_running(), f"hostile-{time.time_ns()}-train-00000000"
    session = endpoint.session()
    sagemaker = session.client("sagemaker")
    session.client("s3").put_object(
        Bucket=endpoint.bucket, Key=f"{name}/job.py", Body=SCRIPT.encode()
    )
    source = {"S3DataType": "S3Prefix", "S3Uri": f"s3://{endpoint.bucket}/{name}/"}
    command = f"exec {sys.executable} ${{SMTRAIN_ML_ROOT:-/opt/ml}}/input/data/code/job.py"
    sagemaker.create_training_job(
        TrainingJobName=name,
        RoleArn=endpoint.role,
        AlgorithmSpecification={
            "TrainingImage": "image",
            "TrainingInputMode": "File",
            "ContainerEntrypoint": ["bash"],
            "ContainerArguments": ["-c", command],
        },
        InputDataConfig=[{"ChannelName": "code", "DataSource": {"S3DataSource": source}}],
        OutputDataConfig={"S3OutputPath": f"s3://{endpoint.bucket}/out"},
        ResourceConfig={"InstanceType": "ml.m5.large", "InstanceCount": 1, "VolumeSizeInGB": 1},
        StoppingCondition={"MaxRuntimeInSeconds": 600},
        Environment={"NOTE": ALL},
        Tags=[{"Key": "smtrain-plan", "Value": "x"}],
    )
    made = smtrain.Job(name, "local")
    for _ in made.events(poll=0.05):
        pass
    return made


@pytest.mark.parametrize(("command", "call"), calls("of_job"))
def test_no_command_passes_an_attack_on(
    job: smtrain.Job,
    command: str,
    call: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    typed = words(command, call, **{JOB: job.name, FOLDER: str(tmp_path / "to")})
    monkeypatch.setattr(sys, "argv", ["smtrain", *typed])
    with pytest.raises(SystemExit):
        main()
    out, err = capfd.readouterr()
    assert not STEERING.search(out + err)
    if command == "status":
        assert "it failed" in out
    if command == "logs":
        assert "hello" in out
    if command == "list":
        assert job.name in out


def test_pages_that_are_made_of_it_are_clean(
    job: smtrain.Job,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    commands = (
        ["report", job.name, "--out", str(tmp_path / "r.html")],
        ["compare", *[job.name] * 2, "--out", "c"],
    )
    monkeypatch.chdir(tmp_path)
    for command in commands:
        monkeypatch.setattr(sys, "argv", ["smtrain", *command, "--target", "local"])
        with pytest.raises(SystemExit):
            main()
    assert not STEERING.search("".join(capfd.readouterr()))
    pages = [path.read_text() for path in sorted(tmp_path.rglob("*.html"))]
    assert "it failed" in pages[-1]
    assert not [page for page in pages if STEERING.search(page) or "<script>alert" in page]


def test_what_the_library_gives_is_clean(job: smtrain.Job) -> None:
    said: list[str] = []
    job.follow(say=said.append)
    with pytest.raises(JobError) as failed:
        job.check()
    texts = [
        str(job.explain()),
        job.failure or "",
        json.dumps(job.describe(), default=str),
        str(failed.value),
        *said,
    ]
    texts += [line.text for line in job.lines()] + [job._repr_html_()]
    assert not [text for text in texts if STEERING.search(text)]
    assert "why" in (job.failure or "")
    assert job.describe()["Environment"]["NOTE"] == clean(ALL)


def test_a_notebook_shows_no_script_and_no_markup(job: smtrain.Job) -> None:
    assert "<script" not in job._repr_html_()
    assert "<script" not in bundle_of(_progress(job))["text/html"]


def _progress(job: smtrain.Job) -> Progress:
    progress = Progress(job.name, "local", "us-east-1", job=job.describe())
    for text in [
        "step=1 of=nan loss=2 tokens_per_s=inf",
        f"step={'9' * 400} of=4",
        f"{ALL} <script>[red]x",
        "a\nb",
    ]:
        line = Line("algo-1", 0, text)
        progress.take(line)
        progress.lines.append(line)
    return progress


def test_the_panel_on_a_terminal_draws_its_own_sequences_only(job: smtrain.Job) -> None:
    """On a pty: rich's colours and cursor moves are there, titles, clipboard and one-byte controls
    are not.
    """
    master, slave = pty.openpty()
    program = f"import smtrain; job = smtrain.Job({job.name!r}, 'local'); job.follow(panel=True)"
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(slave)
    shown = b""
    for chunk in _read(master):
        shown += chunk
    assert process.wait(60) == 0
    text = shown.decode()
    assert "hello" in text
    assert b"\x1b]" not in shown
    assert b"\x1bP" not in shown
    assert not re.search("[\x80-\x9f\u202a-\u202e\u2066-\u2069]", text)
    assert "\x1b[31mworld" not in text


def _read(master: int) -> Iterator[bytes]:
    while True:
        try:
            chunk = os.read(master, 1 << 16)
        except OSError:  # EIO: the other end is closed
            return
        if not chunk:
            return
        yield chunk
