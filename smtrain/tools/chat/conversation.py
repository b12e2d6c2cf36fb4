"""Conversations: with one or two loaded models, or with a SageMaker endpoint; answers come piece by
piece.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.core.aws_errors import is_not_found
from smtrain.core.errors import CheckpointError, ConfigError, JobError
from smtrain.core.files import parse_json
from smtrain.core.public_api import public_class
from smtrain.core.targets import TARGETS, TargetName
from smtrain.core.text import clean
from smtrain.worker.generation.sampling import Sampling


@dataclass
class Conversation:
    """Questions and answers in turn, and the system prompt before them."""

    system: str | None = None
    turns: int | None = None
    """Earlier questions, with their answers, to send before a new one; None: as many as fit."""
    messages: list[dict[str, str]] = field(default_factory=list)

    def with_question(self, text: str) -> list[dict[str, str]]:
        """The messages to send for a new question, including the earlier ones that are kept."""
        earlier_messages = (
            self.messages
            if self.turns is None
            else self.messages[-2 * self.turns :]
            if self.turns
            else []
        )
        first = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, *earlier_messages, {"role": "user", "content": text}]

    def add(self, question: str, answer: str) -> None:
        """Remember a question and its answer."""
        self.messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]

    def take_back(self) -> str | None:
        """Forget the last question and its answer; returns the question, None if nothing was
        asked.
        """
        if not self.messages:
            return None
        question = self.messages[-2]["content"]
        del self.messages[-2:]
        return question


@dataclass
class Speaker:
    """A model that answers, with its own conversation."""

    name: str
    """Heading of its answers; empty if only one model answers."""
    model: Any
    """`smtrain.worker.generation.load.LoadedModel`; None for an endpoint."""
    plain: bool
    """Without the model's adapter."""
    conversation: Conversation


