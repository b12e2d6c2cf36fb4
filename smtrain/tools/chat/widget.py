"""A conversation in a notebook: a box to type in, answers as they come, buttons to stop, retry and clear."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from html import escape
from typing import TYPE_CHECKING, Any

from smtrain.core.errors import SmtrainError
from smtrain.core.extras import present
from smtrain.core.pages.page import render

if TYPE_CHECKING:
    from smtrain.tools.chat.conversation import Chat

HOW = "a conversation: <code>talk.ask(TEXT)</code> answers; with the package ipywidgets there is a box to type in here"


def show(chat: Chat) -> None:
    """Display the conversation; without ipywidgets, only its messages and how to ask."""
    from IPython.display import HTML, display

    untyped: Any = display
    if not present("ipywidgets"):
        untyped(HTML(f"{said(chat)}<p>{HOW}</p>"))  # type: ignore[no-untyped-call]
        return
    untyped(Widget(chat).box)


def said(chat: Chat, running: dict[str, str] | None = None, question: str = "") -> str:
    """The conversation as HTML, two models side by side. `running` is the unfinished answer of each model."""
    columns = {}
    for name, messages in chat.by_name().items():
        columns[name] = [(message["role"], message["content"]) for message in messages]
        if running is not None:
            columns[name] += [("user", question), ("assistant", running.get(name, ""))]
    return render("chat.html", columns=columns.items())


class Widget:
    """The conversation with ipywidgets; `box` is what a notebook displays."""

    def __init__(self, chat: Chat) -> None:
        import ipywidgets

        widgets: Any = ipywidgets
        self._chat = chat
        self._answering = threading.Lock()
        self._stop = threading.Event()
        self.shown = widgets.HTML(said(chat))
        self.note = widgets.HTML()
        self.entry = widgets.Text(placeholder="ask, and press Enter", layout=widgets.Layout(width="auto"))
        self.buttons = {name: widgets.Button(description=name) for name in ("Stop", "Retry", "Clear")}
        self.entry.on_msg(self._typed)
        self.buttons["Stop"].on_click(lambda _: self._stop.set())
        self.buttons["Retry"].on_click(lambda _: self._begin("", retry=True))
        self.buttons["Clear"].on_click(lambda _: self.clear())
        self.box = widgets.VBox([self.shown, self.note, self.entry, widgets.HBox(list(self.buttons.values()))])

    def ask(self, text: str) -> threading.Thread | None:
        """Answer in a thread, so that the notebook stays free; None while another answer is running."""
        if not text.strip():
            return None
        return self._begin(text)

    def _typed(self, _: Any, content: dict[str, Any], __: Any) -> None:
        """Handle Enter in the entry box."""
        if content.get("event") == "submit":
            self.ask(self.entry.value)

    def clear(self) -> None:
        """Clear the conversation, unless an answer is running."""
        if self._answering.acquire(blocking=False):
            self._chat.clear()
            self.shown.value = said(self._chat)
            self._answering.release()

    def _begin(self, text: str, retry: bool = False) -> threading.Thread | None:
        if not self._answering.acquire(blocking=False):
            return None
        self._stop.clear()
        self.entry.value, self.note.value = "", ""
        worker = threading.Thread(target=self._answer, args=(text, retry), daemon=True)
        worker.start()
        return worker

    def _answer(self, text: str, retry: bool) -> None:
        try:
            question = text
            if retry and self._chat.messages:
                question = self._chat.messages[-2]["content"]
            pieces: Iterator[tuple[str, str]] = self._chat.retry() if retry else self._chat.stream(text)
            running: dict[str, str] = {}
            for name, piece in pieces:
                running[name] = running.get(name, "") + piece
                self.shown.value = said(self._chat, running, question)
                if self._stop.is_set():
                    pieces.close()  # type: ignore[attr-defined]  # a generator
                    break
        except SmtrainError as error:
            self.note.value = escape(str(error))
        finally:
            self.shown.value = said(self._chat)
            self._answering.release()
