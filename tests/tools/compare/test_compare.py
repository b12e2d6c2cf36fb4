"""Compare trainings: sources of numbers, the point of divergence, and the verdict."""

from __future__ import annotations

import json
import math
import random
import re
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import smtrain
from smtrain.core.errors import ConfigError, DataError
from smtrain.tools.compare import picture
from smtrain.tools.compare.columns import StepColumns
from smtrain.tools.compare.compare import Comparison, _pair
from smtrain.tools.compare.series import series
from smtrain.tools.compare.sources import read, steps
from tests.cli.commands import error_lines
from tests.cli.test_cli import smtrain as command
from tests.phone import assert_fits_a_phone


def learned(
    seed: int, count: int = 400, rate: float = 1.0, after: int = 0, noise: float = 0.01
) -> list[dict[str, Any]]:
    """A loss that falls from 8 to 3, noisily; from step `after` on `rate` times as fast."""
    draw = random.Random(seed)
    rows, progress = [], 0.0
    for step in range(1, count + 1):
        progress += rate if after and step >= after else 1.0
        loss = 3 + 5 * math.exp(-progress / 150) + draw.gauss(0, noise)
        rows.append(
            {"step": step, "loss": loss, "grad_norm": 1 + draw.random(), "tokens_per_s": 1000.0}
        )
    return rows


def jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_two_seeds_follow_each_other_and_a_wrong_learning_rate_is_found_where_it_begins() -> None:
    base = learned(1)
    same = smtrain.compare(base, learned(2), tolerance=0.02)
    assert same.within
    assert "follows" in same.verdict
    wrong = smtrain.compare(base, learned(3, rate=2.0, after=150), tolerance=0.02)
    assert not wrong.within
    left = wrong.pairs[0].left_at
    assert left is not None
    assert 150 < left < 175
    assert f"at step {left:.0f}" in wrong.verdict
    assert wrong.to_dict()["compared"][0]["left_at"] == left
    assert isinstance(left, int)


@given(st.integers(30, 170), st.sampled_from([5, 20, 40]), st.floats(0.1, 0.5), st.integers(0, 9))
def test_where_a_training_turns_is_told_to_the_step(
    after: int, window: int, more: float, seed: int
) -> None:
    base = learned(seed, 200)
    turned = [{**row, "loss": row["loss"] * (1 + more * (row["step"] > after))} for row in base]
    assert smtrain.compare(base, turned, window=window).pairs[0].left_at == after + 1
    noisy = [
        {**row, "loss": row["loss"] * (1 + more * (row["step"] > after))}
        for row in learned(seed + 10, 200)
    ]
    left = smtrain.compare(base, noisy, window=window, tolerance=0.04).pairs[0].left_at
    assert left is not None
    assert abs(left - after - 1) <= 5


@given(
    st.lists(st.floats(0.5, 20), min_size=2, max_size=60),
    st.integers(1, 30),
    st.sampled_from(["step", "tokens", "time"]),
)
def test_a_training_follows_itself_whatever_it_is_laid_over_by(
    losses: list[float], window: int, by: Any
) -> None:
    rows = [
        {"step": i, "loss": loss, "tokens_per_s": 10.0} for i, loss in enumerate(losses, start=1)
    ]
    comparison = smtrain.compare(
        rows, rows, by=by, window=window, tolerance=1e-9, tokens_per_step=64
    )
    assert comparison.within
    assert comparison.pairs[0].loss.values == pytest.approx(comparison.pairs[0].loss.baseline)


def test_a_resume_with_another_learning_rate_is_told_and_drawn(tmp_path: Path) -> None:
    rows = [{"step": step, "loss": 8 - step / 50} for step in range(1, 101)]
    whole = series("whole", "a list", rows)
    resumed = replace(series("resumed", "a list", rows), rate_changes=((60.0, "0.0001", "5e-05"),))
    comparison = Comparison("step", 20, 0.02, (whole, resumed), smtrain.compare(rows, rows).pairs)
    change = "resumed was resumed at step 60 with another learning rate: 5e-05 in place of 0.0001."
    assert change in comparison.verdict
    assert change in picture.page(comparison)
    assert comparison.to_dict()["compared"][0]["learning_rate_changes"] == [
        {"step": 60, "from": "0.0001", "to": "5e-05"}
    ]
    labels = [text.get_text() for text in comparison.plot().axes[0].get_legend().get_texts()]
    assert "resumed: learning rate 0.0001 to 5e-05" in labels


