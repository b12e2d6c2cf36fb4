"""The line of a step: what the loop writes is what a client reads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smtrain.core.protocol.log_lines import (
    MACHINE_NUMBERS,
    Line,
    machine_line,
    machine_record,
    step_line,
    step_record,
    step_records,
)

NAMES = (
    "loss",
    "loss_scale",
    "skipped",
    "grad_norm",
    "lr",
    "tokens_per_s",
    "mfu",
    "padding",
    "data_wait",
    "val_loss",
    "val_ppl",
    "val_accuracy",
)


@given(
    st.integers(0, 10**12),
    st.integers(1, 10**12),
    st.dictionaries(
        st.sampled_from(NAMES), st.floats(-1e9, 1e9) | st.sampled_from([float("inf"), float("nan")])
    ),
)
def test_what_is_written_is_read(step: int, last: int, numbers: dict[str, float]) -> None:
    text = step_line({"step": step, **numbers}, last)
    read = step_record(text)
    assert read is not None
    assert list(read) == ["step", *numbers, "of"]
    assert (read["step"], read["of"]) == (step, last)
    for name, value in numbers.items():
        near = (
            0.5 if name in ("loss_scale", "skipped") else 0.06
        )  # a power of two from 1 on, and a count: whole numbers
        assert read[name] == pytest.approx(value, rel=1e-4, abs=near, nan_ok=True)
    assert step_line({"step": step, **{name: read[name] for name in numbers}}, last) == text


@given(st.dictionaries(st.sampled_from(MACHINE_NUMBERS), st.floats(0, 1e12), min_size=1))
def test_what_a_host_says_of_its_machine_is_read(numbers: dict[str, float]) -> None:
    text = machine_line(numbers)
    read = machine_record(text)
    assert read is not None
    assert read == {name: pytest.approx(value, abs=0.51) for name, value in numbers.items()}
    assert machine_line(read) == text
    assert step_record(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "machine: ",
        "machine: warm=1",
        "the machine: cpu=1",
        "step=1 cpu=0.5",
        "machine: cpu=inf",
    ],
)
def test_any_other_line_says_nothing_of_a_machine(text: str) -> None:
    assert machine_record(text) is None


def test_a_number_without_a_form_is_refused() -> None:
    with pytest.raises(KeyError):
        step_line({"step": 1, "temperature": 1.0}, 2)


def test_a_step_done_twice_counts_last_and_keeps_its_validation() -> None:
    texts = [
        step_line({"step": 1, "loss": 3.0}, 2),
        step_line({"step": 1, "loss": 2.5}, 2),
        "no step=1 at the beginning",
        step_line({"step": 1, "val_loss": 2.75}, 2),
    ]
    lines = [Line("algo-1", at, text) for at, text in enumerate(texts)]
    assert step_records(lines) == [{"step": 1, "loss": 2.5, "val_loss": 2.75, "of": 2}]
