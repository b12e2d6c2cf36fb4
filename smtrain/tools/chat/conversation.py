"""A conversation with one or two loaded models: questions, answers as they come, retries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from smtrain.core.errors import CheckpointError
from smtrain.core.public import public_class
from smtrain.core.text import clean
from smtrain.worker.generation.sampling import Sampling
from smtrain.worker.generation.turns import Conversation


@dataclass
class Speaker:
    """Who answers: a model, with its own half of the conversation."""

    name: str
    """What its answers are headed with; empty if it is alone."""
    loaded: Any
    """`smtrain.worker.generation.load.Loaded`; None where the model is elsewhere."""
    plain: bool
    """Without the model's adapter."""
    conversation: Conversation


@public_class
class Chat:
    """A conversation; `smtrain.chat` makes it. In a notebook it shows a box to type in."""

    def __init__(self, speakers: list[Speaker], sampling: Sampling) -> None:
        self._speakers, self.sampling = speakers, sampling
        self._tries = 0

    @property
    def names(self) -> list[str]:
        """Of those who answer, in the order in which they do."""
        return [speaker.name for speaker in self._speakers]

    @property
    def messages(self) -> list[dict[str, str]]:
        """What was said, as {role, content}; with two models, the trained one's."""
        return [*self._speakers[-1].conversation.messages]

    def by_name(self) -> dict[str, list[dict[str, str]]]:
        """What was said to each who answers."""
        return {one.name: [*one.conversation.messages] for one in self._speakers}

    @property
    def system(self) -> str | None:
        """The system prompt, which may be set at any time."""
        return self._speakers[-1].conversation.system

    @system.setter
    def system(self, text: str | None) -> None:
        for speaker in self._speakers:
            speaker.conversation.system = text or None

    def ask(self, text: str) -> str | dict[str, str]:
        """The answer to a question; with two models, both answers by name."""
        answers: dict[str, str] = dict.fromkeys(self.names, "")
        for name, piece in self.stream(text):
            answers[name] += piece
        return answers if len(answers) > 1 else next(iter(answers.values()))

    def stream(self, text: str) -> Iterator[tuple[str, str]]:
        """(who answers, piece of the answer), as it comes; what was answered until then is kept if it is left early."""
        from smtrain.worker.generation.conversation import spelled
        from smtrain.worker.generation.generating import stream

        if not text.strip():
            raise CheckpointError("the question is empty; ask something")
        sampling = replace(self.sampling, seed=self.sampling.seed + self._tries)
        told = [spelled(one.loaded, one.conversation.asked(text), sampling.max_new_tokens)[0] for one in self._speakers]
        answers = [""] * len(told)
        try:
            for number, (speaker, ids) in enumerate(zip(self._speakers, told, strict=True)):
                most = (speaker.loaded.positions or 1 << 30) - ids.shape[1]
                short = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, most))
                pieces = stream(speaker.loaded, ids, short, plain=speaker.plain)
                try:
                    for piece in pieces:
                        shown = clean(piece)
                        answers[number] += shown
                        yield speaker.name, shown
                finally:
                    pieces.close()  # type: ignore[attr-defined]  # a generator
        finally:
            for speaker, answer in zip(self._speakers, answers, strict=True):
                speaker.conversation.add(text, answer)

    def retry(self) -> Iterator[tuple[str, str]]:
        """The last question once more, with another seed, in place of its answer."""
        question = None
        for speaker in self._speakers:
            question = speaker.conversation.take_back()
        if question is None:
            raise CheckpointError("nothing has been asked yet, so there is nothing to retry")
        self._tries += 1
        yield from self.stream(question)

    def clear(self) -> None:
        """Forget what was said; the system prompt stays."""
        self._tries = 0
        for speaker in self._speakers:
            speaker.conversation.messages.clear()

    def to_dict(self) -> dict[str, Any]:
        """The conversation as plain values: `messages` as instruction data has them, by name if two models answer."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        held = {name: [*first, *messages] for name, messages in self.by_name().items()}
        return {"messages": held[self.names[-1]], **({"answers": held} if len(held) > 1 else {})}

    def _ipython_display_(self) -> None:
        from smtrain.tools.chat.widget import show

        show(self)