def test_what_is_no_comparison_is_refused_or_said_first(tmp_path: Path) -> None:
    falling = [{"step": step, "loss": 3 - step / 100} for step in range(1, 41)]
    pairs = [{**row, "rewards/margins": 0.1} for row in falling]
    for one, other in ((falling, pairs), (pairs, falling)):
        with pytest.raises(
            smtrain.DataError,
            match=r"objective dpo.* measure different things; compare runs of one",
        ):
            smtrain.compare(one, other)
    assert smtrain.compare(pairs, pairs).within
    log = tmp_path / "a.jsonl"
    log.write_text("".join(json.dumps(row) + "\n" for row in falling))
    assert smtrain.compare(log, f"b={log}").verdict.startswith(
        f"b is compared with itself ({log}).\n"
    )
    resumed = [*falling[:30], *falling[19:]]
    twice = tmp_path / "b.jsonl"
    for rows, first in (
        (resumed, "b.jsonl follows"),
        (falling[:9] + falling, "b.jsonl holds 2 runs, as its steps"),
    ):
        twice.write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert smtrain.compare(log, twice).verdict.startswith(first)


def test_a_loss_that_is_no_number_leaves() -> None:
    rows = learned(1, 60)
    broken = [*rows[:40], *({**row, "loss": math.nan} for row in rows[40:])]
    assert smtrain.compare(rows, broken).pairs[0].left_at == 41
    assert json.loads(json.dumps(smtrain.compare(rows, broken).to_dict(), allow_nan=False))


def test_losses_without_a_finite_number_are_told_in_words() -> None:
    lost = [{"step": step, "loss": math.nan} for step in range(1, 6)]
    said = smtrain.compare(learned(1, 5), lost).verdict
    assert "cannot be compared from step 1" in said
    assert "nan" not in said


def test_half_the_batch_is_compared_by_tokens() -> None:
    """Twice as many steps of half the size give the same curve by tokens."""
    whole = [
        {"step": s, "loss": 3 + 5 * math.exp(-s / 50), "tokens_per_s": 1.0} for s in range(1, 201)
    ]
    half = [
        {"step": s, "loss": 3 + 5 * math.exp(-s / 100), "tokens_per_s": 1.0} for s in range(1, 401)
    ]
    a, b = read(whole), read(half)
    from smtrain.tools.compare.series import with_tokens

    pair = _pair(with_tokens(a, 2048), with_tokens(b, 1024), "tokens", 1, 1e-3)
    assert pair.left_at is None
    assert not smtrain.compare(whole, half, tolerance=1e-3).within


MEGATRON = (
    " [2026-01-02 03:04:05.678] iteration      100/  500000 | consumed samples:        25600 |"
    " elapsed time per iteration (ms): 2345.6 | throughput per GPU (TFLOP/s/GPU): 123.4 | learning"
    " rate: 1.500000E-05 | global batch size:   256 | lm loss: 9.123456E+00 | loss scale: 1.0 |"
    " grad norm: 5.123 | number of skipped iterations:   0 |"
)
NEOX = (
    " samples/sec: 24.316 | iteration      100/  143000 | elapsed time per iteration (ms): 42112.1"
    " | learning rate: 1.2E-05 | approx flops per GPU: 43.2TFLOPS | lm_loss: 8.061E+00 | loss"
    " scale: 4096.0 | number of skipped iterations:   0 | number of nan iterations:   0 |"
)
NEMO = (
    "Epoch 0:   0%|          | 188/301501 [59:00<1573:03:24, 18.79s/it, loss=7.76, v_num=3-16, "
    "reduced_train_loss=7.570, global_step=187.0, consumed_samples=23936.0]\r"
    "Epoch 0:   0%|          | 189/301501 [59:12<1573:03:24, 18.79s/it, loss=7.75, v_num=3-16, "
    "reduced_train_loss=7.560, gradient_norm=8.600, parameter_norm=1.95e+3, global_step=188.0, "
    "consumed_samples=24064.0, iteration_time=18.70]"
)
OURS = (
    "algo-1 | 12:00:01 | step=7 loss=4.250000 grad_norm=1.5000 lr=1.0000e-04 tokens_per_s=10.0"
    " mfu=0.1 of=9"
)


