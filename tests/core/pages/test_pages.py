"""Pages escape and clean every value, charts take any numbers, and starting the command loads no
template engine.
"""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from smtrain.core.pages.charts import Bar, bars, chart, curve
from smtrain.core.pages.page import Cell, number, render

EVIL = "<script>alert(1)</script>\x1b[2J\u202e\"'&"
SAFE = "&lt;script&gt;alert(1)&lt;/script&gt;&#34;&#39;&amp;"


def test_every_value_is_cleaned_and_escaped() -> None:
    cells = [EVIL, Cell(EVIL, "one", tone="bad"), number(EVIL, EVIL)]
    pages = [
        render("plan.html", picture="", lines=[(EVIL, 2)]),
        render(
            "compare.html",
            title=EVIL,
            generator="x",
            comparison={
                "remarks": [EVIL],
                "pairs": [{"verdict": EVIL, "result": "differ"}],
                "changes": [EVIL],
            },
            pictures=[],
            head=[EVIL],
            rows=[cells],
        ),
        chart(EVIL, [(1, 1.0), (2, 2.0)], [(1, 1.5)], dots_are=EVIL, marks=[(1, EVIL)]),
        bars([Bar(EVIL, {EVIL: 1.0}, 1.0, EVIL)], EVIL),
    ]
    for page in pages:
        assert SAFE in page
        assert not re.search("<script|\x1b|\u202e", page)


def test_secrets_are_hidden_on_request() -> None:
    token = "hf_" + "aB3dE5fG7hJ9kL1mN3pQ5rS7tU9vW1xY3z"
    assert token in render("plan.html", picture="", lines=[(token, 2)])
    assert token not in render("plan.html", hide_secrets=True, picture="", lines=[(token, 2)])


@pytest.mark.parametrize("log", [False, True])
def test_a_chart_takes_any_numbers(log: bool) -> None:
    assert chart("x", []) == ""
    assert chart("x", [(1, 2.0)]) == ""
    assert chart("x", [(1, float("nan")), (2, float("inf"))]) == ""
    for points in (
        [(1, 3.0), (2, 3.0)],
        [(1, 0.0), (2, 0.0)],
        [(1, -1e-9), (2, 1e12)],
        [(5, 1e-30), (5, 2e-30)],
    ):
        drawn = chart("a <b>", points, [(2, 4.0)], dots_are="held out", log=log)
        assert "nan" not in drawn
        assert len(re.findall("<text", drawn)) < 16
        assert "nan" not in curve(points, validation_losses=[(2, 4.0)])
    many = [(i, float(i % 7 + 1)) for i in range(10_000)]
    assert len(chart("x", many, log=log)) < 20_000
    assert curve(many, points=50).count(",") < 60


@pytest.mark.parametrize("log", [False, True])
@pytest.mark.parametrize("ends", [(3.96, 4.01), (1.0, 9.0), (6.5, 9.9), (0.3, 0.4), (2e-5, 1e-4)])
def test_a_chart_has_two_ticks_or_more(ends: tuple[float, float], log: bool) -> None:
    drawn = chart("x", list(enumerate(ends)), log=log)
    ticks = re.findall(r'text-anchor="end">([^<]+)</text>', drawn)[:-1]  # the last is the last step
    assert 2 <= len(set(ticks)) <= 7
    assert all(0.99 * ends[0] <= float(tick) <= 1.01 * ends[1] for tick in ticks)


def test_the_command_starts_without_jinja2() -> None:
    code = (
        "import sys, smtrain, smtrain.cli, smtrain.core.pages.charts; sys.exit('jinja2' in"
        " sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
