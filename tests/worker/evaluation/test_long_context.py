"""The tasks for long texts: needles of exact length at their depth, and the loss of each range of
positions.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from smtrain.cli.dispatch import call
from smtrain.core.errors import DataError
from smtrain.worker.evaluation import long_context as module
from smtrain.worker.evaluation import report
from smtrain.worker.evaluation.evaluate import evaluate, format_result, save
from smtrain.worker.evaluation.harness import EvaluationRequest, Measurement, Score
from smtrain.worker.evaluation.long_context import (
    DEPTHS,
    LongRequest,
    haystack_of,
    lengths_for,
    needle_text,
)

LENGTHS = (64, 128, 200)
POSITIONS, NEEDLE = ("loss_by_position",), ("needle",)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, trained_inputs: dict[str, Path]) -> Path:
    folder = tmp_path_factory.mktemp("models") / "after"
    shutil.copytree(trained_inputs["model"], folder)
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two documents that are long enough, and a shorter one."""
    folder = tmp_path_factory.mktemp("text")
    documents = [
        "too short",
        *(" ".join(f"line {i * n} of {i}" for i in range(200)) for n in (3, 7)),
    ]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in documents))
    return folder


def tokens(model: Path) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(model)
    return lambda said: list(tokenizer(said, add_special_tokens=False)["input_ids"])


def long(model: Path, request: LongRequest, base: Path | None = None) -> dict[str, Any]:
    return evaluate(model, base, EvaluationRequest(()), lambda _: None, None, request)


def test_a_question_has_its_length_and_the_needle_at_its_depth(model: Path, text: Path) -> None:
    of = tokens(model)
    for source in (None, text):
        haystack = haystack_of(of, source, LENGTHS[-1])
        for length in LENGTHS:
            for depth in DEPTHS:
                ids, answer = needle_text(of, [], haystack, length, depth, 0)
                assert len(ids) == length
                claim = ids[-answer - len(of(" The secret number of Oslo is")) :][:-answer]
                assert needle_text(of, [], haystack, length, depth, 0) == (ids, answer)
                room = ids[: -answer - len(claim)]
                at = next(i for i in range(length) if room[i : i + answer] == ids[-answer:])
                hay = length - 2 * (answer + len(claim)) - len(of("."))
                assert at == pytest.approx(depth * hay + len(claim), abs=3)
    assert needle_text(of, [], haystack, 128, 0.5, 0) != needle_text(of, [], haystack, 128, 0.5, 1)
    with pytest.raises(DataError, match="64 tokens hold no needle"):
        needle_text(lambda said: of(said) * 9, [], haystack, 64, 0.5, 0)


def test_the_loss_of_each_range_is_that_of_transformers(
    model: Path, text: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(module, "_CHUNK", 50)  # ranges and pieces do not agree
    made = long(model, LongRequest(POSITIONS, LENGTHS, text))
    plain: Any = AutoModelForCausalLM.from_pretrained(model)
    rows = []
    for line in (text / "a.jsonl").read_text().splitlines()[1:]:
        ids = torch.tensor(tokens(model)(json.loads(line)["text"])[: LENGTHS[-1] + 1])[None]
        with torch.no_grad():
            logits = plain(input_ids=ids[:, :-1]).logits[0]
        rows.append(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none"))
    low, high = (
        Score("t", "loss", "none", 2.0, 0.1, 3, False, tuple(each))
        for each in ([1, 2, 3], [2, 3.1, 4])
    )
    theirs = [
        torch.stack([row[a:b].mean() for row in rows]).mean().item()
        for a, b in ((0, 64), (64, 128), (128, 200))
    ]
    after = made["long"]["after"]
    assert [row[:2] for row in after["loss_by_position"]] == [[0, 64], [64, 128], [128, 200]]
    assert [row[2] for row in after["loss_by_position"]] == pytest.approx(theirs, rel=1e-5)
    assert [(row["filter"], row["n"]) for row in made["results"]][:2] == [
        ("none", 2),
        ("0 to 64", 2),
    ]
    assert "loss of positions" in format_result(made)
    worse = report.rows(
        *(Measurement({("t", "loss", "none"): score}, {"t": []}) for score in (low, high))
    )
    assert (worse[0]["verdict"], worse[0]["difference"]["lost"]) == ("worse", 3)
    with pytest.raises(DataError, match=r"has the 3001 tokens .* evaluate\.lengths up to 2163"):
        long(model, LongRequest(POSITIONS, (3000,), text))


def test_before_and_after_have_the_same_questions_and_a_picture(
    model: Path, tmp_path: Path
) -> None:
    made = long(model, LongRequest(NEEDLE, (64, 96), limit=1), base=model)
    assert [row[0] for row in made["long"]["before"]["needle"]] == [64, 96]
    assert made["results"][0]["verdict"] == "within the noise"
    assert made["results"][0]["n"] == 2 * len(DEPTHS)
    save(made, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["evaluation.json"]
    save(made, tmp_path, with_pictures=True)
    drawn = (tmp_path / "needle-after.svg").read_text()
    assert drawn.count("<rect") == 2 * len(DEPTHS)
    assert "100%" in drawn
    assert lengths_for(8192) == (1024, 2048, 4096, 8192)


def test_the_command_refuses_what_no_task_reads_and_a_missing_text(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, said in (
        (["--tasks", "loss_by_position"], "--text: is missing"),
        (["--tasks", "mmlu", "--lengths", "64,128"], "only the tasks needle and loss_by_position"),
        (["--tasks", "needle", "--lengths", "128,64"], "rising numbers"),
        (["--tasks", "needle", "--lengths", "many"], "numbers of tokens"),
    ):
        assert call("evaluate", "smtrain.cli.evaluate", [str(model), *words]) == 2
        assert said in capsys.readouterr().err