@pytest.mark.parametrize(
    ("line", "record"),
    [
        (
            MEGATRON,
            {
                "step": 100,
                "loss": 9.123456,
                "grad_norm": 5.123,
                "lr": 1.5e-5,
                "samples": 25600,
                "step_s": 2.3456,
            },
        ),
        (NEOX, {"step": 100, "loss": 8.061, "lr": 1.2e-5, "step_s": 42.1121}),
        (NEMO, {"step": 189, "loss": 7.56, "grad_norm": 8.6, "samples": 24064, "step_s": 18.7}),
        (OURS, {"step": 7, "loss": 4.25, "grad_norm": 1.5, "lr": 1e-4, "tokens_per_s": 10.0}),
    ],
    ids=["megatron-lm", "gpt-neox", "neuronx-nemo-megatron", "smtrain"],
)
def test_log_lines_of_other_trainers(line: str, record: dict[str, float], tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text(f"some words before\n{line}\nand after: 1\n")
    assert read(path).records[-1] == pytest.approx(record)


def test_other_lines_are_no_steps() -> None:
    assert list(steps(["loss: 3.2", "Epoch 0: 10/20 [", "iteration 3", "a step=x", ""])) == []


def test_tensorboard_csv_and_a_table_say_the_same(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    rows = learned(5, 30)
    board: Any = SummaryWriter(str(tmp_path / "board"))
    for row in rows:
        board.add_scalar("lm loss", row["loss"], row["step"])
        board.add_scalar("grad-norm", row["grad_norm"], row["step"])
    board.close()
    (tmp_path / "x.csv").write_text(
        "Iteration,train_loss\n" + "".join(f"{r['step']},{r['loss']}\n" for r in rows)
    )
    import pandas

    table = pandas.DataFrame(rows).set_index("step")
    comparison = smtrain.compare(
        rows, str(tmp_path / "board"), f"gpu={tmp_path / 'x.csv'}", table, tolerance=1e-6
    )
    assert comparison.within
    assert [one.name for one in comparison.series] == ["records", "board", "gpu", "table"]
    assert comparison.pairs[0].grad_norm is not None
    assert comparison.pairs[1].grad_norm is None
    assert "time" in comparison.series[1].records[0]


@pytest.mark.parametrize(
    ("count", "window", "panes"), [(1, 1, 4), (6, 3, 4), (39, 19, 4), (40, 20, 4), (400, 20, 4)]
)
def test_no_window_is_wider_than_the_data_and_no_pane_is_empty(
    count: int, window: int, panes: int
) -> None:
    comparison = smtrain.compare(learned(1, count), learned(3, count, rate=9.0, after=2))
    assert f"windows of {window} point" in comparison.verdict
    figure = comparison.plot()
    assert len(figure.axes) == panes
    assert all(
        any(np.isfinite(line.get_ydata()).any() for line in axes.lines) for axes in figure.axes
    )
    if 1 < count < 40:
        smooth = comparison.pairs[0].loss.smooth
        assert smooth[0] > smooth[-1], "a flat line hides the training"
    ticks = figure.axes[-1].get_xticks()
    assert all(float(tick).is_integer() for tick in ticks)


def test_a_loss_that_is_no_number_has_no_difference_to_draw() -> None:
    lost = [{"step": step, "loss": math.nan} for step in range(1, 7)]
    comparison = smtrain.compare([{**row, "loss": 3.0} for row in lost], lost)
    assert len(comparison.plot().axes) == 1
    assert ">cannot be compared</span>" in picture.page(comparison)


@pytest.mark.parametrize("as_document", [True, False])
def test_the_result_stands_first_and_has_a_colour(as_document: bool) -> None:
    base = learned(1, 60)
    others = learned(2, 60), learned(3, 60, rate=9.0, after=2)
    comparison = smtrain.compare(base, *others)
    page = picture.page(comparison, as_document=as_document)
    assert re.findall(r"background:(#\w+)\">(agree|differ)</span>", page) == [
        ("#2e7d32", "agree"),
        ("#c62828", "differ"),
    ]
    assert page.index("differ</span>") < page.index("<svg" if as_document else "<img")
    assert "tokens per dollar" not in page, "a column without a value"


def test_the_command_writes_pictures_and_ends_by_the_tolerance(tmp_path: Path) -> None:
    quick = [{**row, "tokens_per_s": 12345.6} for row in learned(1)]
    a, b = (
        jsonl(tmp_path / "a.jsonl", quick),
        jsonl(tmp_path / "b.jsonl", learned(3, rate=3.0, after=100)),
    )
    done = command("compare", f"gpu={a}", str(b), "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert "b.jsonl leaves gpu at step 1" in done.stdout
    page = (tmp_path / "out/compare.html").read_text()
    assert "<svg" in page
    assert "http" not in page.split("</svg>")[-1], "it needs nothing from elsewhere"
    assert_fits_a_phone(page)
    narrow = page.partition("<figure class=narrow>")[2]
    assert "max-width:40rem" in page
    assert "<svg" in narrow, "a picture whose words can be read on a phone"
    assert ">12,346<" in page, "tokens a second, as people write them"
    assert (tmp_path / "out/compare.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "out/compare.json").read_text())["within"] is False
    assert command("compare", str(a), str(b), "--tolerance", "0.02", "--json").returncode == 1
    assert command("compare", str(a), str(a), "--tolerance", "0.02").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["{a}"], "two or more"),
        (
            ["{a}", "{far}"],
            "no step in common: far.jsonl goes from 900 to 929, a.jsonl from 1 to 30",
        ),
        (["{a}", "nowhere/x.log"], "nowhere/x.log: there is no such file"),
        (["{a}", "{words}"], "has no line of a training step that smtrain knows"),
        (["{a}", "{empty}"], "holds no metrics.jsonl and no TensorBoard"),
        (["{a}", "{a}", "--by", "tokens"], "--tokens-per-step"),
        (["{a}", "{a}", "--window", "0"], "must be above 0"),
        (["{a}", "{table}"], "has no steps with a loss: it has x, y"),
    ],
)
def test_what_cannot_be_compared_is_one_sentence(
    arguments: list[str], sentence: str, tmp_path: Path
) -> None:
    names = {
        "a": jsonl(tmp_path / "a.jsonl", learned(1, 30)),
        "far": jsonl(tmp_path / "far.jsonl", [{"step": 900 + i, "loss": 1.0} for i in range(30)]),
        "words": tmp_path / "words.txt",
        "empty": tmp_path / "empty",
        "table": tmp_path / "t.csv",
    }
    names["words"].write_text("hello\n")
    names["empty"].mkdir()
    names["table"].write_text("x,y\n1,2\n")
    done = command("compare", *(word.format(**names) for word in arguments), "--target", "local")
    assert done.returncode == 2
    assert sentence in done.stderr
    assert len(error_lines(done.stderr)) == 1


def test_the_api_says_the_same() -> None:
    with pytest.raises(ConfigError, match="two or more"):
        smtrain.compare([])
    with pytest.raises(DataError, match="7 is not a training; give the name"):
        smtrain.compare(learned(1, 5), 7)


@given(
    st.lists(st.dictionaries(st.sampled_from(["loss", "lr"]), st.floats()), max_size=20),
    st.randoms(),
)
def test_columns_are_the_records(rows: list[dict[str, float]], draw: random.Random) -> None:
    records = [{"step": draw.randrange(12), **row} for row in rows]
    columns = StepColumns()
    for record in records:
        columns.append(record)
    columns.sort()
    by_step = {record["step"]: record for record in records}
    assert repr([by_step[step] for step in sorted(by_step)]) == repr(
        [dict(sorted_like(by_step, r)) for r in columns]
    )
    assert len(columns) == len(by_step)


def sorted_like(
    by_step: dict[float, dict[str, float]], record: dict[str, float]
) -> list[tuple[str, float]]:
    """The record's items in the order of the row that it was made from."""
    return [(name, record[name]) for name in by_step[int(record["step"])] if name in record]


def test_a_long_training_takes_few_bytes_a_step(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", learned(1, 4000))
    tracemalloc.start()
    try:
        one = read(path)
        comparison = Comparison("step", 20, 0.02, (one, one), (_pair(one, one, "step", 20, 0.02),))
        assert (
            tracemalloc.get_traced_memory()[0] < 4000 * 250
        )  # as dicts and tuples of floats it was 1,300 each
    finally:
        tracemalloc.stop()
    assert len(comparison.pairs[0].loss.x) == 4000


def test_a_picture_of_a_long_training_has_its_extremes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture, "_POINTS", 400)
    other = learned(2, 4000)
    other[1234]["loss"], other[2345]["loss"] = 99.0, math.nan
    curve = smtrain.compare(learned(1, 4000), other).pairs[0].loss
    thin = picture.thin(curve)
    assert len(thin.x) <= 400
    assert max(v for v in thin.values if math.isfinite(v)) == 99.0
    assert min(thin.baseline) == min(curve.baseline)
    assert 2346.0 in thin.x
    assert picture.thin(thin) is thin
