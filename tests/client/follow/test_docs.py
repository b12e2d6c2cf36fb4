"""The page's table of causes is the table in use."""

from __future__ import annotations

from pathlib import Path

from smtrain.client.follow.failure import causes

PAGE = Path(__file__).resolve().parents[3] / "docs/troubleshooting.md"


def test_the_page_has_every_cause_in_order() -> None:
    rows = [f"| {cause.cause} | {cause.do} |".replace("<type>", "&lt;type&gt;") for cause in causes()]
    assert "\n".join(["|---|---|", *rows, ""]) in PAGE.read_text("utf-8")
