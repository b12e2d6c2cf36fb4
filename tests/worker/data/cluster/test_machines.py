"""Any number of machines writes the same bytes, even if some of them end early."""

from __future__ import annotations

import gzip
import json
import random
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from smtrain.core.errors import DataError
from smtrain.worker.data.clean.cleaning import Cleaning
from smtrain.worker.data.clean.holdout import HoldOut
from smtrain.worker.data.prepare.cluster.coordinator import MeetingPoint
from smtrain.worker.data.prepare.cluster.dealer import Dealer
from smtrain.worker.data.prepare.cluster.shares import Share
from smtrain.worker.data.prepare.prepare import assist, prepare
from smtrain.worker.data.prepare.prepare_options import PrepareOptions
from smtrain.worker.data.prepare.sft import assist_sft, prepare_sft
from smtrain.worker.data.read import blocks
from tests.worker.data.cluster.hosts import ends_after, free_address, on_machines, until_done
from tests.worker.data.corpora import corpus, digest

OPTIONS = PrepareOptions(
    seq_len=8, cleaning=Cleaning(deduplicate=True, min_characters=2), workers=2, holdout=HoldOut(fraction=0.2),
    max_bad=999,
)  # fmt: skip


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 256)


@pytest.mark.sample(3)
@pytest.mark.parametrize("seed", range(6))
def test_one_digest_for_every_number_of_machines_and_every_kill(
    seed: int, tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    sources = corpus(tmp_path / "text", draw)
    prepare(sources, tmp_path / "wanted", tokenizer_folder, OPTIONS, progress=ignore, say=ignore)
    wanted = digest(tmp_path / "wanted")
    ends_after(monkeypatch, draw)
    out = tmp_path / "out"
    size = draw.choice([256, 512, 1024])

    def run(progress: Any) -> None:
        on_machines(
            draw.randrange(1, 4), sources, out, tokenizer_folder, OPTIONS, share_bytes=size, progress=progress,
        )  # fmt: skip

    until_done(draw, run, [1, 3, 8, 20, 999], 12)
    assert digest(out) == wanted
    assert sorted(p.name for p in out.iterdir()) == sorted(p.name for p in (tmp_path / "wanted").iterdir())


def ignore(_: object) -> None:
    pass


def test_a_bad_line_is_told_with_its_place_in_the_whole_file(tmp_path: Path, tokenizer_folder: Path) -> None:
    rows = [json.dumps({"text": f"words of text {i}"}) for i in range(100)]
    rows[83] = "no json"
    source = tmp_path / "a.jsonl"
    source.write_text("\n".join(rows))
    with pytest.raises(DataError, match=r"a\.jsonl, line 84: not JSON"):
        on_machines(2, [source], tmp_path / "out", tokenizer_folder, PrepareOptions(seq_len=8))
    assert not (tmp_path / "out").exists()


def test_a_file_that_cannot_be_read_ends_it_for_all(tmp_path: Path, tokenizer_folder: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.jsonl").write_text('{"text": "the words of a small text"}\n' * 50)
    (tmp_path / "text/b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "words"}\n')[:-9])
    with pytest.raises(DataError, match="not a whole gzip file"):
        on_machines(3, [tmp_path / "text"], tmp_path / "out", tokenizer_folder, PrepareOptions(seq_len=8))


def test_a_machine_with_other_text_is_turned_away_and_the_rest_goes_on(tmp_path: Path, tokenizer_folder: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text('{"text": "the words of a small text"}\n' * 50)
    said: list[str] = []
    other = tmp_path / "b.jsonl"
    other.write_text('{"text": "other words"}\n')
    refused: list[str] = []
    machines: list[MeetingPoint] = []

    def run(real: Any) -> None:
        with pytest.raises(DataError) as caught:
            assist(other, tokenizer_folder, PrepareOptions(seq_len=8), machines[0], say=ignore)
        refused.append(str(caught.value))
        real()

    machines.append(MeetingPoint(free_address()))
    on_machines(
        2,
        [source],
        tmp_path / "out",
        tokenizer_folder,
        PrepareOptions(seq_len=8),
        say=said.append,
        other=run,
        address=machines[0].address,
    )
    assert "has turned this one away: it has other text" in refused[0]
    assert any("was turned away" in sentence for sentence in said)


def test_without_a_first_machine_one_sentence_says_so(tmp_path: Path, tokenizer_folder: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text('{"text": "the words of a small text"}\n')
    with pytest.raises(DataError, match="cannot be reached"):
        assist(
            source,
            tokenizer_folder,
            PrepareOptions(seq_len=8),
            MeetingPoint(free_address(), comes_within=0),
            say=ignore,
        )


def test_conversations_too(tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(3)
    model = tmp_path / "model"
    shutil.copytree(tokenizer_folder, model)
    about = json.loads((model / "tokenizer_config.json").read_text())
    about["chat_template"] = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    (model / "tokenizer_config.json").write_text(json.dumps(about))
    rows = [
        {"instruction": "say the words", "output": "words " * draw.randrange(9) or "none"} if i % 9 else {"no": i}
        for i in range(150)
    ]
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    good = [row for row in rows if "no" not in row]
    pq.write_table(pa.Table.from_pylist(good), tmp_path / "text/b.parquet", row_group_size=20)
    options = PrepareOptions(seq_len=16, workers=1, holdout=HoldOut(fraction=0.2), max_bad=99)
    sources = [tmp_path / "text"]
    prepare_sft(sources, tmp_path / "wanted", model, options, progress=ignore, say=ignore)
    ends_after(monkeypatch, draw)
    for count in (1, 2, 3):
        on_machines(count, sources, tmp_path / f"{count}", model, options, first=prepare_sft, others=assist_sft)
        assert digest(tmp_path / f"{count}") == digest(tmp_path / "wanted")


def test_a_share_that_all_wait_for_is_told_once(tmp_path: Path) -> None:
    shares = [Share(number, 0, ((0, None),), 10) for number in range(2)]
    dealer = Dealer(shares, 0, tmp_path, "key", straggles_s=0)
    assert dealer.slowest() is None, "no machine has it yet"
    assert dealer.take("1", wait=False) == shares[0]
    assert dealer.take("2", wait=False) == shares[1]
    late = dealer.slowest()
    assert late is not None
    assert late[0] == shares[0]
    assert dealer.slowest() is None
    dealer.end()
