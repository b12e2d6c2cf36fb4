"""Pictures of a run."""

from __future__ import annotations

import math
from pathlib import Path

from hypothesis import example, given
from hypothesis import strategies as st

from smtrain.client.follow.curve import draw, save_curve, sparkline


def test_a_falling_loss_falls() -> None:
    assert sparkline([8, 7, 6, 5, 4, 3, 2, 1]) == "█▇▆▅▄▃▂▁"
    assert sparkline([]) == ""
    assert sparkline([math.nan]) == ""


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(1, 80))
@example([0.0, 2.2250738585072014e-308], 2)
def test_it_never_is_wider_than_asked(values: list[float], width: int) -> None:
    assert len(sparkline(values, width)) == min(width, len(values))


def test_the_curve_is_a_picture(tmp_path: Path) -> None:
    records = [{"step": float(s), "loss": 5.0 / s, "grad_norm": 1.0} for s in range(1, 20)]
    path = save_curve(records, tmp_path / "a" / "loss.png", "a run")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 5000


def test_a_kernel_without_inline_drawing_shows_the_curve() -> None:
    from IPython.core.formatters import DisplayFormatter

    figure = draw([{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}], "curve")
    shown, _ = DisplayFormatter().format(figure)
    assert shown["image/png"].startswith(b"\x89PNG")
