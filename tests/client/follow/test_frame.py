"""Step records as a DataFrame, a figure and an SVG, and the error for a missing library."""

from __future__ import annotations

import sys
from math import nan
from xml.etree import ElementTree

import pytest

from smtrain.client.follow.curve import draw, frame
from smtrain.core.errors import JobError
from smtrain.core.pages.charts import curve

RECORDS = [
    {"step": 1.0, "loss": 4.0, "grad_norm": 1.0, "lr": 1e-4, "tokens_per_s": 10.0, "mfu": 0.4, "of": 3.0},
    {"step": 2.0, "loss": nan, "grad_norm": 1.0, "lr": 1e-4, "tokens_per_s": 10.0, "mfu": 0.4, "of": 3.0, "aux": 0.1},
    {"step": 3.0, "loss": 3.0},
]


def test_a_row_per_step() -> None:
    table = frame(RECORDS)
    assert table.index.name == "step"
    assert list(table.columns) == ["loss", "grad_norm", "lr", "tokens_per_s", "mfu", "aux"]
    assert table.loc[3, "loss"] == 3.0
    assert table["grad_norm"].isna().tolist() == [False, False, True]
    assert frame([]).empty


def test_an_svg_leaves_out_what_is_no_number() -> None:
    root = ElementTree.fromstring(curve([(record["step"], record["loss"]) for record in RECORDS]))
    points = next(part for part in root if part.tag.endswith("polyline")).attrib["points"].split()
    assert points == ["48.0,8.0", "712.0,90.0"]
    many = curve([(float(i), 1.0) for i in range(10_000)], points=50)
    assert many.count(",") < 60
    assert curve([(1.0, 4.0)]) == ""


@pytest.mark.parametrize(("library", "call"), [("pandas", frame), ("matplotlib", lambda records: draw(records, "x"))])
def test_a_missing_library_is_one_sentence(library: str, call: object, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name == library or name.startswith(f"{library}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    sentence = rf"the package {library}, which is not installed; run `pip install .*'{library}"
    with pytest.raises(JobError, match=sentence):
        call(RECORDS)  # type: ignore[operator]
