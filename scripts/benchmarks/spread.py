"""Time and memory of the driver of a preparation on several machines, on an imaginary corpus.

The shares of `--terabytes` of text in `--files` files are `--shares` tasks, whose results are made
up, as are those of the passes for exact and near duplicates and of the output files: only the
driver is real. No text is read or written.

  peak_mib, half_mib   the driver's memory at the end and after half of the tasks
  before_mib           its memory when all modules are loaded
  tasks_s, resumed_s   seconds of the driver for all tasks; and of one that finds `--kept` shares done on a disk
  ray_ms_a_task        a task that does nothing on a Ray cluster on this machine, and
  ray_bytes_a_task     by how much each of them raises the driver's memory
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from smtrain.worker.data.clean.cleaning import Cleaning, NearDuplicates  # noqa: E402
from smtrain.worker.data.prepare.spread.driver import Driver, Spread  # noqa: E402
from smtrain.worker.data.prepare.spread.share_files import share_name  # noqa: E402
from smtrain.worker.data.prepare.spread.work import (  # noqa: E402
    OutputPair,
    ShareTotals,
    TaskOutcome,
    WorkContext,
)
from smtrain.worker.data.prepare_options import Corpus, PrepareOptions  # noqa: E402
from smtrain.worker.data.read import blocks  # noqa: E402
from smtrain.worker.data.read.shards import Share, cut_shares  # noqa: E402
from smtrain.worker.data.read.sources import SourceFile  # noqa: E402
from smtrain.worker.data.tokenizer import TokenizerFacts  # noqa: E402

DOCUMENT, TOKEN = 3000, 4.5
"""Bytes of text a document and a token."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument("--terabytes", type=float, default=2)
    parser.add_argument("--files", type=int, default=2000)
    parser.add_argument("--shares", type=int, default=1_000_000)
    parser.add_argument(
        "--kept", type=int, default=20_000, help="shares that a second driver finds done"
    )
    parser.add_argument("--ray", type=int, default=10_000, help="tasks on a real cluster")
    options = parser.parse_args()
    initial_mib = resident()
    with tempfile.TemporaryDirectory(prefix="bench-spread-") as folder:
        fresh_figures = drive_fresh(Path(folder), options)
        result = {
            "before_mib": round(initial_mib),
            **fresh_figures,
            **drive_resumed(Path(folder), options),
            **on_ray(options.ray),
        }
    print(
        json.dumps(result) if options.json else "\n".join(f"{k:20} {v}" for k, v in result.items())
    )


def resident() -> float:
    """MiB of this process's own memory."""
    rows = Path("/proc/self/status").read_text().splitlines()
    return next(int(row.split()[1]) / 1024 for row in rows if row.startswith("RssAnon"))


@dataclass
class FakeExecutor:
    """Makes up what tasks return, in the order given, and watches the memory of this process."""

    share_count: int
    peak: float = 0.0
    half: float = 0.0
    tasks: dict[str, int] = field(default_factory=dict)

    def run(
        self,
        function: Callable[..., Any],
        shared_arguments: tuple[Any, ...],
        items: Iterator[tuple[Any, tuple[Any, ...]]],
        on_wait: Callable[[], None],
        *,
        large: bool = False,
        threads: bool = False,
    ) -> Iterator[tuple[Any, TaskOutcome]]:
        """See `TaskExecutor`."""
        for label, arguments in items:
            count = self.tasks[function.__name__] = self.tasks.get(function.__name__, 0) + 1
            if count % 1000 == 1:
                on_wait()
                self.peak = max(self.peak, resident())
            if function.__name__ == "do_share" and count == self.share_count // 2:
                self.half = resident()
            yield (
                label,
                TaskOutcome(fake_result(shared_arguments, arguments), host=f"algo-{count % 8}"),
            )


def fake_result(shared_arguments: tuple[Any, ...], arguments: tuple[Any, ...]) -> dict[str, Any]:
    """The result of a task, by its arguments."""
    if isinstance(arguments[0], Share):
        return share_record(arguments[0])
    totals: ShareTotals = shared_arguments[1]
    shards = len(totals.firsts) - 1
    if isinstance(arguments[0], OutputPair):
        documents = sum(totals.in_shard(shard) for shard in arguments[0].shards)
        files = {
            f"{arguments[0].prefix}.{end}": {"bytes": 1, "sha256": "0" * 64}
            for end in ("bin", "idx")
        }
        return {
            "documents": documents,
            "tokens": 600 * documents,
            "files": files,
            "dropped": {"duplicates": 7},
            "examples": [],
            "per_file": [(0, documents)],
        }
    if len(arguments) == 1:
        return {"left": totals.in_shard(arguments[0])}
    return {"offsets": list(range(shards + 1))}


