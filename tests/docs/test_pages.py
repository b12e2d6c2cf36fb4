"""Every command and every line of Python in the docs works as its page says, on the local control
plane.
"""

from __future__ import annotations

import doctest
import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import smtrain
from tests import as_told, tiers, warm
from tests.docs.pages import ROOT, RUN, SHOWN, Block, blocks, commands, pages
from tests.shared_run import SharedRun
from tests.typed import lacking_options, typed

pytestmark = pytest.mark.slow

PATIENCE = 300  # seconds for one command
SEARCHED = [str(Path(sys.executable).parent), os.environ["PATH"]]
# On the AWS page, commands that only read the config ask the local control plane as if it were AWS;
# commands that start or read jobs use the shared local run of these pages.
ON_AWS = "first-run-aws"
_SENDS = re.compile(r"^(smtrain (?:check|run|launch) )run\.yaml(?!.*--dry-run)")


GATE = not tiers.full()
# In the gate the commands of all other pages run in this process, unless they need a shell.
AS_PROCESSES = {"index", "install", "local", "first-run-here", "steps"}
DEMO = "${SMTRAIN_HOME:-~/.smtrain}"


@pytest.fixture
def llama(shared_run: SharedRun) -> smtrain.Run:
    """The run that the pages refer to, with all its stages."""
    return shared_run.run


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.stem)
def test_blocks_are_of_kinds_that_are_run_or_shown(page: Path) -> None:
    assert {block.tag for block in blocks(page)} <= {*RUN, *SHOWN}


# Pages that the gate does not walk: it tests their options below, the requests of the AWS page in
# test_first_run_aws.py, and the work of every other page in the tests of chat, evaluate, convert,
# publish, doctor and pairs.
WALKS = {ON_AWS, "after-training", "chat", "doctor", "dpo", "first-run-here"}
RUNNABLE = [page for page in pages() if any(block.tag in RUN for block in blocks(page))]


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.stem, marks=[pytest.mark.full] if page.stem in WALKS else [])
        for page in RUNNABLE
    ],
)
def test_a_page_does_what_it_says(
    page: Path, llama: smtrain.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(ROOT / "docs/llama.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    here = GATE and page.stem not in AS_PROCESSES
    job = llama.job("train")
    words = {"JOB": job.name, "PREPARE_JOB": llama.job("prepare").name}
    names = {"smtrain": smtrain, "job": job}
    path = os.pathsep.join([str(warm.smtrain().parent), *SEARCHED])
    for block in blocks(page):
        if block.tag == "python":
            # So that a traceback has the line numbers of the page.
            exec(compile("\n" * (block.line - 1) + block.text, page.name, "exec"), names)
        elif block.tag == "console":
            # The pages' config has no account, so permissions are those for the local control
            # plane.
            more = as_aws() if page.stem == ON_AWS else {"SMTRAIN_TARGET": "local"}
            run_all(page, block, words, {"PATH": path} | more, here)


@pytest.mark.parametrize(
    "page", [page for page in RUNNABLE if page.stem in WALKS], ids=lambda page: page.stem
)
def test_the_commands_of_a_walk_and_their_options_are_there(page: Path) -> None:
    texts = [
        command.text
        for block in blocks(page)
        if block.tag == "console"
        for command in commands(block)
    ]
    ours = [text for text in texts if text.startswith("smtrain ")]
    assert ours
    for text in ours:
        assert not lacking_options(text), text


def as_aws() -> dict[str, str]:
    """The environment in which an AWS client uses the local control plane as AWS."""
    return as_told.variables()


def run_all(
    page: Path, block: Block, words: dict[str, str], more: dict[str, str], here: bool
) -> None:
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith("AWS_")
    } | more
    for command in commands(block):
        text = re.sub(r"\b(JOB|PREPARE_JOB)\b", lambda word: words[word[0]], command.text)
        text = _SENDS.sub(r"\1llama.yaml", text) if page.stem == ON_AWS else text
        # The tutorial's model comes from a package index, which a test may not reach.
        text = text.replace("demo://smollm2", "demo://tiny-llama")
        if here and (alone := without_a_shell(text)):
            status, output = called(*alone, environment)
        else:
            done = subprocess.run(
                ["bash", "-c", text],
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=PATIENCE,
                check=False,
            )
            status, output = done.returncode, f"{done.stdout}{done.stderr}"
        assert status == command.status, (
            f"{page.name}:{command.line}: `{text}` exited with {status}, not"
            f" {command.status}\n{output}"
        )


def without_a_shell(text: str) -> tuple[list[str], str | None] | None:
    """The words of a single smtrain command, and its output file; None if it needs a shell."""
    lexer = shlex.shlex(
        text.replace(DEMO, os.environ["SMTRAIN_HOME"]), posix=True, punctuation_chars=True
    )
    lexer.wordchars += "[]{}:$@,%^+"
    words = list(lexer)
    file = words.pop() if len(words) > 2 and words[-2] == ">" else None
    words = words[:-1] if file else words
    ours = words[0] == "smtrain" and not any(set(word) <= set("();<>|&") for word in words)
    return (words, file) if ours else None


def called(words: list[str], file: str | None, environment: dict[str, str]) -> tuple[int, str]:
    """Run the command in this process; return its status and output."""
    with pytest.MonkeyPatch.context() as patch:
        for name in os.environ.keys() - environment.keys():
            patch.delenv(name)
        done = typed(*words[1:], **environment)
    if file:
        Path(file).write_text(done.stdout, "utf-8")
    return done.returncode, done.stdout + done.stderr


def examples() -> dict[str, doctest.DocTest]:
    """The examples in the docstrings of the public names, by name."""
    examples_by_name = {}
    for name in smtrain.__all__:
        # The Ctrl-C decorator keeps the docstring, but not its position in the source.
        held = doctest.DocTestParser().get_doctest(
            inspect.getdoc(getattr(smtrain, name)) or "", {}, name, None, None
        )
        if held.examples:
            examples_by_name[name] = held
    return examples_by_name


def test_every_public_function_and_the_job_have_an_example() -> None:
    functions = {name for name in smtrain.__all__ if inspect.isfunction(getattr(smtrain, name))}
    assert examples().keys() == functions | {"Job", "Run"}


@pytest.mark.parametrize("name", sorted(examples()))
def test_an_example_of_the_reference_is_true(
    name: str, llama: smtrain.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(ROOT / "docs/llama.yaml", tmp_path)
    monkeypatch.chdir(tmp_path)
    test = examples()[name]
    test.globs["smtrain"] = smtrain
    for example in test.examples:
        example.source = example.source.replace("llama-train-1a2b3c4d", llama.job("train").name)
        example.want = example.want.replace("llama-train-1a2b3c4d", llama.job("train").name)
    failures: list[str] = []
    doctest.DocTestRunner().run(test, out=failures.append)
    assert not failures, "".join(failures)


def test_every_parameter_of_a_public_function_is_documented() -> None:
    for name in smtrain.__all__:
        function = getattr(smtrain, name)
        if not inspect.isfunction(function):
            continue
        text = inspect.getdoc(function) or ""
        documented = set(
            re.findall(
                r"^    \*{0,2}(\w+): ",
                text.partition("Args:")[2].partition("\n\n")[0],
                re.MULTILINE,
            )
        )
        assert documented == inspect.signature(function).parameters.keys(), name
        assert "Raises:" in text, name
