"""Lines from log files of nodes: each once, complete, in order."""

from __future__ import annotations

from pathlib import Path

from smtrain.client.backends.slurm.logs import LogFiles
from smtrain.client.backends.slurm.remote_shell import Head


def line(second: int, text: str) -> str:
    return f"2026-11-22T06:00:{second:02}.000Z {text}\n"


def texts(
    log: LogFiles, start: int = 0, host: str | None = None, pattern: str | None = None
) -> list[str]:
    return [event["message"] for event in log.since(start, host, pattern)]


def test_lines_of_all_nodes_come_in_the_order_of_time(tmp_path: Path) -> None:
    (tmp_path / "algo-1.log").write_text(line(1, "a") + line(3, "step=1 loss=2.0"))
    (tmp_path / "algo-2.log").write_text(line(2, "b") + "without a time\n")
    log = LogFiles(Head(), "job", str(tmp_path))
    assert texts(log) == ["a", "b", "without a time", "step=1 loss=2.0"]
    assert texts(log, host="algo-2") == ["b", "without a time"]
    assert texts(log, pattern='"step="') == ["step=1 loss=2.0"]
    assert {event["logStreamName"] for event in log.since(0)} == {"job/algo-1-0", "job/algo-2-0"}


def test_a_line_is_read_once_it_is_whole(tmp_path: Path) -> None:
    file = tmp_path / "algo-1.log"
    file.write_text(line(1, "a") + line(2, "half")[:-3])
    log = LogFiles(Head(), "job", str(tmp_path))
    assert texts(log) == ["a"]
    with file.open("a") as more:
        more.write(line(2, "half")[-3:] + line(3, "c"))
    newest = log.since(0)[-1]["timestamp"]
    assert texts(log) == ["a", "half", "c"]
    assert texts(log, start=newest) == ["c"]


def test_a_reading_begins_where_the_last_one_ended(tmp_path: Path) -> None:
    file = tmp_path / "algo-1.log"
    file.write_text(line(1, "x" * 1000))
    log = LogFiles(Head(), "job", str(tmp_path))
    (first,) = log.since(0)
    file.write_text(
        "y" * (len(line(1, "x" * 1000)) - 1) + "\n" + line(5, "new")
    )  # what was read is not read again
    assert texts(log, start=first["timestamp"] + 1) == ["new"]


def test_the_last_lines_of_every_node(tmp_path: Path) -> None:
    for node in (1, 2):
        (tmp_path / f"algo-{node}.log").write_text(
            "".join(line(n, f"{node}.{n}") for n in range(9))
        )
    assert [e["message"] for e in LogFiles(Head(), "job", str(tmp_path)).last(2)] == [
        "1.7",
        "1.8",
        "2.7",
        "2.8",
    ]


def test_a_job_that_has_not_begun_has_no_lines(tmp_path: Path) -> None:
    assert texts(LogFiles(Head(), "job", str(tmp_path / "none"))) == []
