"""TensorBoard's own reader finds every step once in the files made from a log."""

from __future__ import annotations

from pathlib import Path

from smtrain.client.follow.tensorboard import EventFiles
from smtrain.core.protocol.log_lines import Line, step_line


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


def line(step: int, loss: float, **more: float) -> Line:
    return Line(
        "algo-1", 1_700_000_000_000 + step, step_line({"step": step, "loss": loss, **more}, 100)
    )


def test_steps_that_a_restart_does_again_are_there_once_with_their_last_value(
    tmp_path: Path,
) -> None:
    files = EventFiles(tmp_path / "run")
    first = [line(step, 4.0) for step in range(1, 11)]
    second = [
        line(step, 2.0, val_loss=1.5) if step == 8 else line(step, 2.0) for step in range(6, 15)
    ]
    for one in [*first, *first, *second, *second]:  # the log is read again and again
        files.write(one)
    files.write(Line("algo-1", 0, "no step"))
    files.close()
    events = read(tmp_path / "run")
    assert events["train/loss"] == [(n, 4.0 if n < 6 else 2.0) for n in range(1, 15)]
    assert events["validation/loss"] == [(8, 1.5)]
    assert not {tag for tag in events if "of" in tag or "step" in tag}


def test_a_loss_that_is_no_number_is_written_once(tmp_path: Path) -> None:
    files = EventFiles(tmp_path / "run")
    for _ in range(3):
        files.write(line(1, float("nan")))
    files.close()
    assert [step for step, _ in read(tmp_path / "run")["train/loss"]] == [1]
