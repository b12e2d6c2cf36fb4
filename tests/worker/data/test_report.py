"""The report on text counts correctly, finds overlaps, and escapes text."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from smtrain.core.errors import DataError
from smtrain.worker.data.clean.cleaning import EvaluationTexts
from smtrain.worker.data.clean.overlap import OverlapFinder, read_tests
from smtrain.worker.data.report import page, report
from tests.phone import assert_fits_a_phone
from tests.typed import typed as smtrain

QUESTION = (
    "which of these four cities was the capital of the kingdom before the year of the great fire"
)


def lines(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_what_is_there_is_counted(tmp_path: Path, tokenizer_folder: Path) -> None:
    menu = "Home | About | Contact | Search the site"
    one = lines(
        tmp_path / "one.jsonl",
        ["short", "short", "", f"{menu}\na page of words", f"{menu}\nanother page"],
    )
    two = lines(
        tmp_path / "two.jsonl",
        ["short", "это русский текст", "日本語のテキスト", "<script>alert(1)</script>"],
    )
    with two.open("a") as file:
        file.write("no json\n")
    result = report([one, two], tokenizer_folder)
    assert [(s.documents, s.duplicates, s.empty, s.bad) for s in result.sources] == [
        (5, 1, 1, 0),
        (4, 1, 0, 1),
    ]
    assert result.sources[0].characters == 10 + 2 * len(menu) + len(
        "\na page of words\nanother page"
    )
    assert result.sources[1].scripts == {"Latin": 2, "Cyrillic": 1, "Japanese": 1}
    assert result.sources[0].lengths[0] == 1
    assert result.sources[0].lengths[3] == 2  # 4 to 7 characters
    assert result.repeated == [(menu, 2)]
    assert result.sources[0].tokens > 0
    assert result.tested is None
    shown = page(result)
    assert_fits_a_phone(shown)
    assert "<script>alert" not in shown
    assert "two.jsonl, line 5: not JSON" in shown
    assert "<span>1</span>" in shown, (
        "a length that no document has stands between those that some have"
    )
    assert "<span>0 (0.0%)</span>" in shown


def test_what_a_model_will_be_tested_on_is_found_by_source(tmp_path: Path) -> None:
    tests = lines(
        tmp_path / "tests.jsonl",
        [QUESTION, "a question of few words", QUESTION.replace("cities", "towns")],
    )
    clean = lines(
        tmp_path / "clean.jsonl",
        ["a page about something else that has quite a number of words in it too"] * 3,
    )
    leak = lines(
        tmp_path / "leak.jsonl",
        [f"Quiz: {QUESTION.upper()}?", "nothing " * 40, f"{QUESTION} again"],
    )
    result = report([clean, leak], against=[tests])
    assert [source.overlapping for source in result.sources] == [0, 2]
    assert result.tested == (3, 2, 1)  # the two questions share their last words
    assert result.examples["overlaps with tests"][0].startswith("leak.jsonl: ")
    assert "Overlap with tests" in page(result)
    (tmp_path / "none.jsonl").touch()
    with pytest.raises(DataError, match="holds no document"):
        report([tmp_path / "none.jsonl"])
    with pytest.raises(DataError, match="no text of 1 has 13 words"):
        report([clean], against=[lines(tmp_path / "few.jsonl", ["few words"])])
    tests.write_text(
        tests.read_text() + '{"question": "another field, whose text would not be compared"}\n'
    )
    with pytest.raises(
        DataError,
        match=r"tests\.jsonl, line 4: no column 'text'.*set data\.text_column to question",
    ):
        report([clean], against=[tests])
    with pytest.raises(
        DataError, match=r"line 4: .*set data\.decontaminate\.text_column to question"
    ):
        read_tests(EvaluationTexts(str(tests)))


def test_an_overlap_is_a_run_of_words_and_nothing_else() -> None:
    draw = random.Random(1)
    words = [f"w{i}" for i in range(30)]
    tested = [" ".join(draw.choices(words, k=20)) for _ in range(5)]
    tests = OverlapFinder(tested)
    runs = {tuple(t.split()[i : i + 13]) for t in tested for i in range(8)}
    for _ in range(200):
        source = draw.choice(tested).split()
        at, size = draw.randrange(8), draw.randrange(10, 17)
        text = [
            *draw.choices(words, k=draw.randrange(9)),
            *source[at : at + size],
            *draw.choices(words, k=5),
        ]
        wanted = any(tuple(text[i : i + 13]) in runs for i in range(len(text) - 12))
        assert bool(tests.in_text(" ".join(text))[0]) == wanted


def test_only_the_beginning_is_read_where_that_is_asked(tmp_path: Path) -> None:
    for number in range(4):
        lines(tmp_path / f"{number}.jsonl", ["some words of text"] * 100)
    result = report([tmp_path], most_bytes=2000)
    assert not result.whole
    assert result.sources[0].documents == 100
    assert "Only the beginning" in page(result)


def test_fields_that_are_not_read_are_named(tmp_path: Path) -> None:
    rows = [
        {"text": "a page of words", "title": "a title", "n": 1},
        {"text": "another page", "title": ""},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tests.jsonl").write_text(json.dumps({"text": QUESTION, "answer": "none"}) + "\n")
    done = smtrain(
        "data",
        "report",
        str(tmp_path / "a.jsonl"),
        "--against",
        str(tmp_path / "tests.jsonl"),
        "--out",
        str(tmp_path / "page.html"),
    )
    assert done.returncode == 0, done.stderr
    assert "a.jsonl: not read: title 1\n" in done.stdout
    assert "--against: not read: answer 1\n" in done.stdout
