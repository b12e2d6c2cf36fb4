"""`smtrain.generate`: texts for many prompts, with a model that is loaded here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from smtrain.core.doing import doing
from smtrain.core.errors import ConfigError, DataError
from smtrain.core.extras import collector_paused
from smtrain.core.facts.sagemaker import TargetName
from smtrain.core.public import public
from smtrain.core.text import Say
from smtrain.tools.chat.chat import chosen, known_settings
from smtrain.tools.chat.prompts import Prompt, read_prompts
from smtrain.worker.generation.memory_fit import refuse_too_large
from smtrain.worker.generation.sampling import Sampling

if TYPE_CHECKING:
    from smtrain.worker.generation.load import Loaded


@public
def generate(
    model: Any, prompts: str | Path | Sequence[str] = (), *, files: Sequence[str | Path] = (),
    out: str | Path | None = None, overwrite: bool = False, batch: int = 1, chat: bool = False,
    system: str | None = None, adapter: Any = None, template: str | Path | None = None,
    sampling: Sampling | None = None, target: TargetName | None = None, say: Say = lambda _: None, **settings: Any,
) -> list[dict[str, Any]]:  # fmt: skip
    """What a model makes of prompts: one record each, with `completion` beside what its file said.

    Greedy unless a temperature is set. With `batch` 1 a text depends on its prompt and the seed alone.

    Args:
        model: A Hugging Face folder or an adapter as PEFT writes it, a run or job or the name of one, an s3:// prefix.
        prompts: A prompt, or several.
        files: Files of prompts: .txt, a line each, or .jsonl, with the field prompt, messages, instruction, question
            or text.
        out: JSON lines to write; the same call goes on where an earlier one was interrupted.
        overwrite: Replace a file `out` that is there.
        batch: Prompts that the model takes at a time.
        chat: Ask in the model's chat template instead of continuing text; records with messages always do.
        system: The system prompt, with `chat`.
        adapter: An adapter's folder, run or s3:// prefix, put on `model` without merging.
        template: File of a chat template, in place of the model's own.
        sampling: How texts are drawn. Default: greedy, 64 tokens.
        target: `local` or `aws`: where a run, job or s3:// prefix is. Default: here if it is known here, else AWS.
        say: Takes what is told meanwhile.
        **settings: Fields of `Sampling` in place of single ones: max_new_tokens, temperature, top_k, top_p, beams,
            length_penalty, stop, seed.

    Returns:
        The records, in the order of the prompts.

    Raises:
        CheckpointError: There is no model or chat template, or the memory of this machine does not hold it.
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
    asked = read_prompts(files, map(str, texts))
    if batch < 1:
        raise ConfigError([f"batch: got {batch}; at least 1 is needed"])
    file = None if out is None else Path(out)
    key = [str(model), str(adapter), chat, system, str(template), asdict(sampling), [asdict(one) for one in asked]]
    part, done = (None, []) if file is None else _begun(file, overwrite, batch, key)
    records = list(done)
    if len(done) < len(asked):
        loaded = _load(model, adapter, target, say)
        from smtrain.worker.generation.generating import complete  # brings torch: what can be refused without it was

        ids = _spelled(loaded, asked, chat, system, template, sampling)
        for start in range(len(done), len(asked), batch):
            some = asked[start : start + batch]
            with doing(f"writing {_numbered(start, len(some))} of {len(asked)} texts"):
                texts = complete(loaded, ids[start : start + batch], sampling)
            made = [
                {**(prompt.record or {"prompt": prompt.text}), "completion": text}
                for prompt, text in zip(some, texts, strict=True)
            ]
            records += made
            if part is not None:
                with part.open("a", encoding="utf-8") as lines:
                    lines.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in made)
                say(f"{len(records)} of {len(asked)} prompts")
    if part is not None and file is not None:
        part.replace(file)
    return records


def _numbered(start: int, count: int) -> str:
    return str(start + 1) if count == 1 else f"{start + 1} to {start + count}"


def _load(model: Any, adapter: Any, target: TargetName | None, say: Say) -> Loaded:
    found, _, on_top = chosen(model, None, adapter, target)
    refuse_too_large([found.need, *([on_top.need] if on_top else [])])
    with doing("importing torch and transformers"), collector_paused():
        from smtrain.worker.generation.generating import quiet
        from smtrain.worker.generation.load import load

    with doing(f"loading {found.name}"), quiet():
        return load(found.fetch(say), adapter=None if on_top is None else on_top.fetch(say))


def _spelled(
    loaded: Loaded, prompts: Sequence[Prompt], chat: bool, system: str | None, template: str | Path | None,
    sampling: Sampling,
) -> list[Any]:  # fmt: skip
    """Ids of all prompts, so that one that cannot be asked is told before the first is."""
    from smtrain.worker.generation.conversation import set_template, spelled
    from smtrain.worker.generation.generating import encoded, refuse_overlong

    if chat or any(prompt.messages for prompt in prompts):
        set_template(loaded, None if template is None else Path(template))
    found = []
    for prompt in prompts:
        if messages := _messages_of(prompt, chat, system):
            found.append(spelled(loaded, messages, sampling.max_new_tokens)[0])
        else:
            found.append(encoded(loaded, prompt.text, special=True))
            refuse_overlong(loaded, found[-1], sampling)
    return found


def _messages_of(prompt: Prompt, chat: bool, system: str | None) -> list[dict[str, str]]:
    """The conversation to answer; empty where text is to be continued."""
    said = list(prompt.messages) or ([{"role": "user", "content": prompt.text}] if chat else [])
    first = [{"role": "system", "content": system}] if system and said and said[0]["role"] != "system" else []
    return [*first, *said]


def _begun(file: Path, overwrite: bool, batch: int, settings: list[Any]) -> tuple[Path, list[dict[str, Any]]]:
    """The file that is written meanwhile, and the records that an earlier call with these settings left in it."""
    if file.is_dir():
        raise DataError(f"{file} is a folder; name a file to write")
    if file.exists() and not overwrite:
        raise DataError(f"{file} is there already; name another file, or replace it with --overwrite (overwrite=True)")
    if not file.parent.is_dir():
        raise DataError(f"{file.parent} is not a folder; make it, or name another file")
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]
    part = file.with_name(f".{file.name}.{key}.part")
    whole: list[dict[str, Any]] = []
    kept = b""
    if part.exists():
        for line in part.read_bytes().splitlines(keepends=True):
            try:
                whole.append(json.loads(line))
            except ValueError:
                break  # cut off by whatever ended the earlier call
            if not line.endswith(b"\n"):
                whole.pop()
                break
            kept += line
        if extra := len(whole) % batch:  # a batch is made again whole
            del whole[-extra:]
            kept = b"".join(kept.splitlines(keepends=True)[: len(whole)])
    part.write_bytes(kept)
    return part, whole


def one_by_one(
    model: Any, prompts: Sequence[Prompt], *, chat: bool, system: str | None, adapter: Any, template: str | None,
    sampling: Sampling, target: TargetName | None, say: Say,
) -> Iterator[tuple[int, str]]:  # fmt: skip
    """(number of the prompt, piece of its text), as it comes."""
    loaded = _load(model, adapter, target, say)
    from smtrain.worker.generation.generating import stream

    for number, ids in enumerate(_spelled(loaded, prompts, chat, system, template, sampling)):
        yield number, ""
        for piece in stream(loaded, ids, sampling):
            yield number, piece
