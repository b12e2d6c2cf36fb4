"""The line of a step: what the loop writes is what a client reads."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smtrain.contract.log_lines import Line, step_line, step_record, step_records

NAMES = ("loss", "grad_norm", "lr", "tokens_per_s", "mfu", "data_wait", "val_loss", "val_ppl", "val_accuracy")


@given(
    st.integers(0, 10**12), st.integers(1, 10**12),
    st.dictionaries(st.sampled_from(NAMES), st.floats(-1e9, 1e9) | st.sampled_from([float("inf"), float("nan")])),
)  # fmt: skip
def test_what_is_written_is_read(step: int, last: int, numbers: dict[str, float]) -> None:
    text = step_line({"step": step, **numbers}, last)
    read = step_record(text)
    assert read is not None
    assert list(read) == ["step", *numbers, "of"]
    assert (read["step"], read["of"]) == (step, last)
    for name, value in numbers.items():
        assert read[name] == pytest.approx(value, rel=1e-4, abs=0.06, nan_ok=True)
    assert step_line({"step": step, **{name: read[name] for name in numbers}}, last) == text


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
