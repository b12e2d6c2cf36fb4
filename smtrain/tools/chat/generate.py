"""`smtrain.generate`: texts for prompts from files, with a model loaded here."""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smtrain.core.errors import ConfigError, DataError, first_line
from smtrain.core.files import only_writer, parse_json, read_whole
from smtrain.core.model.chat_options import checked_options
from smtrain.core.public_api import public
from smtrain.core.spinner import spinner
from smtrain.core.suggest import near_path
from smtrain.core.targets import TargetName
from smtrain.core.text import Say, with_article
from smtrain.tools.chat.chat import (
    Models,
    find_models,
    known_settings,
    load_models,
    refuse_unusable,
)
from smtrain.worker.generation.sampling import Sampling

if TYPE_CHECKING:
    from smtrain.worker.generation.load import LoadedModel

FIELDS = ("prompt", "messages", "instruction", "question", "text")
"""Fields that may hold a record's prompt, in the order of search."""


@dataclass(frozen=True)
class Prompt:
    """A text to continue, or a conversation to answer; `record` is the whole record of its file."""

    text: str = ""
    messages: tuple[dict[str, str], ...] = ()
    record: dict[str, Any] = field(default_factory=dict)

    def display_text(self, chat: bool) -> str:
        """The prompt as shown before its text: on the same line if text is continued, else above
        it.
        """
        text = self.messages[-1]["content"] if self.messages else self.text
        return f"{text}\n" if chat or self.messages else text


