"""Personal data is found, and similar text is not."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from smtrain.worker.data.clean.cleaning import Cleaning
from smtrain.worker.data.clean.pii import CARD, EMAIL, IP, PHONE, PersonalData, luhn
from smtrain.worker.data.clean.refiner import open_refiner
from smtrain.worker.data.read.ignored_fields import EXAMPLES
from tests.extras import need
from tests.tiers import examples
from tests.worker.data.quiet import prepare

need("phonenumbers")

FOUND = [
    ("write to Jane.Doe+news@mail.example.co.uk.", EMAIL, "write to <EMAIL_ADDRESS>."),
    ("<a href='mailto:x_1@host-2.org'>", EMAIL, "<a href='mailto:<EMAIL_ADDRESS>'>"),
    ("from 8.8.8.8, port 53", IP, "from <IP_ADDRESS>, port 53"),
    ("at 2001:4860:4860::8888 too", IP, "at <IP_ADDRESS> too"),
    ("card 4111 1111 1111 1111!", CARD, "card <CREDIT_CARD>!"),
    ("3782-822463-10005", CARD, "<CREDIT_CARD>"),
    ("call +44 20 7946 0018 now", PHONE, "call <PHONE_NUMBER> now"),
    ("call +1 (650) 253-0000.", PHONE, "call <PHONE_NUMBER>."),
]
NOT = [
    "version 1.2.3.4.5 and 999.1.1.1",
    "10.0.0.1 and 192.168.1.7 and ::1",
    "std::vector and 12:30:45",
    "a@b and @name",
    "4111 1111 1111 1112",
    "0000 0000 0000 0000",
    "in 1999-2003, pages 1234567",
    "3.141592653589793 2.718281828",
    "git@",
    "sha 4111111111111111a",
    "fe80::1 and 2001:db8::1",
]


@pytest.mark.parametrize(("text", "kind", "masked"), FOUND)
def test_what_is_there_is_masked_and_counted(text: str, kind: str, masked: str) -> None:
    assert PersonalData().mask(text) == (masked, {kind: 1})


@pytest.mark.parametrize("text", NOT)
def test_what_only_looks_like_it_stays(text: str) -> None:
    assert PersonalData().mask(text) == (text, {})


def test_numbers_without_a_country_need_one() -> None:
    text = "call (650) 253-0000 or 212 736 5000 today"
    assert PersonalData().mask(text)[1] == {}
    assert PersonalData("US").mask(text) == (
        "call <PHONE_NUMBER> or <PHONE_NUMBER> today",
        {PHONE: 2},
    )


@given(st.text(st.sampled_from("0123456789"), min_size=12, max_size=18))
def test_just_one_check_digit_fits(digits: str) -> None:
    assert sum(luhn(digits + str(last)) for last in range(10)) == 1


@settings(max_examples=examples(40), deadline=None)
@given(st.text())
def test_any_text_is_taken_and_masking_twice_is_masking_once(text: str) -> None:
    masked, counts = PersonalData("US").mask(text)
    assert (masked != text) == bool(counts)
    assert PersonalData("US").mask(masked) == (masked, {})


def test_long_runs_of_what_patterns_begin_with_come_to_an_end() -> None:
    for run in ("a", "a.", "1", "1.1.", "a@", "1 ", "f:", "+1"):
        assert isinstance(PersonalData("US").mask(run * (20_000 // len(run))), tuple)


@pytest.mark.parametrize("mode", ["mask", "drop", "count"])
def test_masked_dropped_or_only_counted(mode: Any, tmp_path: Path, tokenizer_folder: Path) -> None:
    texts = ["the words of a small text"] * 3 + ["mail me@host.org and me2@host.org"]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    made = prepare(
        tmp_path / "a.jsonl",
        tmp_path / mode,
        tokenizer_folder,
        seq_len=8,
        cleaning=Cleaning(pii=mode),
    )
    assert made.noted == {EMAIL: 2}
    assert made.dropped == ({"with personal data": 1} if mode == "drop" else {})
    assert made.examples == {EMAIL: ["mail <EMAIL_ADDRESS> and <EMAIL_ADDRESS>"]}
    assert "host.org" not in (tmp_path / mode / "manifest.json").read_text()
    masked = ["mail <EMAIL_ADDRESS> and <EMAIL_ADDRESS>"] if mode == "mask" else texts[3:]
    (tmp_path / "b.jsonl").write_text(
        "".join(
            json.dumps({"text": t}) + "\n"
            for t in [*texts[:3], *([] if mode == "drop" else masked)]
        )
    )
    prepare(tmp_path / "b.jsonl", tmp_path / "wanted", tokenizer_folder, seq_len=8)
    assert (tmp_path / mode / "tokens.bin").read_bytes() == (
        tmp_path / "wanted/tokens.bin"
    ).read_bytes()


def test_processes_give_what_one_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(2)
    texts = [
        f"{draw.random()} mail {draw.random()}@host.org " * draw.randrange(4) for _ in range(200)
    ]
    cleaning = Cleaning(pii="mask")
    with open_refiner(cleaning, 1, 1 << 40) as here:
        assert here is not None
        wanted = here(texts)
    with open_refiner(cleaning, 2, 1 << 40) as elsewhere:
        assert elsewhere is not None
        assert elsewhere(texts) == wanted
    with open_refiner(Cleaning(), 2, 1 << 40) as nothing:
        assert nothing is None
    found = wanted.findings
    assert found.noted[EMAIL] > 9 == len(found.examples[EMAIL]) - 1 == EXAMPLES - 1
