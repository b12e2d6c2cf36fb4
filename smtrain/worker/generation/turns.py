"""A conversation: questions and answers in turn. Needs no model."""

from __future__ import annotations

from dataclasses import dataclass, field

Message = dict[str, str]


@dataclass
class Conversation:
    """Questions and answers in turn, and the system prompt before them."""

    system: str | None = None
    turns: int | None = None
    """Earlier questions, with their answers, to send before a new one; None: as many as fit."""
    messages: list[Message] = field(default_factory=list)

    def asked(self, text: str) -> list[Message]:
        """The messages to send for a new question, including the earlier ones that are kept."""
        kept = self.messages if self.turns is None else self.messages[-2 * self.turns :] if self.turns else []
        first = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, *kept, {"role": "user", "content": text}]

    def add(self, question: str, answer: str) -> None:
        """Remember a question and its answer."""
        self.messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    def take_back(self) -> str | None:
        """Forget the last question and its answer; returns the question, None if nothing was asked."""
        if not self.messages:
            return None
        question = self.messages[-2]["content"]
        del self.messages[-2:]
        return question
