"""Any byte of a file that a job has left may change: it is found before the file is used, or it
changes nothing.

The uploads of a launch are in tests/client/launch/test_damaged_uploads.py, shares of several
machines in tests/worker/data/prepare/spread/test_spread.py, and other kinds of checkpoints in
tests/worker/checkpoint/test_mutated.py.
"""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smtrain.client.launch.bundle import build_bundle
from smtrain.core.errors import SmtrainError
from smtrain.core.protocol.lineage import Lineage, LineagePart, lines_in
from smtrain.tools.tune.trials import Trial, TuningRecord
from smtrain.worker.checkpoint.convert import convert
from smtrain.worker.checkpoint.huggingface.damage import edited_files, refuse_damaged
from smtrain.worker.checkpoint.summary import verify
from smtrain.worker.checkpoint.targets import HuggingFace, Native
from smtrain.worker.data.load.loader import TokenLoader
from smtrain.worker.data.part_uploads import PartUploads
from smtrain.worker.data.prepare.prepare import prepare
from smtrain.worker.data.prepare_options import PrepareOptions
from smtrain.worker.data.resumable import Journal
from tests.cli.writers import plain_tokenizer
from tests.tiers import examples
from tests.worker.checkpoint.folders import LLAMA, hf_folder

SEQ_LEN, VOCABULARY = 8, 257


def _data(folder: Path) -> list[Any]:
    """All samples, as training reads them."""
    loader = TokenLoader(
        folder,
        seq_len=SEQ_LEN,
        global_batch_size=1,
        dp_rank=0,
        dp_size=1,
        seed=7,
        vocab_size=VOCABULARY,
        document_mask=True,
    )
    try:
        return [
            [part.tolist() for part in loader.batch(number)] for number in range(loader.samples)
        ]
    finally:
        loader.close()


def _checkpoint(folder: Path) -> str:
    verify(folder)
    return "whole"


def _exported(folder: Path) -> str:
    refuse_damaged(folder)
    return "edited" if edited_files(folder) else "whole"


def _line(folder: Path) -> list[Any]:
    """The job's origin; one without a record is known to be damaged."""
    origins = [one.origin for one in lines_in(folder).folders.values()]
    if None in origins:
        raise SmtrainError("damaged")
    return origins


def _tuning(folder: Path) -> list[Trial]:
    return TuningRecord(folder / "tuning.json").read()


def _journal(folder: Path) -> list[Any]:
    """The mark that a preparation resumes from; without one it starts again."""
    journal = Journal(folder)
    marks = list(journal.marks("key"))
    journal.close(remove=False)
    if not marks:
        raise SmtrainError("damaged")
    return [{key: mark[key] for key in ("settings", "done_bytes", "counts")} for mark in marks]


def _bundle(folder: Path) -> bytes:
    """The content that the container unpacks: gzip compares it with its CRC-32."""
    try:
        return gzip.decompress((folder / "bundle.tar.gz").read_bytes())
    except Exception as error:  # the decompressor's errors have no common class
        raise SmtrainError(str(error)) from None


READERS: dict[str, Callable[[Path], Any]] = {
    "data": _data,
    "checkpoint": _checkpoint,
    "exported": _exported,
    "line": _line,
    "tuning": _tuning,
    "journal": _journal,
    "bundle": _bundle,
}


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of each kind, as a small run leaves it."""
    root = tmp_path_factory.mktemp("left")
    rows = [f'{{"text": "{"words " * (number % 7)}of {number}"}}\n' for number in range(20)]
    (root / "a.jsonl").write_text("".join(rows))
    options = PrepareOptions(seq_len=SEQ_LEN)
    prepare(
        root / "a.jsonl",
        root / "data",
        plain_tokenizer(root / "tokenizer"),
        options,
        say=lambda _: None,
    )
    config = {**LLAMA, "num_hidden_layers": 1}
    model = hf_folder(root / "model", config)
    convert(model, root / "exported", to=HuggingFace())
    convert(model, root / "checkpoint", to=Native(tp=2))
    (root / "line").mkdir()
    replace(
        Lineage.of(root / "line", "second"),
        parts=(LineagePart("second", None), LineagePart("first", 10)),
    ).record()
    TuningRecord(root / "tuning/tuning.json").write(
        [Trial(1, {"train.lr": "1e-4"}, "run", "job", "finished", 2.5)]
    )
    journal = Journal(root / "journal")
    journal.mark({"settings": "key", "done_bytes": 12, "counts": {1: 2, 10: 3}}, {})
    journal.close(remove=False)
    (root / "bundle").mkdir()
    (root / "bundle/bundle.tar.gz").write_bytes(build_bundle().data)
    return root


@pytest.mark.parametrize("kind", READERS)
def test_a_changed_byte_is_found_or_changes_nothing(kind: str, left: Path, tmp_path: Path) -> None:
    folder, read = shutil.copytree(left / kind, tmp_path / kind), READERS[kind]
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    wanted, count = read(folder), examples(20 if kind == "bundle" else 200)

    @settings(
        max_examples=count,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(st.data())
    def check(data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(files))
        whole = path.read_bytes()
        at = data.draw(st.integers(0, len(whole) - 1))
        byte = data.draw(st.integers(0, 255).filter(lambda value: value != whole[at]))
        path.write_bytes(whole[:at] + bytes([byte]) + whole[at + 1 :])
        try:
            assert read(folder) in (
                wanted,
                "edited",
            ), f"{path.name}: byte {at} was {whole[at]} and is {byte}"
        except SmtrainError:
            pass  # found
        finally:
            path.write_bytes(whole)

    check()


def test_parts_that_a_dead_machine_has_left(tmp_path: Path) -> None:
    """A changed byte of a record: the mark before it is used, or none."""
    folder, journal = tmp_path / "parts", tmp_path / "journal"
    journal.mkdir()
    (journal / "tokens.bin").write_bytes(b"tokens")
    parts = PartUploads(folder, 1)
    parts.add({"settings": "key", "done_bytes": 12, "documents": 10}, {"tokens.bin": 6}, journal)
    (record,) = folder.glob("record-*.json")
    whole = record.read_bytes()
    at = whole.index(b"10")
    record.write_bytes(whole[:at] + b"2" + whole[at + 1 :])
    assert not list(PartUploads(folder, 1).marks("key", journal))
