"""Any number of machines writes the same bytes, whatever happens to their tasks."""

from __future__ import annotations

import collections
import dataclasses
import gzip
import itertools
import json
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from smtrain.core.errors import DataError
from smtrain.worker.data.clean.cleaning import Cleaning, EvaluationTexts, NearDuplicates
from smtrain.worker.data.clean.holdout import HoldOut
from smtrain.worker.data.manifest import DatasetManifest
from smtrain.worker.data.part_uploads import StoppedError
from smtrain.worker.data.prepare.prepare import prepare
from smtrain.worker.data.prepare.progress import DataProgress
from smtrain.worker.data.prepare.sft import prepare_sft
from smtrain.worker.data.prepare.spread import driver, share_files
from smtrain.worker.data.prepare.spread.driver import CrashedError, Spread
from smtrain.worker.data.prepare.spread.shared_folder import SharedPlace
from smtrain.worker.data.prepare.spread.work import THREADS, TaskOutcome
from smtrain.worker.data.prepare_options import PrepareOptions
from smtrain.worker.data.read import blocks
from smtrain.worker.object_store import StorageError
from tests.worker.data.corpora import conversations, corpus, digest
from tests.worker.data.prepare.spread.executors import InThisProcess

EXACT = Cleaning(deduplicate=True, min_characters=2)
NEAR = Cleaning(deduplicate=True, near=NearDuplicates(similarity=0.5, words=2, permutations=32))
FEW = Cleaning(near=NearDuplicates(similarity=0.5, words=2, permutations=32, documents=40))
OPTIONS = PrepareOptions(
    seq_len=8, cleaning=EXACT, workers=1, holdout=HoldOut(fraction=0.2), max_bad=999
)


def ignore(_: object) -> None:
    pass


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 256)
    monkeypatch.setattr(driver, "PASS_BYTES", 4000)