@public_class
class Chat:
    """A conversation; `smtrain.chat` makes it."""

    def __init__(self, speakers: list[Speaker], sampling: Sampling) -> None:
        self._speakers, self.sampling = speakers, sampling
        self._tries = 0

    @property
    def names(self) -> list[str]:
        """Names of the models, in the order of their answers."""
        return [speaker.name for speaker in self._speakers]

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation as {role, content}; with two models, that of the trained one."""
        return [*self._speakers[-1].conversation.messages]

    def by_name(self) -> dict[str, list[dict[str, str]]]:
        """The messages of each model."""
        return {speaker.name: [*speaker.conversation.messages] for speaker in self._speakers}

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
        """(name of the model, piece of its answer), as it comes; a partial answer is kept if the
        caller stops early.
        """
        from smtrain.worker.generation.conversation import encode_conversation
        from smtrain.worker.generation.generating import stream

        if not text.strip():
            raise CheckpointError("the question is empty; ask something")
        sampling = replace(self.sampling, seed=self.sampling.seed + self._tries)
        prompts = [
            encode_conversation(
                speaker.model, speaker.conversation.with_question(text), sampling.max_new_tokens
            )[0]
            for speaker in self._speakers
        ]
        answers = [""] * len(prompts)
        try:
            for number, (speaker, ids) in enumerate(zip(self._speakers, prompts, strict=True)):
                free_positions = (speaker.model.positions or 1 << 30) - ids.shape[1]
                short = replace(
                    sampling, max_new_tokens=min(sampling.max_new_tokens, free_positions)
                )
                pieces = stream(speaker.model, ids, short, plain=speaker.plain)
                try:
                    for piece in pieces:
                        clean_piece = clean(piece)
                        answers[number] += clean_piece
                        yield speaker.name, clean_piece
                finally:
                    pieces.close()  # type: ignore[attr-defined]  # a generator
        finally:
            for speaker, answer in zip(self._speakers, answers, strict=True):
                speaker.conversation.add(text, answer)

    def retry(self) -> Iterator[tuple[str, str]]:
        """Ask the last question again with another seed, and replace its answer."""
        question = None
        for speaker in self._speakers:
            question = speaker.conversation.take_back()
        if question is None:
            raise CheckpointError("nothing has been asked yet, so there is nothing to retry")
        self._tries += 1
        yield from self.stream(question)

    def clear(self) -> None:
        """Forget the messages; the system prompt stays."""
        self._tries = 0
        for speaker in self._speakers:
            speaker.conversation.messages.clear()

    def close(self) -> None:
        """End the processes of a divided model; it answers no more. An undivided model needs no
        end.
        """
        for speaker in self._speakers:
            if speaker.model is not None:
                speaker.model.close()

    def __enter__(self) -> Chat:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def to_dict(self) -> dict[str, Any]:
        """The conversation as plain values: `messages` as instruction data has them, by name if two
        models answer.
        """
        first = [{"role": "system", "content": self.system}] if self.system else []
        messages_by_name = {name: [*first, *messages] for name, messages in self.by_name().items()}
        return {
            "messages": messages_by_name[self.names[-1]],
            **({"answers": messages_by_name} if len(messages_by_name) > 1 else {}),
        }

    def __repr__(self) -> str:
        return f"<a conversation with {' and '.join(self.names)}: ask(TEXT) answers>"


class EndpointChat(Chat):
    """A conversation with an endpoint; `smtrain.chat(endpoint=...)` makes it."""

    def __init__(
        self,
        endpoint: str,
        sampling: Sampling,
        system: str | None,
        turns: int | None,
        target: TargetName | None,
        options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__([Speaker("", None, False, Conversation(system, turns))], sampling)
        self.endpoint, self._options = endpoint, options or {}
        self._place = SageMakerBackend("local" if target and TARGETS[target].here else "aws")

    def stream(self, text: str) -> Iterator[tuple[str, str]]:
        """(name, piece of the answer), as it comes; a partial answer is kept if the caller stops
        early.

        Raises `JobError` if the endpoint cannot be reached, or its model does not answer.
        """
        if not text.strip():
            raise ConfigError("the question is empty; ask something", code="config.wrong_value")
        (speaker,) = self._speakers
        sampling = replace(self.sampling, seed=self.sampling.seed + self._tries)
        body = chat_request(
            self.endpoint, speaker.conversation.with_question(text), sampling, self._options
        )
        answer = ""
        stream = self._invoke(body)
        try:
            for piece in pieces(stream, self.endpoint):
                clean_piece = clean(piece)
                answer += clean_piece
                yield speaker.name, clean_piece
        finally:
            close = getattr(stream, "close", None)
            if close is not None:
                close()
            if answer:
                speaker.conversation.add(text, answer)

    def _invoke(self, body: dict[str, Any]) -> Any:
        from botocore.exceptions import ClientError

        try:
            return self._place.client("sagemaker-runtime").invoke_endpoint_with_response_stream(
                EndpointName=self.endpoint,
                ContentType="application/json",
                Accept="text/event-stream",
                Body=json.dumps(body).encode(),
            )["Body"]
        except ClientError as error:
            code = error.response.get("Error", {}).get("Code")
            if code == "ModelError":
                raise JobError(
                    _no_answer_message(
                        self.endpoint, str(error.response.get("OriginalMessage") or error)
                    )
                ) from None
            if is_not_found(error) or code == "ValidationError":
                region = self._place.region_name()
                raise JobError(
                    f"there is no endpoint {self.endpoint} in {region}, or it is not in service"
                    " yet; `smtrain deploy` makes one"
                ) from None
            raise


def chat_request(
    endpoint: str,
    messages: list[dict[str, str]],
    sampling: Sampling,
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """OpenAI's chat completion, with vLLM's `top_k` and `chat_template_kwargs`.

    `smtrain deploy` serves the model by the endpoint's name.
    """
    parameters: dict[str, Any] = {
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
    }
    if sampling.temperature:
        parameters |= {"top_p": sampling.top_p, "seed": sampling.seed}
        parameters |= {"top_k": sampling.top_k} if sampling.top_k else {}
    if sampling.stop:
        parameters["stop"] = list(sampling.stop)
    if options:
        parameters["chat_template_kwargs"] = options
    return {"model": endpoint, "messages": messages, "stream": True, **parameters}


def pieces(stream: Iterable[dict[str, Any]], endpoint: str) -> Iterator[str]:
    """The text in the events of a response stream; raises `JobError` for an error among them."""
    unfinished_line = b""
    for event in stream:
        if part := event.get("PayloadPart"):
            unfinished_line += part["Bytes"]
            *lines, unfinished_line = unfinished_line.split(b"\n")
            for line in lines:
                yield from _text(line, endpoint)
        else:
            ((kind, details),) = event.items()
            raise JobError(_no_answer_message(endpoint, f"{kind}: {details.get('Message', '')}"))
    yield from _text(unfinished_line, endpoint)


def _text(line: bytes, endpoint: str) -> Iterator[str]:
    """The text of one line: an event, or the whole answer of a server that does not stream."""
    text = line.decode("utf-8", "replace").strip().removeprefix("data:").strip()
    if not text.startswith("{"):  # [DONE], a comment, the end of an event
        return
    try:
        event = parse_json(text)
    except ValueError:
        raise JobError(
            _no_answer_message(endpoint, f"its answer is not JSON: {text[:200]}")
        ) from None
    if error := event.get("error"):
        raise JobError(
            _no_answer_message(
                endpoint, str(error.get("message", error) if isinstance(error, dict) else error)
            )
        )
    for choice in event.get("choices") or ():
        message = choice.get("delta") or choice.get("message") or {}
        if content := message.get("content"):
            yield str(content)


def _no_answer_message(endpoint: str, reason: str) -> str:
    return f"the model of endpoint {endpoint} did not answer: {' '.join(reason.split())}"
