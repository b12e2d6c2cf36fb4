"""The conversation on a terminal or a pipe: questions, answers as they come, and commands that
begin with /.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from smtrain.core.errors import SmtrainError
from smtrain.core.files import only_writer, write_atomically
from smtrain.core.text import say
from smtrain.tools.chat.conversation import Chat

HELP = """/clear          forget what was said
/retry          answer the last question once more, with another seed
/system TEXT    set the system prompt; alone: show it
/save FILE      write the conversation as JSON; FILE is not replaced
/help           this list
/quit           leave; so does the end of input (Ctrl-D)
Ctrl-C stops an answer; pressed twice at the prompt it leaves. A line that ends in \\ continues on the next."""
PROMPT, CONTINUATION_PROMPT = "> ", ". "


class Terminal:
    """Read questions and print answers until the input ends."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._talks = sys.stdin.isatty()  # else a pipe, which needs no prompt
        self._commands: dict[str, Callable[[str], None]] = {
            "/clear": self._clear,
            "/retry": self._retry,
            "/system": self._system,
            "/save": self._save,
            "/help": lambda _: say(HELP),
        }

    def run(self) -> None:
        """Talk until /quit, the end of input, or Ctrl-C twice."""
        if self._talks:
            _editing()
            say("/help lists the commands, /quit leaves")
        was_interrupted = had_question = False
        while True:
            try:
                text = self._read()
                was_interrupted = False
                if text is None or text in ("/quit", "/exit"):
                    return
                had_question = had_question or bool(text)
                self._handle_line(text)
            except EOFError:
                if self._talks:
                    say("")
                elif not had_question:
                    say(
                        "standard input has no question: type at a terminal, or pipe a line"
                        " into it",
                        error=True,
                    )
                return
            except KeyboardInterrupt:
                if not self._talks:
                    raise
                say("")
                if was_interrupted:
                    return
                was_interrupted = True
                say("Ctrl-C again leaves, and so does /quit", error=True)

    def _read(self) -> str | None:
        lines = [self._line(PROMPT)]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(self._line(CONTINUATION_PROMPT))
        return "\n".join(lines).strip()

    def _line(self, prompt: str) -> str:
        if self._talks:
            return input(prompt)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")

    def _handle_line(self, text: str) -> None:
        if not text:
            return
        word, _, argument = text.partition(" ")
        try:
            if word in self._commands:
                self._commands[word](argument.strip())
            elif word.startswith("/") and word[1:].isalpha():
                say(f"there is no command {word}; /help lists them", error=True)
            else:
                self._answer(self._chat.stream(text))
        except SmtrainError as error:
            if not self._talks:
                raise
            say(error, error=True)

    def _answer(self, pieces: Iterator[tuple[str, str]]) -> None:
        """Show an answer as it comes; Ctrl-C stops it and keeps what has come."""
        speaking_name, at_line_start = "", True
        try:
            for name, piece in pieces:
                if name != speaking_name:
                    if speaking_name:
                        say("" if at_line_start else "\n")
                    say(f"{name}:")
                    speaking_name = name
                say(piece, end="")
                sys.stdout.flush()
                at_line_start = piece.endswith("\n")
        except KeyboardInterrupt:
            if not self._talks:
                raise
            close = getattr(pieces, "close", None)
            if close is not None:
                close()
            say(" (stopped)", end="")
            at_line_start = False
        if not at_line_start:
            say("")
        sys.stdout.flush()

    def _clear(self, _: str) -> None:
        self._chat.clear()
        say("forgotten", error=True)

    def _retry(self, _: str) -> None:
        self._answer(self._chat.retry())

    def _system(self, text: str) -> None:
        if text:
            self._chat.system = text
        else:
            say(self._chat.system or "there is no system prompt")

    def _save(self, name: str) -> None:
        if not name:
            raise SmtrainError("/save needs the name of a file, such as /save talk.json")
        path = Path(name).expanduser()
        if not path.parent.is_dir():
            raise SmtrainError(f"{path.parent} is not a folder; name a file in an existing folder")
        try:
            with only_writer(path, SmtrainError):
                if path.exists():
                    raise SmtrainError(f"{name} is there already; name another file")
                write_atomically(
                    path, json.dumps(self._chat.to_dict(), ensure_ascii=False, indent=2) + "\n"
                )
        except OSError as error:
            raise SmtrainError(
                f"{name} cannot be written ({error.strerror}); name another file"
            ) from None
        say(f"saved in {name}", error=True)


def _editing() -> None:
    """Turn on arrow keys and history in `input`, if Python has readline."""
    try:
        import readline  # noqa: F401
    except ImportError:
        pass
