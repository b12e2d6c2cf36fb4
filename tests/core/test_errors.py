"""Codes of errors: which one an error has, and that the page lists each code of the source."""

from __future__ import annotations

import ast
import errno
import pickle
import re
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest

import smtrain
from smtrain.core.errors import (
    CheckpointError,
    Code,
    ConfigError,
    JobError,
    Sentence,
    SmtrainError,
    reword,
)
from smtrain.core.extras import missing_module
from smtrain.core.public_api import public, to_smtrain_error

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_lists_each_code_and_each_code_is_used() -> None:
    rows = re.findall(
        r"^\| `([a-z_.]+)` \|", (ROOT / "docs/api/errors.md").read_text("utf-8"), re.M
    )
    assert sorted(rows) == sorted(get_args(Code))
    source = "".join(
        file.read_text("utf-8").replace(str(Code), "")
        for file in (ROOT / "smtrain").rglob("*.py")
        if file.name != "errors.py"
    )
    defaults = {"error", *(error.code for error in SmtrainError.__subclasses__())}
    assert [
        code for code in get_args(Code) if f'"{code}"' not in source and code not in defaults
    ] == []


def test_where_the_code_of_an_error_comes_from() -> None:
    assert (SmtrainError("x").code, JobError("x").code, CheckpointError("x").code) == (
        "error",
        "job",
        "checkpoint",
    )
    assert JobError("x", code="job.failed").code == "job.failed"
    assert JobError(missing_module("pandas")).code == "package.missing"
    assert JobError(missing_module("pandas"), code="job.failed").code == "job.failed"
    assert reword(Sentence("x", "disk.full"), "y") == "y"
    assert JobError(reword(Sentence("x", "disk.full"), "y")).code == "disk.full"


def test_a_config_error_has_a_code_for_each_fault(raw: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        smtrain.load_config(
            raw,
            set_=[
                "train.lr=fast",
                "train.stepz=1",
                "train.warmup_steps=200",
                "train.steps=100",
                "data.path=/no",
            ],
        )
    expected = ["config.unknown_key", "config.wrong_value", "config.combination", "data.not_found"]
    assert sorted(caught.value.codes) == sorted(expected)
    assert caught.value.code == caught.value.codes[0]
    assert len(caught.value.codes) == len(caught.value.faults)
    assert ConfigError(caught.value.faults).codes == caught.value.codes
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.codes, copy.faults, str(copy)) == (
        caught.value.codes,
        caught.value.faults,
        str(caught.value),
    )


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"model": {"path": "/nowhere"}}, "model.not_found"),
        ({"compute": {"environment": {"TOKEN": "hf_" + "a1B2" * 9}}}, "config.secret"),
        ({"model": None}, "config.wrong_value"),
        ("nowhere.yaml", "config.unreadable"),
        ({"name": "x"}, "config.missing_key"),
    ],
)
def test_the_code_of_a_single_fault(raw: dict[str, Any], given: Any, code: str) -> None:
    whole = given if isinstance(given, str) or given == {"name": "x"} else {**raw, **given}
    with pytest.raises(ConfigError) as caught:
        smtrain.load_config(whole)
    assert caught.value.codes == [code]


def test_errors_of_the_machine_and_wrong_calls() -> None:
    @public
    def full(path: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", path)

    with pytest.raises(SmtrainError) as caught:
        full("a")
    assert caught.value.code == "disk.full"
    with pytest.raises(SmtrainError) as caught:
        full(1)  # type: ignore[arg-type]
    assert caught.value.code == "call.invalid"
    wrong = to_smtrain_error(ModuleNotFoundError("no", name="pandas"))
    assert wrong is not None
    assert wrong.code == "package.missing"


# What a sentence says decides its code. Patterns of sentences of any class, then of one.
SAYS = {
    "package.missing": r"pip install [a-z]|\bmissing\(|needs the package",
    "CheckpointError checkpoint.damaged": (
        r"copy (this file|it) again|is not what the manifest|take another checkpoint"
    ),
    "CheckpointError checkpoint.other_model": (
        r"take this model's|saved with these weights|from the same model"
    ),
    "CheckpointError checkpoint.missing": (
        r"has no config\.json|holds no (adapter|checkpoint)|does not exist"
    ),
    "JobError aws.refused": r"was refused|error\.response",
    "JobError job.not_found": (
        r"no run or job is called|cannot be (the name of a run|a run's name|a job's name)"
    ),
    "DataError data.not_found": (
        r"does not exist|is not a prepared dataset|holds no (file|document)"
    ),
}


@cache
def _raised() -> list[tuple[str, str, ast.Call]]:
    """The calls that make a public error, with their place and class."""
    raised: list[tuple[str, str, ast.Call]] = []
    public = {"SmtrainError", *(cls.__name__ for cls in SmtrainError.__subclasses__())}
    for file in sorted((ROOT / "smtrain").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Call) and node.args and ast.unparse(node.func) in public:
                raised.append(
                    (f"{file.relative_to(ROOT)}:{node.lineno}", ast.unparse(node.func), node)
                )
    return raised


def _has_code(call: ast.Call) -> bool:
    """Whether a call names a code, or passes on a sentence that may have one."""
    first = call.args[0]
    written = [first, *(first.elts if isinstance(first, ast.List) else [])]
    written += [first.elt] if isinstance(first, ast.ListComp | ast.GeneratorExp) else []
    literal = any(isinstance(one, ast.JoinedStr | ast.Constant) for one in written)
    return not literal or any(keyword.arg == "code" for keyword in call.keywords)


def test_every_fault_of_a_config_or_an_option_has_a_code_of_its_own() -> None:
    assert [
        place for place, name, call in _raised() if name == "ConfigError" and not _has_code(call)
    ] == []


@pytest.mark.parametrize("which", SAYS)
def test_a_sentence_of_a_known_kind_has_its_code(which: str) -> None:
    only = which.rpartition(" ")[0]
    without = [
        place
        for place, name, call in _raised()
        if only in ("", name)
        and not _has_code(call)
        and re.search(SAYS[which], ast.unparse(call.args[0]))
    ]
    assert without == []


def test_a_fault_that_two_rules_find_is_said_once() -> None:
    error = ConfigError(iter(["a: wrong", "b: wrong", "a: wrong"]))
    assert (error.faults, len(error.codes)) == (["a: wrong", "b: wrong"], 2)


def test_a_value_without_an_end_is_cut() -> None:
    for error in (
        CheckpointError(f"name: {'a' * 5000} is wrong"),
        ConfigError([f"name: {'a' * 5000} is wrong"]),
    ):
        assert str(error) == f"name: {'a' * 80}... is wrong"
    assert str(CheckpointError(f"{'a' * 1999} is right")) == f"{'a' * 1999} is right"
