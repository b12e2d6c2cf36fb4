"""Codes of errors: which one an error has, and that the page lists each code of the source."""

from __future__ import annotations

import errno
import pickle
import re
from pathlib import Path
from typing import Any, get_args

import pytest

import smtrain
from smtrain.core.errors import CheckpointError, Code, ConfigError, JobError, Sentence, SmtrainError, reworded
from smtrain.core.extras import missing
from smtrain.core.public import public, translated

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_lists_each_code_and_each_code_is_used() -> None:
    rows = re.findall(r"^\| `([a-z_.]+)` \|", (ROOT / "docs/api/errors.md").read_text("utf-8"), re.M)
    assert sorted(rows) == sorted(get_args(Code))
    source = "".join(
        file.read_text("utf-8").replace(str(Code), "") for file in (ROOT / "smtrain").rglob("*.py")
        if file.name != "errors.py"
    )  # fmt: skip
    defaults = {"error", *(error.code for error in SmtrainError.__subclasses__())}
    assert [code for code in get_args(Code) if f'"{code}"' not in source and code not in defaults] == []


def test_where_the_code_of_an_error_comes_from() -> None:
    assert (SmtrainError("x").code, JobError("x").code, CheckpointError("x").code) == ("error", "job", "checkpoint")
    assert JobError("x", code="job.failed").code == "job.failed"
    assert JobError(missing("pandas")).code == "package.missing"
    assert JobError(missing("pandas"), code="job.failed").code == "job.failed"
    assert reworded(Sentence("x", "disk.full"), "y") == "y"
    assert JobError(reworded(Sentence("x", "disk.full"), "y")).code == "disk.full"


def test_a_config_error_has_a_code_for_each_fault(raw: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        smtrain.load_config(
            raw, set_=["train.lr=fast", "train.stepz=1", "train.warmup_steps=200", "train.steps=100", "data.path=/no"]
        )
    expected = ["config.unknown_key", "config.wrong_value", "config.combination", "data.not_found"]
    assert sorted(caught.value.codes) == sorted(expected)
    assert caught.value.code == caught.value.codes[0]
    assert len(caught.value.codes) == len(caught.value.faults)
    assert ConfigError(caught.value.faults).codes == caught.value.codes
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (copy.codes, copy.faults, str(copy)) == (caught.value.codes, caught.value.faults, str(caught.value))


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
    wrong = translated(ModuleNotFoundError("no", name="pandas"))
    assert wrong is not None
    assert wrong.code == "package.missing"
