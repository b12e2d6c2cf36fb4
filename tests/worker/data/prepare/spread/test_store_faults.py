"""A preparation whose text, shares and dataset are in an S3 that fails: the same bytes, and nothing
done is lost.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from smtrain.worker.data import resumable
from smtrain.worker.data.clean.cleaning import Cleaning
from smtrain.worker.data.clean.holdout import HoldOut
from smtrain.worker.data.prepare.prepare import prepare
from smtrain.worker.data.prepare.spread.driver import Spread
from smtrain.worker.data.prepare.spread.shared_folder import place
from smtrain.worker.data.prepare_options import PrepareOptions
from smtrain.worker.data.read import blocks
from smtrain.worker.object_store import StorageError
from tests.worker.data.prepare.spread.executors import InThisProcess
from tests.worker.data.tiny_s3 import FAULTS, TinyS3, tiny_s3

OPTIONS = PrepareOptions(
    seq_len=8,
    cleaning=Cleaning(deduplicate=True),
    workers=1,
    holdout=HoldOut(fraction=0.2),
    shard_bytes=1 << 20,
)
OPERATIONS = (
    "CompleteMultipartUpload",
    "CreateMultipartUpload",
    "DeleteObject",
    "GetObject",
    "HeadObject",
    "ListObjectsV2",
    "PutObject",
    "UploadPart",
)


def ignore(_: object) -> None:
    pass


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[TinyS3]:
    """A bucket with text in two files and pages of three keys; tries follow each other at once."""
    monkeypatch.setattr("time.sleep", ignore)
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 1024)
    place.cache_clear()  # its clients are of another test's server
    with tiny_s3(monkeypatch.setenv, page=3) as store:
        for name in ("a.jsonl", "b.jsonl"):
            rows = (json.dumps({"text": f"the words of {name} {i % 25}"}) for i in range(30))
            store.objects[f"text/{name}"] = "".join(f"{row}\n" for row in rows).encode()
        yield store


def spread_out(
    store: TinyS3, folder: Path, tokenizer: Path, executor: InThisProcess | None = None
) -> str:
    """Prepare on machines, everything in S3; a digest of the dataset."""
    spread = Spread(
        executor or InThisProcess(random.Random(1)), "s3://b/work", "s3://b/out", share_bytes=1024
    )
    prepare("s3://b/text", folder, tokenizer, OPTIONS, progress=ignore, say=ignore, spread=spread)
    whole = hashlib.sha256((folder / "manifest.json").read_bytes())
    for name in sorted(store.objects):
        if name.startswith("out/") and not name.endswith("/"):
            whole.update(name.encode() + store.objects.pop(name))
    return whole.hexdigest()


def shares_of(executor: InThisProcess) -> set[int]:
    return {arguments[0].number for name, arguments in executor.done if name == "do_share"}


_wanted: dict[Path, tuple[str, int]] = {}


def wanted(store: TinyS3, folder: Path, tokenizer: Path) -> tuple[str, int]:
    """The digest without a fault and the number of shares, made once."""
    if tokenizer not in _wanted:
        executor = InThisProcess(random.Random(1))
        _wanted[tokenizer] = (
            spread_out(store, folder / "wanted", tokenizer, executor),
            len(shares_of(executor)),
        )
    return _wanted[tokenizer]


def records(store: TinyS3) -> list[str]:
    return [name for name in store.objects if "/share-" in name and name.endswith(".json")]


def after(
    good: int, fault: str, operation: str = "", times: int = 1
) -> Callable[[str], str | None]:
    """Fail `times` calls of an operation, or of any, after `good` ones."""
    calls = 0

    def decide(called: str) -> str | None:
        nonlocal calls
        calls += operation in ("", called)
        return fault if operation in ("", called) and good < calls <= good + times else None

    return decide


@pytest.mark.sample(2)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_one_fault_of_one_operation_changes_nothing(
    operation: str, fault: str, store: TinyS3, tmp_path: Path, tokenizer_folder: Path
) -> None:
    expected, _ = wanted(store, tmp_path, tokenizer_folder)
    store.fault = after(random.Random(operation + fault).randrange(3), fault, operation)
    assert spread_out(store, tmp_path / "out", tokenizer_folder) == expected
    assert store.faults[operation, fault] == 1
    assert not records(store)


@pytest.mark.full  # pyarrow waits 0.2 s after each fault
@pytest.mark.parametrize("seed", range(3))
def test_a_quarter_of_all_calls_may_fail(
    seed: int, store: TinyS3, tmp_path: Path, tokenizer_folder: Path
) -> None:
    (expected, _), draw = wanted(store, tmp_path, tokenizer_folder), random.Random(seed)
    chances = ["error", "throttle", "drop", "late error", "late drop", "truncated"]
    store.fault = lambda _: draw.choice(chances) if draw.random() < 0.25 else None
    assert spread_out(store, tmp_path / "out", tokenizer_folder) == expected


@pytest.mark.parametrize("fault", ["expired", pytest.param("denied", marks=pytest.mark.full)])
def test_a_store_that_refuses_in_the_middle_keeps_finished_shares_and_is_named_at_once(
    fault: str, store: TinyS3, tmp_path: Path, tokenizer_folder: Path
) -> None:
    expected, shares = wanted(store, tmp_path, tokenizer_folder)

    def refuse(name: str, label: object) -> None:
        if len(records(store)) == 3:
            store.fault = lambda _: fault

    with pytest.raises(StorageError, match="may have expired"):
        spread_out(
            store, tmp_path / "out", tokenizer_folder, InThisProcess(random.Random(1), refuse)
        )
    assert len(records(store)) == 3
    assert sum(store.faults.values()) < 60, "it is not asked again and again"
    store.fault = lambda _: None
    again = InThisProcess(random.Random(1))
    assert spread_out(store, tmp_path / "out", tokenizer_folder, again) == expected
    assert len(shares_of(again)) == shares - 3


@pytest.mark.parametrize("fault", ["expired", pytest.param("truncated", marks=pytest.mark.full)])
def test_one_machine_keeps_its_progress_when_the_text_cannot_be_read(
    fault: str,
    store: TinyS3,
    tmp_path: Path,
    tokenizer_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resumable, "MARK_BYTES", 1024)
    said: list[str] = []

    def run(folder: str) -> bytes:
        prepare(
            "s3://b/text",
            tmp_path / folder,
            tokenizer_folder,
            OPTIONS,
            progress=ignore,
            say=said.append,
        )
        return (tmp_path / folder / "tokens.bin").read_bytes()

    store.objects["text/c.jsonl"] = store.objects["text/a.jsonl"] * 20
    expected = run("wanted")
    journal, faults = tmp_path / "out/.tokens.partial/journal.json", iter(range(5))

    def decide(operation: str) -> str | None:
        fails = (
            operation == "GetObject"
            and journal.exists()
            and (fault == "expired" or next(faults, None) is not None)
        )
        return fault if fails else None

    store.fault = decide
    if fault == "expired":
        with pytest.raises(StorageError, match="may have expired"):
            run("out")
        store.fault = lambda _: None
    assert run("out") == expected
    assert store.faults["GetObject", fault]
    assert any("continuing after" in line for line in said) == (fault == "expired")