@pytest.fixture
def no_waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits between tries, which are not waited."""
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", waits.append)
    return waits


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    "cleaning", [EXACT, NEAR, FEW, Cleaning()], ids=["exact", "near", "few", "none"]
)
@pytest.mark.parametrize("shard", [600, 2000, 1 << 30])
@pytest.mark.parametrize("share", [256, 1 << 20])
@pytest.mark.pairwise
def test_one_digest_for_every_cut_and_order(
    share: int,
    shard: int,
    cleaning: Cleaning,
    tmp_path: Path,
    tokenizer_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draw = random.Random(share + shard)
    monkeypatch.setenv(THREADS, draw.choice("123"))
    sources = corpus(tmp_path / "text", draw)
    options = dataclasses.replace(OPTIONS, cleaning=cleaning, shard_bytes=shard)
    other = corpus(tmp_path / "other", draw)[0]
    options = dataclasses.replace(
        options, holdout=draw.choice([None, options.holdout, HoldOut(path=other)])
    )
    prepare(sources, tmp_path / "wanted", tokenizer_folder, options, progress=ignore, say=ignore)
    spread = Spread(InThisProcess(draw), share_bytes=share)
    prepare(
        sources,
        tmp_path / "out",
        tokenizer_folder,
        options,
        progress=ignore,
        say=ignore,
        spread=spread,
    )
    assert DatasetManifest.load(tmp_path / "out") == DatasetManifest.load(tmp_path / "wanted")
    assert digest(tmp_path / "out") == digest(tmp_path / "wanted")
    assert names(tmp_path / "out") == names(tmp_path / "wanted"), "nothing else is left"


@pytest.mark.sample(4)  # each value of both
@pytest.mark.parametrize("shard", [600, 1 << 30])
@pytest.mark.parametrize("holdout", [None, HoldOut(fraction=0.2), HoldOut(path="talk")], ids=str)
def test_conversations_too(
    shard: int, holdout: HoldOut | None, tmp_path: Path, tokenizer_folder: Path
) -> None:
    model, sources = conversations(tmp_path, tokenizer_folder)
    if holdout and holdout.path:
        (tmp_path / "other").mkdir()
        rows = [{"instruction": f"more words {i}", "output": "the words"} for i in range(20)]
        (tmp_path / "other/c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        holdout = HoldOut(path=tmp_path / "other")
    options = PrepareOptions(seq_len=24, workers=1, holdout=holdout, max_bad=99, shard_bytes=shard)
    prepare_sft(sources, tmp_path / "wanted", model, options, progress=ignore, say=ignore)
    spread = Spread(InThisProcess(random.Random(1)), share_bytes=512)
    prepare_sft(
        sources, tmp_path / "out", model, options, progress=ignore, say=ignore, spread=spread
    )
    assert DatasetManifest.load(tmp_path / "out") == DatasetManifest.load(tmp_path / "wanted")
    assert digest(tmp_path / "out") == digest(tmp_path / "wanted")


def test_pairs_of_answers_too(tmp_path: Path, tokenizer_folder: Path) -> None:
    rows = [
        {"prompt": f"say {i}", "chosen": "the words", "rejected": "words " * (i % 5 + 1)}
        for i in range(60)
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for number, holdout in enumerate((None, HoldOut(fraction=0.3))):
        options = PrepareOptions(
            seq_len=64, workers=1, holdout=holdout, objective="dpo", shard_bytes=1500
        )
        made = [
            prepare_sft(
                [tmp_path / "a.jsonl"],
                tmp_path / f"{name}{number}",
                tokenizer_folder,
                options,
                progress=ignore,
                say=ignore,
                spread=spread,
            )
            for name, spread in (
                ("one", None),
                ("many", Spread(InThisProcess(random.Random(1)), share_bytes=512)),
            )
        ]
        assert made[0] == made[1]
        assert digest(tmp_path / f"one{number}") == digest(tmp_path / f"many{number}")


def test_text_of_tests_is_left_out_on_every_machine(tmp_path: Path, tokenizer_folder: Path) -> None:
    test = " ".join(f"word{i}" for i in range(20))
    (tmp_path / "test.jsonl").write_text(json.dumps({"text": test}) + "\n")
    rows = [
        {"text": f"before {test} after" if i % 7 == 0 else f"the words of text {i}"}
        for i in range(60)
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cleaning = Cleaning(tests=EvaluationTexts(str(tmp_path / "test.jsonl")), deduplicate=True)
    options = PrepareOptions(seq_len=8, workers=1, cleaning=cleaning)
    spread = Spread(InThisProcess(random.Random(1)), share_bytes=512)
    one, many = (
        prepare(
            tmp_path / "a.jsonl",
            tmp_path / name,
            tokenizer_folder,
            options,
            progress=ignore,
            say=ignore,
            spread=how,
        )
        for name, how in (("one", None), ("many", spread))
    )
    assert one == many
    assert many.dropped["overlapping with tests"] == 9


def test_a_driver_that_is_killed_at_any_task_resumes(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    draw = random.Random(9)
    sources = corpus(tmp_path / "text", draw)
    options = dataclasses.replace(OPTIONS, cleaning=NEAR, shard_bytes=2000)
    prepare(sources, tmp_path / "wanted", tokenizer_folder, options, progress=ignore, say=ignore)
    done: list[tuple[str, Any]] = []
    attempts = 0
    while attempts < 200:
        attempts += 1
        left = draw.choice([1, 3, 8, 20])

        def fault(name: str, label: Any) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise InterruptedError

        tasks = InThisProcess(draw, fault)
        try:
            spread = Spread(tasks, share_bytes=512)
            prepare(
                sources,
                tmp_path / "out",
                tokenizer_folder,
                options,
                progress=ignore,
                say=ignore,
                spread=spread,
            )
        except InterruptedError:
            heard = tasks.done[:-1]  # the driver may not have heard of the last one
            done += [task for task in heard if task[0] != "is_output_whole"]
        else:
            break
    assert 3 < attempts < 200
    twice = [task for task, count in collections.Counter(map(str, done)).items() if count > 1]
    assert not twice, "finished tasks were done again"
    assert digest(tmp_path / "out") == digest(tmp_path / "wanted")
    assert names(tmp_path / "out") == names(tmp_path / "wanted")


def test_a_share_that_crashes_is_set_aside_by_name(tmp_path: Path, tokenizer_folder: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for name in "abc":
        rows = [{"text": f"the words of {name} number {i}"} for i in range(40)]
        (text / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def fault(name: str, label: Any) -> TaskOutcome | None:
        poisoned = name == "do_share" and label.spans[0][0] == 1
        return TaskOutcome(error="it died", has_crashed=True) if poisoned else None

    options = PrepareOptions(seq_len=8, workers=1, cleaning=EXACT)
    said: list[str] = []
    spread = Spread(InThisProcess(random.Random(1), fault), share_bytes=1 << 20)

    def run(spread: Spread) -> DatasetManifest:
        return prepare(
            [text / "a.jsonl", text / "b.jsonl", text / "c.jsonl"],
            tmp_path / "out",
            tokenizer_folder,
            options,
            progress=ignore,
            say=said.append,
            spread=spread,
        )

    with pytest.raises(
        CrashedError, match=r"share 1 \(b\.jsonl\) crashed three times.*data\.max_crashed: 1"
    ) as caught:
        run(spread)
    assert not isinstance(caught.value, DataError)
    assert any("share 1 (b.jsonl) is set aside: it died" in line for line in said)
    with pytest.raises(DataError, match=r"b\.jsonl gives 0 tokens"):
        run(dataclasses.replace(spread, max_crashed=1))
    options = dataclasses.replace(options, holdout=None)
    made = prepare(
        text,
        tmp_path / "out",
        tokenizer_folder,
        options,
        progress=ignore,
        say=ignore,
        spread=dataclasses.replace(spread, max_crashed=2, share_bytes=1024),
    )
    assert any("(b.jsonl" in sentence and "left out" in sentence for sentence in made.left_out)
    assert {row["name"]: row["documents"] for row in made.sources}["a.jsonl"] == 40


def test_bad_lines_are_counted_over_all_machines_with_their_places(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    rows = [json.dumps({"text": f"words of text {i}"}) for i in range(100)]
    rows[83] = rows[31] = "no json"
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    spread = Spread(InThisProcess(random.Random(1)), share_bytes=256)
    options = PrepareOptions(seq_len=8, max_bad=1)
    with pytest.raises(
        DataError,
        match=r"a\.jsonl, lines 32 and 84: not JSON.*; 2 bad lines so far and max_bad is 1",
    ):
        prepare(
            tmp_path / "a.jsonl",
            tmp_path / "out",
            tokenizer_folder,
            options,
            say=ignore,
            spread=spread,
        )
    assert not (tmp_path / "out").exists()
    options = dataclasses.replace(options, max_bad=2)
    made = prepare(
        tmp_path / "a.jsonl", tmp_path / "out", tokenizer_folder, options, say=ignore, spread=spread
    )
    assert [line.partition(":")[0] for line in made.bad_lines] == [
        "a.jsonl, line 32",
        "a.jsonl, line 84",
    ]


def test_a_file_that_cannot_be_read_or_differs_ends_it(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.jsonl").write_text('{"text": "the words of a small text"}\n' * 50)
    (tmp_path / "text/b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "words"}\n')[:-9])

    def run(fault: Any = lambda name, label: None) -> None:
        spread = Spread(InThisProcess(random.Random(1), fault), share_bytes=256)
        options = PrepareOptions(seq_len=8)
        prepare(
            tmp_path / "text",
            tmp_path / "out",
            tokenizer_folder,
            options,
            say=ignore,
            spread=spread,
        )

    with pytest.raises(DataError, match="not a whole gzip file"):
        run()
    (tmp_path / "text/b.jsonl.gz").unlink()

    def longer(name: str, label: Any) -> None:
        if label.number == 3:
            (tmp_path / "text/a.jsonl").write_text('{"text": "the words of a small text"}\n' * 51)

    with pytest.raises(DataError, match=r"has \d+ bytes on .* and \d+ on the driver"):
        run(longer)


def test_shares_of_text_that_has_changed_are_not_used(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    """Text of the same size: only its time tells, or in a job's channel the listing of the
    launch.
    """

    def killed(name: str, label: Any) -> None:
        if name == "do_share" and label.number == 2:
            raise KeyboardInterrupt

    def run(
        out: str, work: str | None, listings: str, fault: Any = lambda name, label: None
    ) -> None:
        spread = Spread(InThisProcess(random.Random(1), fault), work, share_bytes=256)
        options = PrepareOptions(seq_len=8, listings=listings)
        prepare(
            tmp_path / "a.jsonl",
            tmp_path / out,
            tokenizer_folder,
            options,
            say=ignore,
            spread=spread,
        )

    for work in (None, str(tmp_path / "work")):
        (tmp_path / "a.jsonl").write_text('{"text": "the words"}\n' * 50)
        with pytest.raises(KeyboardInterrupt):
            run(f"out-{bool(work)}", work, "before", killed)
        (tmp_path / "a.jsonl").write_text('{"text": "words the"}\n' * 50)
        run(f"out-{bool(work)}", work, "after" if work else "before")
        run(f"wanted-{bool(work)}", None, "")
        assert digest(tmp_path / f"out-{bool(work)}") == digest(tmp_path / f"wanted-{bool(work)}")


def test_a_damaged_share_is_named_and_done_again(tmp_path: Path, tokenizer_folder: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        "".join(f'{{"text": "the words of {i}"}}\n' for i in range(50))
    )
    work = tmp_path / "work"

    def damage(name: str, label: Any) -> None:
        if name == "write_output" and not damaged:
            path = next(work.rglob("share-0000002.bin"))
            damaged.append(path)
            content = bytearray(path.read_bytes())
            content[5] ^= 1
            path.write_bytes(content)

    damaged: list[Path] = []
    spread = Spread(InThisProcess(random.Random(1), damage), str(work), share_bytes=256)
    options = PrepareOptions(seq_len=8)
    with pytest.raises(
        StorageError, match=r"share-0000002\.bin in .* is damaged; run the same command again"
    ):
        prepare(
            tmp_path / "a.jsonl",
            tmp_path / "out",
            tokenizer_folder,
            options,
            say=ignore,
            spread=spread,
        )
    prepare(
        tmp_path / "a.jsonl", tmp_path / "out", tokenizer_folder, options, say=ignore, spread=spread
    )
    prepare(tmp_path / "a.jsonl", tmp_path / "wanted", tokenizer_folder, options, say=ignore)
    assert digest(tmp_path / "out") == digest(tmp_path / "wanted")


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "kind", [".bin", ".bands", ".json", ".losers", ".lengths", ".sides", ".hashes", ".bits"]
)
def test_no_changed_byte_of_a_share_changes_the_dataset(
    kind: str, tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    draw = random.Random(kind)
    sources = corpus(tmp_path / "text", draw)
    options = dataclasses.replace(OPTIONS, cleaning=NEAR, shard_bytes=2000)
    prepare(sources, tmp_path / "wanted", tokenizer_folder, options, progress=ignore, say=ignore)
    damaged: list[str] = []

    def damage(name: str, _: Any) -> None:
        files = [path for path in (tmp_path / "work").rglob(f"*{kind}") if path.stat().st_size]
        if name != "do_share" and files and len(damaged) < 4 and draw.random() < 0.3:
            path = draw.choice(sorted(files))
            content = bytearray(path.read_bytes())
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
            path.write_bytes(content)
            damaged.append(path.name)

    for _ in range(9):
        spread = Spread(InThisProcess(draw, damage), str(tmp_path / "work"), share_bytes=512)
        with suppress(StorageError):
            prepare(
                sources,
                tmp_path / "out",
                tokenizer_folder,
                options,
                progress=ignore,
                say=ignore,
                spread=spread,
            )
            break
    assert damaged
    assert digest(tmp_path / "out") == digest(tmp_path / "wanted")


@pytest.mark.parametrize("kind", [".bin", ".idx", ".sums", None])
def test_a_changed_byte_of_a_finished_output_is_found_when_the_work_resumes(
    kind: str | None, tmp_path: Path, tokenizer_folder: Path
) -> None:
    (tmp_path / "a.jsonl").write_text(
        "".join(f'{{"text": "the words of {i}"}}\n' for i in range(50))
    )
    options = PrepareOptions(seq_len=8, shard_bytes=600)
    left = [2]

    def fault(name: str, label: Any) -> None:
        left[0] -= name == "write_output"
        if left[0] < 0:
            raise InterruptedError

    def run(name: str, executor: InThisProcess) -> None:
        spread = Spread(executor, str(tmp_path / "work"), share_bytes=256)
        prepare(
            tmp_path / "a.jsonl",
            tmp_path / name,
            tokenizer_folder,
            options,
            say=said.append,
            spread=spread,
        )

    said: list[str] = []
    with pytest.raises(InterruptedError):
        run("out", InThisProcess(random.Random(1), fault))
    written = sorted((tmp_path / "out").rglob(f"*{kind or '.bin'}"))
    assert len(written) == 2
    content = bytearray(written[0].read_bytes())
    content[len(content) // 2] ^= 1
    written[0].write_bytes(content)
    if kind is None:
        written[0].unlink()
    again = InThisProcess(random.Random(1))
    run("out", again)
    prepare(tmp_path / "a.jsonl", tmp_path / "wanted", tokenizer_folder, options, say=ignore)
    assert digest(tmp_path / "out") == digest(tmp_path / "wanted")
    assert sum("is not what was written" in line for line in said) == 1


def test_a_store_that_fails_costs_no_finished_share(
    tmp_path: Path, tokenizer_folder: Path, no_waits: list[float]
) -> None:
    (tmp_path / "a.jsonl").write_text(
        "".join(f'{{"text": "the words of {i}"}}\n' for i in range(50))
    )
    work, options = tmp_path / "work", PrepareOptions(seq_len=8)
    fails = {"share": 3, "times": 99}

    def fault(name: str, label: Any) -> TaskOutcome | None:
        if name == "do_share" and label.number == fails["share"] and fails["times"]:
            fails["times"] -= 1
            return TaskOutcome(error="S3 asks to wait", unavailable=True)
        return None

    def run() -> list[int]:
        executor = InThisProcess(random.Random(1), fault)
        spread = Spread(executor, str(work), share_bytes=256)
        prepare(
            tmp_path / "a.jsonl",
            tmp_path / "out",
            tokenizer_folder,
            options,
            say=ignore,
            spread=spread,
        )
        return [arguments[0].number for name, arguments in executor.done if name == "do_share"]

    with pytest.raises(StorageError, match="S3 asks to wait"):
        run()
    before = len(list(work.rglob("share-*.json")))
    fails["times"] = 2
    assert run() == [3, 3, 3], "only the share that failed, three times"
    assert before == 5
    prepare(tmp_path / "a.jsonl", tmp_path / "wanted", tokenizer_folder, options, say=ignore)
    assert digest(tmp_path / "out") == digest(tmp_path / "wanted")


def test_a_resumed_driver_counts_shares_after_a_gap_as_done(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    (tmp_path / "a.jsonl").write_text(
        "".join(f'{{"text": "the words of {i}"}}\n' for i in range(50))
    )
    options = PrepareOptions(seq_len=8)
    seen: list[DataProgress] = []

    def run(fault: Callable[[str, Any], None]) -> None:
        spread = Spread(
            InThisProcess(random.Random(3), fault), str(tmp_path / "work"), share_bytes=256
        )
        prepare(
            tmp_path / "a.jsonl",
            tmp_path / "out",
            tokenizer_folder,
            options,
            say=ignore,
            progress=seen.append,
            spread=spread,
        )

    def killed(name: str, label: Any) -> None:
        if name == "write_output":
            raise InterruptedError

    with pytest.raises(InterruptedError):
        run(killed)
    for number in range(4):
        next((tmp_path / "work").rglob(f"share-000000{number}.json")).unlink()
    seen.clear()
    run(lambda name, label: None)
    assert all(one.done_bytes >= one.before_bytes for one in seen)
    assert 0 < seen[-1].before_bytes < seen[-1].done_bytes == seen[-1].total_bytes


def test_a_stop_keeps_what_is_done(tmp_path: Path, tokenizer_folder: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        "".join(f'{{"text": "the words of {i}"}}\n' for i in range(50))
    )
    spread: Spread

    def stop(name: str, label: Any) -> None:
        if label.number == 3:
            spread.stop.set()

    tasks = InThisProcess(random.Random(1), stop)
    spread = Spread(tasks, str(tmp_path / "work"), share_bytes=256)
    with pytest.raises(StoppedError, match="run the same command again to resume"):
        prepare(
            tmp_path / "a.jsonl",
            tmp_path / "out",
            tokenizer_folder,
            PrepareOptions(seq_len=8),
            say=ignore,
            spread=spread,
        )
    assert list((tmp_path / "work").rglob("share-*.json"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("alike", [0, 0.5, 1], ids="alike {}".format)
def test_each_range_of_keys_has_those_of_the_sorted_whole(alike: float, tmp_path: Path) -> None:
    draw = np.random.default_rng(7)
    keys = draw.integers(0, 2**64, 3000, np.uint64)
    keys[draw.random(len(keys)) < alike] = draw.choice([0, 2**63, 2**64 - 1])
    place = SharedPlace(str(tmp_path))
    place.write("share-0000003.bands", share_files.sorted_keys(keys, 3))
    order = np.argsort(keys, kind="stable")
    for ranges in (1, 7, 5000):  # more ranges than keys
        cuts = [share_files.key_range(number, ranges) for number in range(ranges)]
        assert all(last + 1 == first for (_, last), (first, _) in itertools.pairwise(cuts))
        rows = np.concatenate([share_files.keys_between(place, 3, "bands", *cut) for cut in cuts])
        assert np.array_equal(rows["key"], keys[order])
        assert np.array_equal(rows["document"], order // 3)


def test_the_memory_of_a_pass_over_all_documents_is_bounded() -> None:
    keys = 10**9
    assert -(-keys * driver._BYTES_A_KEY // (512 << 20)) == 120
    assert np.dtype("<u8").itemsize * 8 == driver._BYTES_A_KEY


class LateAnswers:
    """A file system whose first uploads succeed, while the client hears that they do not exist any
    more.
    """

    def __init__(self, inner: Any, late: int) -> None:
        self._inner, self._late = inner, late

    @contextmanager
    def open_output_stream(self, path: str) -> Iterator[Any]:
        with self._inner.open_output_stream(path) as out:
            yield out
        self._late -= 1
        if self._late >= 0:
            raise OSError("AWS Error NO_SUCH_UPLOAD during CompleteMultipartUpload operation")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.mark.parametrize("late", [2, 3])
def test_an_upload_whose_answer_is_late_is_sent_again(
    late: int, tmp_path: Path, no_waits: list[float]
) -> None:
    place = SharedPlace(f"file://{tmp_path}")
    place._fs = LateAnswers(place._fs, late)
    with place.scratch() as folder:
        (folder / "one").write_bytes(b"words")
        place.put(folder / "one", "tokens.bin")
        assert place.read("tokens.bin") == b"words"
        assert not (folder / "one").exists()
    assert len(no_waits) == late


class LateStreams:
    """A file system whose uploads succeed, or lose their end, while the client hears that they do
    not exist.
    """

    def __init__(self, inner: Any, lost: int) -> None:
        self._inner, self._lost = inner, lost

    def open_output_stream(self, path: str) -> Any:
        out, lost = self._inner.open_output_stream(path), self._lost

        class Late:
            write = out.write

            def close(self) -> None:
                out.close()
                os.truncate(path, os.path.getsize(path) - lost)
                raise OSError("AWS Error NO_SUCH_UPLOAD during CompleteMultipartUpload operation")

        return Late()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_file_that_was_sent_whole_is_there_even_if_the_answer_is_late(
    lost: int, tmp_path: Path, no_waits: list[float]
) -> None:
    place = SharedPlace(f"file://{tmp_path}")
    place._fs = LateStreams(place._fs, lost)
    lacks = pytest.raises(StorageError, match="not stored completely") if lost else nullcontext()
    with lacks, place.writing("a.bin") as append:
        append(memoryview(b"words "))
        append(memoryview(b"and more"))
    assert place.read("a.bin") == b"words and more"[: 14 - lost]


def test_a_file_on_a_shared_disk_has_its_name_once_it_is_whole(tmp_path: Path) -> None:
    place = SharedPlace(str(tmp_path))

    def write(divisor: int) -> None:
        with place.writing("a.bin") as append:
            append(memoryview(b"words"))
            assert place.names() == []
            append(memoryview(bytes([65 // divisor])))

    with pytest.raises(ZeroDivisionError):
        write(0)
    assert list(tmp_path.iterdir()) == []
    write(1)
    assert place.read("a.bin") == b"wordsA"
