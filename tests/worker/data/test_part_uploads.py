"""A prepare job that loses its machine resumes from its parts, even if only some of them
arrived.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from smtrain.core.errors import DataError
from smtrain.worker.data.clean.cleaning import Cleaning
from smtrain.worker.data.part_uploads import PartUploads, StoppedError
from smtrain.worker.data.prepare.progress import DataProgress
from smtrain.worker.data.read import blocks
from tests.worker.data.prepare.test_prepare import lines
from tests.worker.data.quiet import prepare


class Machine:
    """Runs of one prepare stage, each with its own disk; they share only the parts."""

    def __init__(self, folder: Path, tokenizer: Path) -> None:
        self.folder, self.tokenizer, self.parts = folder, tokenizer, folder / "parts"
        rows = [{"text": f"words of text {i} " * 3} for i in range(10)]
        self.sources = [
            lines(folder / "a.jsonl", [*rows, {"no": 1}, *rows[4:]]),
            lines(
                folder / "b.jsonl",
                [{"no": 2}, *rows[:2], {"text": "quite another one " * 9}, *rows, {"no": 3}],
            ),
        ]
        self.said: list[str] = []
        self.blocks = 0

    def run(
        self, stop_after: int | None = None, every: int | None = 1, max_bad: int = 3
    ) -> dict[str, bytes]:
        """Run and return the files; raise InterruptedError after so many blocks."""
        out = self.folder / "out"
        shutil.rmtree(out, ignore_errors=True)  # another machine
        self.said, self.blocks = [], 0

        def stop(_: DataProgress) -> None:
            self.blocks += 1
            if self.blocks == stop_after:
                raise InterruptedError

        prepare(
            self.sources,
            out,
            self.tokenizer,
            seq_len=8,
            max_bad=max_bad,
            cleaning=Cleaning(deduplicate=True),
            workers=2,
            progress=stop,
            say=self.said.append,
            parts=PartUploads(self.parts, every) if every else None,
        )
        return {path.name: path.read_bytes() for path in out.iterdir()}


@pytest.fixture
def machine(tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(blocks, "BLOCK_BYTES", 256)
    return Machine(tmp_path, tokenizer_folder)


def test_another_machine_goes_on_after_any_block_to_the_same_bytes(machine: Machine) -> None:
    wanted = machine.run(every=None)
    whole = machine.blocks
    for read in range(2, whole + 1):
        with pytest.raises(InterruptedError):
            machine.run(read)
        for path in machine.sources:
            path.touch()  # mounted again
        assert machine.run() == wanted
        assert machine.said[0].startswith("prepare: continuing after")
        assert machine.blocks == whole - read + 1, "kept blocks were done again"
        assert not list(machine.parts.iterdir()), "what is done is not kept twice"


def test_what_arrived_of_the_newest_part_does_not_matter(machine: Machine) -> None:
    wanted = machine.run(every=None)
    with pytest.raises(InterruptedError):
        machine.run(7)
    kept = machine.folder / "kept"
    shutil.copytree(machine.parts, kept)
    newest = max(kept.glob("part-*.bin"))
    for damage in (
        lambda p: p.unlink(),
        lambda p: p.write_bytes(p.read_bytes()[:-1]),
        lambda p: p.write_bytes(b""),
    ):
        shutil.rmtree(machine.parts)
        shutil.copytree(kept, machine.parts)
        damage(machine.parts / newest.name)
        assert machine.run() == wanted
        assert machine.said[0].startswith("prepare: continuing after")
    shutil.rmtree(machine.parts)
    shutil.copytree(kept, machine.parts)
    changed = machine.parts / min(kept.glob("part-*.bin")).name  # which every record has
    changed.write_bytes(bytes(changed.stat().st_size))
    assert machine.run() == wanted
    assert machine.said == []


def test_asked_to_end_it_keeps_what_is_done_and_leaves_no_half_output(machine: Machine) -> None:
    wanted = machine.run(every=None)
    parts = PartUploads(machine.parts, 1 << 40)
    shutil.rmtree(machine.folder / "out")
    with pytest.raises(StoppedError, match="run the same command again to resume"):
        prepare(
            machine.sources,
            machine.folder / "out",
            machine.tokenizer,
            seq_len=8,
            max_bad=3,
            workers=2,
            cleaning=Cleaning(deduplicate=True),
            progress=lambda _: parts.stop.set(),
            parts=parts,
        )
    assert not (machine.folder / "out").exists()
    assert machine.run() == wanted
    assert machine.said[0].startswith("prepare: continuing after")


def test_killed_again_and_again_it_ends(machine: Machine) -> None:
    wanted = machine.run(every=None)
    for _ in range(40):
        try:
            assert machine.run(3) == wanted
            return
        except InterruptedError:
            assert len(list(machine.parts.glob("record-*.json"))) <= 3
    pytest.fail("it never ended")


def test_parts_of_other_text_or_of_a_run_that_failed_are_not_used(machine: Machine) -> None:
    with pytest.raises(InterruptedError):
        machine.run(6)
    with machine.sources[0].open("a") as file:
        file.write('{"text": "one more"}\n')
    wanted = machine.run(every=None)
    assert machine.run() == wanted
    assert machine.said == []
    with pytest.raises(DataError, match="max_bad is 0"):
        machine.run(max_bad=0)
    assert not list(machine.parts.iterdir())
