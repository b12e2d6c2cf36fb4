"""`smtrain data`: from text to tokens and back to foreign formats, in a shell."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from tests.cli.test_cli import smtrain as process
from tests.typed import typed as smtrain
from tests.worker.data.pack.test_exchange import pair


def test_the_whole_way(tmp_path: Path, trained_inputs: dict[str, Path]) -> None:
    text, model, out = (
        str(trained_inputs["text"]),
        str(trained_inputs["model"]),
        str(tmp_path / "out"),
    )
    done = smtrain(
        "data", "prepare", text, out, "--model", model, "--seq-len", "32", "--separator", "\\n"
    )
    assert done.returncode == 0, done.stderr
    assert "30 documents" in done.stdout
    done = smtrain("data", "inspect", out, "--model", model, "--png", str(tmp_path / "p.png"))
    assert "begins: 'the red fox number 0" in done.stdout
    assert (tmp_path / "p.png").is_file()
    assert json.loads(smtrain("data", "inspect", out, "--json").stdout)["documents"] == 30
    part = str(tmp_path / "part")
    assert smtrain("data", "split", out, part, "0.9", "0.1").stdout.split() == [
        f"{part}_0",
        f"{part}_1",
    ]
    assert (
        "30 documents"
        in smtrain("data", "merge", f"{part}_0", f"{part}_1", str(tmp_path / "again")).stdout
    )
    assert pair(tmp_path / "again") == pair(tmp_path / "out/tokens")
    blocks = str(tmp_path / "blocks")
    assert "blocks of 64" in smtrain("data", "export", out, blocks, "--seq-len", "64").stdout
    done = smtrain(
        "data", "import", blocks, str(tmp_path / "back"), "--model", model, "--seq-len", "64"
    )
    assert "samples of 64" in done.stdout
    done = process(
        "data", "prepare", "hf://x/y", str(tmp_path / "z"), "--model", model, HF_HUB_OFFLINE="1"
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith("smtrain: hf://x/y: ")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            "--objective dpo --deduplicate --text-column q",
            (
                "--text-column: is for --objective pretrain; leave it out for dpo\n"
                "smtrain: --deduplicate: is for --objective pretrain; leave it out for dpo\n"
            ),
        ),
        ("--objective sft --no-eod", "--no-eod: is for --objective pretrain; leave it out"),
        (
            "--objective sft --language en --pii mask",
            "--pii: is for --objective pretrain; leave it out",
        ),
        ("--overlong drop", "--overlong: is for --objective sft; leave it out"),
        (
            "--chat-template-kwargs '{\"a\":1}'",
            "--chat-template-kwargs: is for --objective sft and dpo; leave it out",
        ),
        (
            "--format megatron --filter c4",
            "--filter: megatron is tokens, which nothing filters; leave it out",
        ),
        ("--validation-split 8,1,1", "--validation-split: cuts Megatron's indexed data"),
        ("--phone-region US", "--phone-region: has no effect unless --pii is set; leave it out"),
        (
            "--decontaminate-column q",
            "--decontaminate-column has no effect without --decontaminate; give it too",
        ),
        ("--max-crashed 2", "--max-crashed has no effect without --ray-address; give it too"),
        ("--language EN", "--language: got"),
        ("--language xx", "--language: lid.176.ftz has no 'xx'"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused(
    tmp_path: Path, trained_inputs: dict[str, Path], words: str, sentence: str
) -> None:
    text, model = str(trained_inputs["text"]), str(trained_inputs["model"])
    done = smtrain(
        "data", "prepare", text, str(tmp_path / "out"), "--model", model, *shlex.split(words)
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"smtrain: {sentence}"), done.stderr
    assert not (tmp_path / "out").exists()


def test_tokens_are_no_text_to_report_on(tmp_path: Path, trained_inputs: dict[str, Path]) -> None:
    text, model, out = (
        str(trained_inputs["text"]),
        str(trained_inputs["model"]),
        str(tmp_path / "out"),
    )
    more = ("--model", model, "--seq-len", "32", "--separator", "\\n")
    assert smtrain("data", "prepare", text, out, *more).returncode == 0
    for words in (
        ("report", out, "--out", str(tmp_path / "r.html")),
        ("report", text, "--against", out, "--out", str(tmp_path / "r.html")),
        ("prepare", text, str(tmp_path / "z"), *more, "--decontaminate", out),
    ):
        done = smtrain("data", *words)
        assert (done.returncode, done.stdout) == (2, ""), words
        assert "tokens.idx holds tokens; give the text that they were made from" in done.stderr, (
            words
        )
