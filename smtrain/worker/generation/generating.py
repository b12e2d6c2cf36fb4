"""Generate with transformers: one text, streamed piece by piece, or many in one batch."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from smtrain.core.errors import CheckpointError
from smtrain.worker.generation.load import LoadedModel
from smtrain.worker.generation.sampling import Sampling, cut_at, held_back

_REPLACEMENT_CHARACTER = "\ufffd"  # the tokenizer decodes the first bytes of a character to this
_CHARACTER = 4  # most tokens of one character; after these the bytes are not a character
_CONTEXT_TOKENS = 6  # tokens that are decoded together with the next ones


def generation_config(loaded_model: LoadedModel, sampling: Sampling) -> GenerationConfig:
    """The settings as transformers' class; the model's own generation_config.json does not
    count.
    """
    ends = loaded_model.ends
    config_class: Any = GenerationConfig
    options: dict[str, Any] = {"do_sample": sampling.is_random, "num_beams": sampling.beams}
    if sampling.is_random:
        options |= {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
        }
    if sampling.beams > 1:
        options["length_penalty"] = sampling.length_penalty
    if sampling.stop:
        options["stop_strings"] = list(sampling.stop)
    config: GenerationConfig = config_class(
        max_new_tokens=sampling.max_new_tokens,
        bos_token_id=loaded_model.model.generation_config.bos_token_id,
        eos_token_id=ends or None,
        pad_token_id=loaded_model.padding,
        **options,
    )
    return config


def encode_prompt(loaded_model: LoadedModel, text: str, *, special: bool) -> torch.Tensor:
    """Ids of a prompt, [1, length]; `special` adds the tokens that begin a text.

    Raises `CheckpointError` for a prompt without tokens, or with one that the model lacks.
    """
    ids = loaded_model.tokenizer(
        text, return_tensors="pt", return_token_type_ids=False, add_special_tokens=special
    )["input_ids"]
    if not text or ids.shape[1] == 0:
        raise CheckpointError("a prompt is empty; give at least one character.")
    loaded_model.refuse_unknown_token(ids[0].tolist())
    return torch.as_tensor(ids).to(loaded_model.model.device)


def refuse_overlong(loaded_model: LoadedModel, ids: torch.Tensor, sampling: Sampling) -> None:
    """Raise `CheckpointError` if the model has too few positions for a prompt and the answer."""
    length, room = ids.shape[1], loaded_model.positions
    if room is not None and length + sampling.max_new_tokens > room:
        raise CheckpointError(
            f"a prompt is {length:,} tokens long, and with {sampling.max_new_tokens:,} new ones"
            f" it exceeds the model's {room:,} positions; shorten it, or lower"
            " --max-new-tokens (max_new_tokens=)"
        )


def stream(
    loaded_model: LoadedModel, ids: torch.Tensor, sampling: Sampling, *, plain: bool = False
) -> Iterator[str]:
    """Yield pieces of the text that follows `ids` [1, length], as soon as they are whole
    characters.

    With beams there is one piece. Closing the iterator stops the model after the current token.
    `plain` switches an adapter off.
    """
    pieces = _Pieces(loaded_model, ids[0], sampling.stop)

    def work() -> None:
        try:
            with torch.inference_mode(), loaded_model.plain(plain):
                torch.manual_seed(sampling.seed)
                out = loaded_model.model.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    generation_config=generation_config(loaded_model, sampling),
                    streamer=pieces if sampling.beams == 1 else None,
                    stopping_criteria=StoppingCriteriaList([pieces]),
                    **_stops(loaded_model, sampling),
                )
                if sampling.beams > 1:
                    pieces.put_all(out[0])
            pieces.end()
        except BaseException as error:  # the reader's thread raises it again
            pieces.fail(error)

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    try:
        yield from pieces
    finally:
        pieces.stop()
        worker.join()


def complete(
    loaded_model: LoadedModel,
    prompts: list[torch.Tensor],
    sampling: Sampling,
    *,
    plain: bool = False,
) -> list[str]:
    """Complete the prompts (ids [1, length]) in one batch, padded on the left.

    If positions are learned, a text ends at the last of them. Raises `CheckpointError` for a prompt
    that leaves no room for a token.
    """
    longest = max(ids.shape[1] for ids in prompts)
    if loaded_model.has_learned_positions and loaded_model.positions is not None:
        free_positions = max(1, min(sampling.max_new_tokens, loaded_model.positions - longest))
        sampling = replace(sampling, max_new_tokens=free_positions)
        refuse_overlong(loaded_model, max(prompts, key=lambda ids: ids.shape[1]), sampling)
    config = generation_config(loaded_model, sampling)
    device = loaded_model.model.device
    batch = torch.full(
        (len(prompts), longest), int(config.pad_token_id or 0), dtype=torch.long, device=device
    )
    mask = torch.zeros_like(batch)
    for row, ids in enumerate(prompts):
        batch[row, longest - ids.shape[1] :] = ids[0]
        mask[row, longest - ids.shape[1] :] = 1
    torch.manual_seed(sampling.seed)
    with torch.inference_mode(), loaded_model.plain(plain):
        out = loaded_model.model.generate(
            input_ids=batch,
            attention_mask=mask,
            generation_config=config,
            **_stops(loaded_model, sampling),
        )
    return [
        cut_at(decode_continuation(loaded_model.tokenizer, ids[0], row[longest:]), sampling.stop)[0]
        for ids, row in zip(prompts, out, strict=True)
    ]


def decode_continuation(tokenizer: Any, prompt: torch.Tensor, new: torch.Tensor) -> str:
    """Decode new ids together with the prompt, because some tokenizers drop a leading space."""
    prompt_text: str = tokenizer.decode(prompt, skip_special_tokens=True)
    full_text: str = tokenizer.decode(torch.cat([prompt, new]), skip_special_tokens=True)
    if full_text.startswith(prompt_text):
        return full_text.removeprefix(prompt_text)
    return str(tokenizer.decode(new, skip_special_tokens=True))


def _stops(loaded_model: LoadedModel, sampling: Sampling) -> dict[str, Any]:
    return {"tokenizer": loaded_model.tokenizer} if sampling.stop else {}


class _Pieces(BaseStreamer, StoppingCriteria):  # type: ignore[misc]  # transformers has no types here
    """Takes tokens in the model's thread and yields text in the reader's, which can stop the
    model.
    """

    def __init__(
        self, loaded_model: LoadedModel, prompt: torch.Tensor, stop: tuple[str, ...]
    ) -> None:
        self._tokenizer, self._prompt, self._stops = loaded_model.tokenizer, prompt.cpu(), stop
        self._queue: queue.Queue[str | BaseException | None] = queue.Queue()
        self._ids: list[int] = self._prompt.tolist()
        self._shown = len(self._ids)
        """Ids whose text is in `_text`."""
        self._from = max(0, self._shown - _CONTEXT_TOKENS)
        self._text = ""
        self._sent = 0
        self._stopped = False
        self._first = True

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        """Whether to stop; transformers calls this after each token."""
        return torch.full(
            (input_ids.shape[0],), self._stopped, dtype=torch.bool, device=input_ids.device
        )

    def put(self, value: Any) -> None:
        """Take the prompt, then each new token."""
        if self._first:
            self._first = False
            return
        self._ids += value.reshape(-1).tolist()
        self._read()
        self._send()

    def put_all(self, ids: torch.Tensor) -> None:
        """Take a whole text with its prompt."""
        self._ids = ids.tolist()

    def end(self) -> None:
        """Send what was held back: the model is done."""
        self._read(last=True)
        self._send(last=True)
        self._queue.put(None)

    def fail(self, error: BaseException) -> None:
        """Pass an error of the model on to the reader."""
        self._queue.put(error)

    def stop(self) -> None:
        """Stop the model after the current token."""
        self._stopped = True

    def __iter__(self) -> Iterator[str]:
        while (piece := self._queue.get()) is not None:
            if isinstance(piece, BaseException):
                raise piece
            yield piece

    def _read(self, last: bool = False) -> None:
        """Decode new ids with a few ids before them, so that a long text costs no more per
        token.
        """
        context_text = self._decode(self._ids[self._from : self._shown])
        text = self._decode(self._ids[self._from :])
        if (
            text.endswith(_REPLACEMENT_CHARACTER)
            and not last
            and len(self._ids) - self._shown < _CHARACTER
        ):
            return
        self._text += text[len(context_text) :]
        self._from, self._shown = max(self._from, self._shown - _CONTEXT_TOKENS), len(self._ids)

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def _send(self, last: bool = False) -> None:
        text, _ = cut_at(self._text, self._stops)
        if not last:
            text = text[: len(text) - held_back(text, self._stops)]
        if len(text) > self._sent:
            self._queue.put(text[self._sent :])
            self._sent = len(text)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' progress bars and advice on standard error."""
    from transformers.utils import logging

    logs: Any = logging
    level = logs.get_verbosity()
    logs.set_verbosity_error()
    logs.disable_progress_bar()
    try:
        yield
    finally:
        logs.set_verbosity(level)
        logs.enable_progress_bar()
