"""The panel in a notebook."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from smtrain.follow import notebook
from smtrain.follow.panel import LivePanel
from smtrain.job.logs import Line

from .test_panel import training


def test_only_a_kernels_shell_is_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    def shell(**attributes: Any) -> None:
        found = SimpleNamespace(get_ipython=lambda: SimpleNamespace(**attributes))
        monkeypatch.setitem(sys.modules, "IPython", found)

    shell(kernel=object())
    assert notebook.here()
    shell()  # a terminal's
    assert not notebook.here()
    monkeypatch.delitem(sys.modules, "IPython")
    assert not notebook.here()


def test_the_panel_is_html_in_which_a_jobs_words_are_text() -> None:
    progress = training()
    progress.lines.append(Line("algo-1", 0, "<script>alert(1)</script>"))
    html = notebook.html_of(LivePanel(progress))
    assert "step" in html
    assert "40 of 100" in html
    assert "<script>" not in html
    assert "&lt;script&gt;" in html


@pytest.mark.parametrize("keep", [True, False])
def test_it_is_drawn_in_its_place_and_stays_or_goes(monkeypatch: pytest.MonkeyPatch, keep: bool) -> None:
    shown: list[str] = []
    handle = SimpleNamespace(update=lambda html: shown.append(html.data))

    def display(html: Any, display_id: bool) -> Any:
        shown.append(html.data)
        return handle

    fake = SimpleNamespace(display=display, HTML=lambda text: SimpleNamespace(data=text))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(display=fake))
    monkeypatch.setitem(sys.modules, "IPython.display", fake)
    monkeypatch.setattr(notebook, "_EVERY_S", 0.0)
    with notebook.notebook_panel(training(), keep) as take:
        take(Line("algo-1", 0, "a line"))
    assert len(shown) == 3
    assert "interrupting the kernel leaves it running" in shown[0]
    assert bool(shown[-1]) is keep