@dataclass(frozen=True)
class PromptFormat:
    """The form in which prompts reach the model: as text, or in its chat template or another
    one.
    """

    chat: bool = False
    system: str | None = None
    template: str | Path | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the template for all records; those of a record win."""


def read_prompts(sources: Sequence[str | Path], texts: Iterable[str] = ()) -> list[Prompt]:
    """The prompts of .txt files (a line each, empty ones left out) and .jsonl files, after those
    given as text.

    Raises `DataError` for a file that cannot be read, a record without a prompt, and if there are
    no prompts.
    """
    prompts = [Prompt(text=text) for text in texts]
    for source in sources:
        path = Path(source).expanduser()
        if path.is_dir():
            raise DataError(f"{source} is a folder; name a .txt or .jsonl file of prompts")
        try:
            content = read_whole(path)
        except OSError as error:
            suggestion = near_path(source) if isinstance(error, FileNotFoundError) else ""
            raise DataError(
                f"{source} cannot be read ({error.strerror}); {suggestion}name a .txt or .jsonl"
                " file"
            ) from None
        except UnicodeDecodeError:
            raise DataError(
                f"{source} is not UTF-8 text; name a .txt or .jsonl file of prompts"
            ) from None
        except ValueError as error:
            raise DataError(
                f"{source} cannot be read ({error}); divide it into several files"
            ) from None
        lines = [
            (number, line)
            for number, line in enumerate(content.split("\n"), start=1)
            if line.strip()
        ]
        if path.suffix in (".jsonl", ".json"):
            prompts += [_prompt_of_record(line, f"{source}:{number}") for number, line in lines]
        else:
            prompts += [Prompt(text=line.rstrip("\r")) for _, line in lines]
    if not prompts:
        problem = (
            f"{', '.join(map(str, sources))} holds no prompts"
            if sources
            else "there are no prompts"
        )
        raise DataError(
            f"{problem}; name a .txt or .jsonl file with some, or give --prompt TEXT (prompts=)"
        )
    if any(not prompt.text and not prompt.messages for prompt in prompts):
        raise DataError("a prompt is empty; give at least one character")
    return prompts


def _prompt_of_record(line: str, place: str) -> Prompt:
    try:
        record = parse_json(line)
    except ValueError as error:
        raise DataError(
            f"{place}: is not JSON ({first_line(error)}); correct the line, or take it out"
        ) from None
    if isinstance(record, str):
        return Prompt(text=record)
    name = (
        next((name for name in FIELDS if record.get(name)), None)
        if isinstance(record, dict)
        else None
    )
    if name is None:
        raise DataError(
            f"{place}: has no prompt; a record has one of the fields {', '.join(FIELDS)}"
        )
    value = record[name]
    if name == "messages":
        if not isinstance(value, list) or not all(
            isinstance(message, dict)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str)
            for message in value
        ):
            raise DataError(
                f"{place}: messages is no list of turns; write such as"
                ' [{"role": "user", "content": "TEXT"}]'
            )
        return Prompt(messages=tuple(value), record=record)
    if not isinstance(value, str):
        raise DataError(f"{place}: {name} is {with_article(type(value).__name__)}; write text")
    return Prompt(text=value, record=record)


@public
def generate(
    model: Any,
    prompts: str | Path | Sequence[str] = (),
    *,
    files: Sequence[str | Path] = (),
    out: str | Path | None = None,
    overwrite: bool = False,
    batch: int = 1,
    chat: bool = False,
    system: str | None = None,
    adapter: Any = None,
    template: str | Path | None = None,
    chat_template_kwargs: dict[str, Any] | None = None,
    sampling: Sampling | None = None,
    target: TargetName | None = None,
    processes: int | None = None,
    config: Any = None,
    say: Say = lambda _: None,
    **settings: Any,
) -> list[dict[str, Any]]:
    """Let a model continue or answer prompts: one record each, with `completion` added to the
    fields of its file.

    Greedy unless a temperature is set. With `batch` 1 a text depends on its prompt and the seed
    alone.

    Args:
        model: A Hugging Face folder or an adapter as PEFT writes it, a run or job or the name of
            one, an s3:// prefix of a model, or training checkpoints in a folder or below an s3://
            prefix.
        prompts: A prompt, or several.
        files: Files of prompts: .txt, a line each, or .jsonl, with the field prompt, messages,
            instruction, question or text.
        out: JSON lines to write; the same call resumes an interrupted one.
        overwrite: Replace an existing file `out`.
        batch: Prompts that the model takes at a time.
        chat: Ask in the model's chat template instead of continuing text; records with messages
            always do.
        system: The system prompt, with `chat`.
        adapter: An adapter's folder, run or s3:// prefix, put on `model` without merging.
        template: File of a chat template, in place of the model's own.
        chat_template_kwargs: Options of the chat template, such as {"enable_thinking": False};
            those of a record (`chat_template_kwargs`, `tools`, `documents`...) win.
        sampling: How texts are drawn. Default: greedy, 64 tokens.
        target: `local` or `aws`, for a run, job or s3:// prefix. Default: here if it is known here,
            else AWS.
        processes: Divide the model over so many processes, each of which loads only its part.
            Default: one; of a checkpoint on accelerators, as many as hold it.
        config: The model whose config.json and tokenizer belong to a training checkpoint that has
            none.
        say: Called with each line about progress.
        **settings: Fields of `Sampling` in place of single ones: max_new_tokens, temperature,
            top_k, top_p, beams, length_penalty, stop, seed.

    Returns:
        The records, in the order of the prompts.

    Raises:
        CheckpointError: There is no model or chat template, or the memory of this machine does not
            hold it.
        ConfigError: A setting has no meaning.
        DataError: There are no prompts, or `out` is there already.
        JobError: No run or job of that name has a model.

    Examples:
        >>> records = smtrain.generate("demo://tiny-llama", ["import os", "def "], max_new_tokens=4)
        >>> [record["prompt"] for record in records]
        ['import os', 'def ']
    """
    sampling = known_settings(sampling or Sampling(), settings)
    texts = [prompts] if isinstance(prompts, (str, Path)) else list(prompts)
    queue = read_prompts(files, map(str, texts))
    if batch < 1:
        raise ConfigError(f"batch: got {batch}; at least 1 is needed", code="config.wrong_value")
    options = checked_options("chat_template_kwargs", chat_template_kwargs)
    file, form = None if out is None else Path(out), PromptFormat(chat, system, template, options)
    if file is not None:
        _refuse_output(file, overwrite)
    models = find_models(model, None, adapter, target, config)
    refuse_unusable(models[0], template, sampling)
    if file is None:
        return _generate(models, queue, batch, form, sampling, processes, None, say)
    contents = [None if item is None else item.identity() for item in models]
    key = [
        contents,
        chat,
        system,
        _template_text(template),
        asdict(sampling),
        [asdict(item) for item in queue],
    ]
    key += [options] if options else []
    with only_writer(file, DataError):
        _refuse_output(file, overwrite)  # another process may have finished it since
        part = file.with_name(f".{file.name}.{_digest(key)}.part")
        part.touch()
        records = _generate(models, queue, batch, form, sampling, processes, part, say)
        part.replace(file)
        for stale_file in file.parent.glob(f".{glob.escape(file.name)}.{'[0-9a-f]' * 12}.part"):
            stale_file.unlink(
                missing_ok=True
            )  # begun with other settings or another model, and interrupted
    return records


def _generate(
    models: Models,
    queue: Sequence[Prompt],
    batch: int,
    form: PromptFormat,
    sampling: Sampling,
    processes: int | None,
    part: Path | None,
    say: Say,
) -> list[dict[str, Any]]:
    """The records of all prompts; those in the partial file are not made again, new ones are added
    to it.
    """
    records = [] if part is None else _resume(part, batch)
    if len(records) < len(queue):
        with _load(models, processes, say) as ready:
            for new_records in _answers(ready, queue, len(records), batch, form, sampling, say):
                records += new_records
                if part is not None:
                    with part.open("a", encoding="utf-8") as lines:
                        lines.writelines(
                            json.dumps(record, ensure_ascii=False) + "\n" for record in new_records
                        )
                    say(f"{len(records)} of {len(queue)} prompts")
    return records


def _template_text(template: str | Path | None) -> str | None:
    """The chat template's text, or the word as it is if there is no such file, which is refused
    later.
    """
    if template is None:
        return None
    try:
        return read_whole(Path(template))
    except (OSError, ValueError):
        return str(template)


def _answers(
    ready: LoadedModel,
    queue: Sequence[Prompt],
    record_count: int,
    batch: int,
    form: PromptFormat,
    sampling: Sampling,
    say: Say,
) -> Iterator[list[dict[str, Any]]]:
    """The records of each batch, after the first `record_count` prompts."""
    from smtrain.worker.generation.generating import (
        complete,
    )  # torch, only after everything else was checked

    ids = _encode_prompts(ready, queue, form, sampling, say)
    for start in range(record_count, len(queue), batch):
        batch_prompts = queue[start : start + batch]
        numbers = (
            f"{start + 1}"
            if len(batch_prompts) == 1
            else f"{start + 1} to {start + len(batch_prompts)}"
        )
        with spinner(f"writing {numbers} of {len(queue)} texts"):
            texts = complete(ready, ids[start : start + batch], sampling)
        yield [
            {**(prompt.record or {"prompt": prompt.text}), "completion": text}
            for prompt, text in zip(batch_prompts, texts, strict=True)
        ]


@contextmanager
def _load(models: Models, processes: int | None, say: Say) -> Iterator[LoadedModel]:
    """The model, whose processes end with the block."""
    _, ready = load_models(models, processes, say)
    try:
        yield ready
    finally:
        ready.close()


def _encode_prompts(
    model: LoadedModel, prompts: Sequence[Prompt], form: PromptFormat, sampling: Sampling, say: Say
) -> list[Any]:
    """Ids of all prompts, so that an invalid one is reported before the first is answered; prints
    missing fields.
    """
    from smtrain.worker.data.read.ignored_fields import IgnoredText, ignored_text_sentence
    from smtrain.worker.generation.conversation import (
        encode_conversation,
        ignored_in,
        record_options,
        set_template,
        unwritten_parts,
    )
    from smtrain.worker.generation.generating import encode_prompt, refuse_overlong

    if form.chat or any(prompt.messages for prompt in prompts):
        set_template(model, None if form.template is None else Path(form.template), form.options)
        if ignored_notice := ignored_in(model):
            say(ignored_notice)
    all_ids, unread_text, with_double_bos = [], IgnoredText(), 0
    for number, prompt in enumerate(prompts, start=1):
        if messages := _messages_of(prompt, form):
            options = record_options(prompt.record, number)
            all_ids.append(
                encode_conversation(model, messages, sampling.max_new_tokens, options)[0]
            )
            unread_text.count(unwritten_parts(model, messages, options))
        else:
            all_ids.append(encode_prompt(model, prompt.text, special=True))
            refuse_overlong(model, all_ids[-1], sampling)
            unread_text.count(field for field, _ in record_options(prompt.record, number).values())
            with_double_bos += all_ids[-1][0, :2].tolist() == [model.tokenizer.bos_token_id] * 2
    if unread_text:
        say(
            f"{ignored_text_sentence(unread_text)}; the chat template does not write it, or no chat"
            " template is used"
        )
    if with_double_bos:
        bos = model.tokenizer.bos_token
        say(
            f"{with_double_bos} prompts begin with {bos}, which the tokenizer adds once more; leave"
            " it out of the prompts"
        )
    return all_ids


def _messages_of(prompt: Prompt, form: PromptFormat) -> list[dict[str, str]]:
    """The conversation to answer; empty if text is to be continued."""
    messages = list(prompt.messages) or (
        [{"role": "user", "content": prompt.text}] if form.chat else []
    )
    if form.system and messages and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": form.system})
    return messages


def _refuse_output(file: Path, overwrite: bool) -> None:
    """Raise `DataError` for a file that cannot be written, or must not be replaced."""
    if file.is_dir():
        raise DataError(f"{file} is a folder; name a file to write")
    if file.exists() and not overwrite:
        raise DataError(
            f"{file} is there already; name another file, or replace it with --overwrite"
            " (overwrite=True)"
        )
    if not file.parent.is_dir():
        raise DataError(f"{file.parent} is not a folder; make it, or name another file")


def _digest(settings: list[Any]) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


def _resume(part: Path, batch: int) -> list[dict[str, Any]]:
    """The whole batches that an interrupted call left in the partial file; the rest of it is cut
    off.
    """
    records: list[dict[str, Any]] = []
    lines: list[bytes] = []
    for line in part.read_bytes().splitlines(keepends=True):
        try:
            record = parse_json(line)
        except ValueError:
            break  # cut off when the earlier call was killed
        if not line.endswith(b"\n"):
            break
        if not isinstance(record, dict):
            break
        records.append(record)
        lines.append(line)
    complete_records = len(records) // batch * batch  # a batch is made again whole
    part.write_bytes(b"".join(lines[:complete_records]))
    return records[:complete_records]


def one_by_one(
    model: Any,
    prompts: Sequence[Prompt],
    form: PromptFormat,
    *,
    adapter: Any,
    sampling: Sampling,
    target: TargetName | None,
    processes: int | None = None,
    config: Any = None,
    say: Say,
) -> Iterator[tuple[int, str]]:
    """(number of the prompt, piece of its text), as it comes."""
    models = find_models(model, None, adapter, target, config)
    refuse_unusable(models[0], form.template, sampling)
    with _load(models, processes, say) as ready:
        from smtrain.worker.generation.generating import stream

        for number, ids in enumerate(_encode_prompts(ready, prompts, form, sampling, say)):
            yield number, ""
            for piece in stream(ready, ids, sampling):
                yield number, piece
