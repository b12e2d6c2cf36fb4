"""Step records as a DataFrame, a figure, an SVG and a line of text, and the error for a missing
library.
"""

from __future__ import annotations

import math
import sys
from math import nan
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from smtrain.client.follow.curve import draw, frame, save_curve, sparkline
from smtrain.core.errors import JobError
from smtrain.core.pages.charts import curve

RECORDS = [
    {
        "step": 1.0,
        "loss": 4.0,
        "grad_norm": 1.0,
        "lr": 1e-4,
        "tokens_per_s": 10.0,
        "mfu": 0.4,
        "of": 3.0,
    },
    {
        "step": 2.0,
        "loss": nan,
        "grad_norm": 1.0,
        "lr": 1e-4,
        "tokens_per_s": 10.0,
        "mfu": 0.4,
        "of": 3.0,
        "aux": 0.1,
    },
    {"step": 3.0, "loss": 3.0},
]


def test_a_row_per_step() -> None:
    table = frame(RECORDS)
    assert table.index.name == "step"
    assert list(table.columns) == ["loss", "grad_norm", "lr", "tokens_per_s", "mfu", "aux"]
    assert table.loc[3, "loss"] == 3.0
    assert table["grad_norm"].isna().tolist() == [False, False, True]
    assert frame([]).empty


def test_rewards_of_pairs_have_axes_of_their_own() -> None:
    pairs = {
        "rewards/chosen": 0.1,
        "rewards/rejected": -0.1,
        "rewards/margins": 0.2,
        "rewards/accuracies": 0.75,
    }
    records = [
        {"step": 1.0, "loss": 0.69},
        {"step": 2.0, "loss": 0.6, **pairs},
        {"step": 3.0, "loss": 0.5, **pairs},
    ]
    loss, rewards, norm = draw(records, "x").axes
    assert [axis.get_ylabel() for axis in (loss, rewards, norm)] == [
        "loss (per pair)",
        "rewards",
        "grad norm",
    ]
    assert [line.get_label() for line in rewards.get_lines()] == ["chosen", "rejected", "margins"]
    assert len(draw(RECORDS, "x").axes) == 2


def test_an_svg_leaves_out_what_is_no_number() -> None:
    root = ElementTree.fromstring(curve([(record["step"], record["loss"]) for record in RECORDS]))
    points = next(part for part in root if part.tag.endswith("polyline")).attrib["points"].split()
    assert points == ["48.0,8.0", "712.0,90.0"]
    many = curve([(float(i), 1.0) for i in range(10_000)], points=50)
    assert many.count(",") < 60
    assert curve([(1.0, 4.0)]) == ""


@pytest.mark.parametrize(
    ("library", "call"), [("pandas", frame), ("matplotlib", lambda records: draw(records, "x"))]
)
def test_a_missing_library_is_one_sentence(
    library: str, call: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name == library or name.startswith(f"{library}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    sentence = rf"the package {library}, which is not installed; run `pip install .*'{library}"
    with pytest.raises(JobError, match=sentence):
        call(RECORDS)  # type: ignore[operator]


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
