"""A plan in a notebook."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import smtrain
from smtrain.client.planner.picture import svg

CONFIG = Path(__file__).resolve().parents[3] / "examples/llama-2-70b-trn1.yaml"
SVG = "{http://www.w3.org/2000/svg}"


def test_the_bars_are_as_long_as_what_they_stand_for() -> None:
    plan = smtrain.plan(CONFIG)
    drawn = ElementTree.fromstring(svg(plan))
    wide = {str(rect[0].text): float(rect.attrib["width"]) for rect in drawn.iter(f"{SVG}rect")}
    parts = [name for name in plan.memory_gib if name not in ("total", "available")]
    memory = sum(
        width for name, width in wide.items() if name.rpartition(":")[0].replace(" ", "_") in parts
    )
    assert abs(memory / 560 - plan.memory_gib["total"] / plan.memory_gib["available"]) < 0.01
    assert f"${plan.dollars:,.0f}" in "".join(drawn.itertext())


def test_what_does_not_fit_passes_the_mark_and_costs_nothing() -> None:
    plan = smtrain.plan(CONFIG, parallel={"tp": 8, "pp": 1})
    drawn = svg(plan)
    assert not plan.fits
    assert ">cost<" not in drawn
    assert "DOES NOT FIT" in plan._repr_html_()