def share_record(share: Share) -> dict[str, Any]:
    """The record of a share, with bad lines, samples and counts."""
    documents = max(1, share.bytes // DOCUMENT)
    runs = [
        [number, 0, documents, documents, 1, [["a.jsonl", 3, "not JSON"]]]
        for number, _ in share.spans
    ]
    files = {
        end: {"bytes": documents * 12, "sha256": "0" * 64}
        for end in ("bin", "lengths", "hashes", "bands")
    }
    return {
        "number": share.number,
        "part": share.part,
        "bytes": share.bytes,
        "documents": documents,
        "tokens": int(share.bytes / TOKEN),
        "files": files,
        "runs": runs,
        "dropped": {"too short": 3},
        "noted": {},
        "examples": {"too short": ["a text of some words"]},
        "unread": {},
    }


def driver(folder: Path, options: argparse.Namespace, terabytes: float, executor: Any) -> Driver:
    """A driver of so much imaginary text."""
    blocks.BLOCK_BYTES = share = round(options.terabytes * 1e12 / options.shares)
    size = round(options.terabytes * 1e12 / options.files)
    folder.mkdir(exist_ok=True)
    (folder / "text").write_text('{"text": "a line, for a look at its encoding"}\n')
    files = [
        SourceFile(str(folder / "text"), f"{number:06}.jsonl", "jsonl", size, number=number)
        for number in range(round(options.files * terabytes / options.terabytes))
    ]
    prepare_options = PrepareOptions(
        seq_len=4096, cleaning=Cleaning(deduplicate=True, near=NearDuplicates()), max_bad=10**9
    )
    facts = TokenizerFacts("0" * 64, 32_000, None, 0)
    place = str(folder / "place")
    context = WorkContext(
        "key",
        False,
        prepare_options,
        "tokenizer",
        facts,
        "gigatoken",
        place,
        str(folder / "out"),
        "",
        frozenset(),
    )
    spread = Spread(executor, share_bytes=share)
    return Driver(
        spread, context, Corpus(prepare_options, [files], facts, []), lambda _: None, lambda _: None
    )


def drive_fresh(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """A driver for which everything is left to do."""
    (folder / "out").mkdir()
    tasks = FakeExecutor(options.shares)
    began = time.monotonic()
    tally = driver(folder, options, options.terabytes, tasks).run()
    seconds = time.monotonic() - began
    return {
        "terabytes": options.terabytes,
        "shares": tasks.tasks["do_share"],
        "documents": tally.read_documents,
        "ranges": tasks.tasks["find_duplicates"],
        "outputs": tasks.tasks["write_output"],
        "tasks_s": round(seconds, 1),
        "half_mib": round(tasks.half),
        "peak_mib": round(max(tasks.peak, resident())),
    }


def drive_resumed(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """A driver that finds the first shares done."""
    terabytes = options.terabytes * options.kept / options.shares
    executor = FakeExecutor(options.kept)
    resumed_driver = driver(folder / "again", options, terabytes, executor)
    place = Path(resumed_driver.context.work)
    for share in cut_shares(
        resumed_driver.shards, resumed_driver.files, None, resumed_driver.spread.share_bytes
    ):
        (place / f"{share_name(share.number)}.json").write_text(json.dumps(share_record(share)))
    began = time.monotonic()
    tally = resumed_driver.run()
    seconds = time.monotonic() - began
    assert tally.read_documents
    assert "do_share" not in executor.tasks
    return {"kept": options.kept, "resumed_s": round(seconds, 1)}


def do_nothing(*_: Any) -> None:
    """A task."""


def on_ray(count: int) -> dict[str, Any]:
    """Tasks that do nothing, on a cluster of one host."""
    from smtrain.worker.data.prepare.spread import nodes
    from smtrain.worker.data.prepare.spread.shared_folder import SharedPlace

    with (
        tempfile.TemporaryDirectory() as folder,
        nodes.head(SharedPlace(folder), "127.0.0.1", 6399, 2) as executor,
    ):
        rows = ((number, (number,)) for number in range(count))
        first, began = 0.0, 0.0
        for task_number, _ in enumerate(executor.run(do_nothing, (), rows, lambda: None)):
            if task_number == count // 10:
                first, began = resident(), time.monotonic()
        timed_tasks = count - count // 10
        return {
            "ray_tasks": count,
            "ray_ms_a_task": round(1000 * (time.monotonic() - began) / timed_tasks, 2),
            "ray_bytes_a_task": round((resident() - first) * 2**20 / timed_tasks),
        }


if __name__ == "__main__":
    main()
