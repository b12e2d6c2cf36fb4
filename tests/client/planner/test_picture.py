"""A plan in a notebook."""

from __future__ import annotations

import base64
import html
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

import smtrain

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
CONFIG = EXAMPLES / "llama-2-70b-trn1.yaml"
SVG = "{http://www.w3.org/2000/svg}"


def drawn_and_written(plan: smtrain.Plan) -> tuple[ElementTree.Element, str]:
    """The picture of a plan's card, and the text below it."""
    card = plan._repr_html_()
    data = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', card)
    text = html.unescape(re.sub("<[^>]+>", "\n", card))
    return ElementTree.fromstring(base64.b64decode(data[0])), text


@pytest.fixture(scope="module")
def plan() -> smtrain.Plan:
    return smtrain.plan(CONFIG)


def test_the_bars_are_as_long_as_what_they_stand_for(plan: smtrain.Plan) -> None:
    drawn, _ = drawn_and_written(plan)
    wide = {str(rect[0].text): float(rect.attrib["width"]) for rect in drawn.iter(f"{SVG}rect")}
    parts = [name for name in plan.memory_gib if name not in ("total", "available")]
    memory = sum(
        width for name, width in wide.items() if name.rpartition(":")[0].replace(" ", "_") in parts
    )
    assert abs(memory / 560 - plan.memory_gib["total"] / plan.memory_gib["available"]) < 0.01
    assert f"${plan.dollars:,.0f}" in "".join(drawn.itertext())


@pytest.mark.parametrize(
    "config", ["llama-2-70b-trn1.yaml", "qwen3-30b-a3b-trn2.yaml", "tiny-llama.yaml"]
)
def test_each_piece_has_a_colour_and_a_label_that_no_other_has(config: str) -> None:
    drawn, _ = drawn_and_written(smtrain.plan(EXAMPLES / config))
    pieces = {str(rect[0].text): rect.attrib["fill"] for rect in drawn.iter(f"{SVG}rect")}
    assert len(set(pieces.values())) == len(pieces) > 10
    labels = [str(text.text) for text in drawn.iter(f"{SVG}text")]
    assert {piece.replace(": ", " ") for piece in pieces} <= set(labels)
    assert not [label for label in labels if re.search(r"\de[+-]\d", label)], "no exponents"
    swatches = [path.attrib["fill"] for path in drawn.iter(f"{SVG}path") if "fill" in path.attrib]
    assert swatches == list(pieces.values())
    width = float(drawn.attrib["viewBox"].split()[2])
    for text in drawn.iter(f"{SVG}text"):
        assert float(text.attrib["x"]) + 6 * len(str(text.text)) < width, "a label is cut"


def test_the_text_below_does_not_repeat_the_bars(plan: smtrain.Plan) -> None:
    drawn, text = drawn_and_written(plan)
    written = str(plan)
    for part in ("gradients", "optimizer", "tensor parallel", "overhead", "warm pool"):
        assert part in "".join(drawn.itertext())
        assert part in written
        assert part not in text
    assert "\nmesh " in text
    assert f"cost        ${plan.dollars:,.2f}\n" in text


def test_what_does_not_fit_passes_the_mark_and_costs_nothing() -> None:
    plan = smtrain.plan(CONFIG, parallel={"tp": 8, "pp": 1})
    drawn, text = drawn_and_written(plan)
    assert not plan.fits
    assert "cost" not in [word.text for word in drawn.iter(f"{SVG}text")]
    assert "DOES NOT FIT" in text
