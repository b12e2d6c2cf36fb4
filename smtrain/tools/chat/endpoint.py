"""A conversation with a deployed model: OpenAI's messages through a SageMaker endpoint, the answer as it comes.

vLLM and LMI take a chat completion at /invocations and stream it as server-sent events, whose lines the parts of
SageMaker's stream may cut anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from smtrain.client.backends.sagemaker.calls import unnamed
from smtrain.client.backends.sagemaker.target import Target
from smtrain.core.errors import ConfigError, JobError
from smtrain.core.facts.sagemaker import TargetName
from smtrain.core.text import clean
from smtrain.tools.chat.conversation import Chat, Speaker
from smtrain.worker.generation.sampling import Sampling
from smtrain.worker.generation.turns import Conversation


class EndpointChat(Chat):
    """A conversation with an endpoint; `smtrain.chat(endpoint=...)` makes it."""

    def __init__(
        self, endpoint: str, sampling: Sampling, system: str | None, turns: int | None, target: TargetName | None
    ) -> None:
        super().__init__([Speaker("", None, False, Conversation(system, turns))], sampling)
        self.endpoint = endpoint
        self._place = Target(target if target == "local" else "aws")

    def stream(self, text: str) -> Iterator[tuple[str, str]]:
        """(who answers, piece of the answer), as it comes; what was answered until then is kept if it is left early.

        Raises `JobError` where the endpoint cannot be asked, or its model does not answer.
        """
        if not text.strip():
            raise ConfigError(["the question is empty; ask something"])
        (speaker,) = self._speakers
        sampling = replace(self.sampling, seed=self.sampling.seed + self._tries)
        body = chat_request(self.endpoint, speaker.conversation.asked(text), sampling)
        answer = ""
        stream = self._asked(body)
        try:
            for piece in pieces(stream, self.endpoint):
                shown = clean(piece)
                answer += shown
                yield speaker.name, shown
        finally:
            close = getattr(stream, "close", None)
            if close is not None:
                close()
            if answer:
                speaker.conversation.add(text, answer)

    def _asked(self, body: dict[str, Any]) -> Any:
        from botocore.exceptions import ClientError

        try:
            return self._place.client("sagemaker-runtime").invoke_endpoint_with_response_stream(
                EndpointName=self.endpoint, ContentType="application/json", Accept="text/event-stream",
                Body=json.dumps(body).encode(),
            )["Body"]  # fmt: skip
        except ClientError as error:
            told = error.response.get("Error", {})
            if told.get("Code") == "ModelError":
                raise JobError(_refused(self.endpoint, str(error.response.get("OriginalMessage") or error))) from None
            if unnamed(error) or told.get("Code") == "ValidationError":
                where = f" in {self._place.region_name()}"
                raise JobError(
                    f"there is no endpoint {self.endpoint}{where}, or it is not in service yet; `smtrain deploy` makes "
                    "one"
                ) from None
            raise


def chat_request(endpoint: str, messages: list[dict[str, str]], sampling: Sampling) -> dict[str, Any]:
    """OpenAI's chat completion, with vLLM's `top_k`; `smtrain deploy` serves the model by the endpoint's name."""
    drawn: dict[str, Any] = {"max_tokens": sampling.max_new_tokens, "temperature": sampling.temperature}
    if sampling.temperature:
        drawn |= {"top_p": sampling.top_p, "seed": sampling.seed}
        drawn |= {"top_k": sampling.top_k} if sampling.top_k else {}
    if sampling.stop:
        drawn["stop"] = list(sampling.stop)
    return {"model": endpoint, "messages": messages, "stream": True, **drawn}


def pieces(stream: Iterable[dict[str, Any]], endpoint: str) -> Iterator[str]:
    """The text in the events of a response stream; raises `JobError` for an error among them."""
    held = b""
    for event in stream:
        if part := event.get("PayloadPart"):
            held += part["Bytes"]
            *lines, held = held.split(b"\n")
            for line in lines:
                yield from _text(line, endpoint)
        else:
            ((kind, told),) = event.items()
            raise JobError(_refused(endpoint, f"{kind}: {told.get('Message', '')}"))
    yield from _text(held, endpoint)


def _text(line: bytes, endpoint: str) -> Iterator[str]:
    """The text of one line: an event, or the whole answer of a server that does not stream."""
    text = line.decode("utf-8", "replace").strip().removeprefix("data:").strip()
    if not text.startswith("{"):  # [DONE], a comment, the end of an event
        return
    try:
        told = json.loads(text)
    except ValueError:
        raise JobError(_refused(endpoint, f"its answer is not JSON: {text[:200]}")) from None
    if error := told.get("error"):
        raise JobError(_refused(endpoint, str(error.get("message", error) if isinstance(error, dict) else error)))
    for choice in told.get("choices") or ():
        said = choice.get("delta") or choice.get("message") or {}
        if content := said.get("content"):
            yield str(content)


def _refused(endpoint: str, why: str) -> str:
    return f"the model of endpoint {endpoint} did not answer: {' '.join(why.split())}"
