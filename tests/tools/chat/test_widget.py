"""The chat box of a notebook: Enter, its buttons, and the view without ipywidgets."""

from __future__ import annotations

import threading
from pathlib import Path

import smtrain
from smtrain.tools.chat.widget import Widget, said
from tests.core.model.test_generate import make
from tests.extras import need
from tests.tools.chat.test_chat import GREEDY
from tests.worker.generation.test_generating import TEMPLATE

need("ipywidgets")


def others() -> None:
    """Wait for the threads that answer."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and thread.daemon and "_answer" in thread.name:
            thread.join()


def test_what_is_typed_is_answered_in_the_box(tmp_path: Path) -> None:
    folder = make(tmp_path / "model", "llama")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    talk = smtrain.chat(folder, compare=folder, **GREEDY)
    box = Widget(talk)
    box.entry.value = "<b>hello"
    box.entry._handle_custom_msg({"event": "submit"}, [])
    others()
    assert box.entry.value == ""
    assert talk.messages[0]["content"] == "<b>hello"
    assert "&lt;b&gt;hello" in box.shown.value
    assert "<b>base</b>" in box.shown.value
    first = talk.messages[1]
    box.buttons["Retry"].click()
    others()
    assert len(talk.messages) == 2
    assert talk.messages[1] == first  # greedy
    box.ask("x" * 200)
    others()
    assert "more than the model" in box.note.value
    box.buttons["Clear"].click()
    assert talk.messages == []
    assert box.shown.value == said(talk)
