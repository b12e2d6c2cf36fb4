"""`demo://` inputs: the source of Python's standard library as text, questions that its
documentation answers, a small Llama with a tokenizer and a chat template, and SmolLM2-135M.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from smtrain.core.demo import smollm2
from smtrain.core.demo.documentation import documentation
from smtrain.core.errors import ConfigError
from smtrain.core.files import home
from smtrain.core.spinner import spinner
from smtrain.core.suggest import hint
from smtrain.core.text import Say

TEXT, QUESTIONS, HELP = "demo://python-stdlib", "demo://python-questions", "demo://python-help"
MODEL, SMOLLM2 = "demo://tiny-llama", "demo://smollm2"
TEXTS, MODELS = (TEXT, QUESTIONS, HELP), (MODEL, SMOLLM2)
VOCABULARY = 512
END = "<|endoftext|>"
# Alpaca's headings, which need no special tokens; the end of text ends an answer
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}### Response:\n{{ m.content }}{{ eos_token }}"
    "{% elif m.role == 'user' %}### Instruction:\n{{ m.content }}\n\n"
    "{% else %}{{ m.content }}\n\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}### Response:\n{% endif %}"
)
# 9.4 M parameters: 8 layers of 8 query and 4 key-value heads. The usual initializer_range of 0.02
# stays at the frequencies of single tokens for the 100 steps that the demo has; 1/sqrt(hidden_size)
# gets beyond them.
LLAMA: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 320,
    "intermediate_size": 864,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "initializer_range": 0.05,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def materialise(uri: str, say: Say = lambda _: None) -> Path:
    """The folder of a demo:// URI, made on first use below $SMTRAIN_HOME/demo.

    Raises `ConfigError` for an unknown name, and `UnavailableError` if it cannot be fetched.
    """
    makers: dict[str, Callable[[Path], None]] = {
        TEXT: _write_text,
        QUESTIONS: _write_questions,
        HELP: _write_help,
        MODEL: _write_model,
        SMOLLM2: lambda folder: smollm2.write(folder, say),
    }
    if uri not in makers:
        raise ConfigError(
            f"{uri}: no such demo input; there are {', '.join(makers)}", code="config.wrong_value"
        )
    folder = home() / "demo" / uri.removeprefix("demo://")
    if not folder.is_dir():
        part = folder.with_name(f".{folder.name}.{os.getpid()}")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        try:
            with spinner(f"making {uri}"):
                makers[uri](part)
            part.rename(folder)
        except OSError:
            if (
                not folder.is_dir()
            ):  # else another process made it meanwhile; its content is the same
                raise
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return folder


def demo_fault(uri: str, names: Sequence[str]) -> str | None:
    """The fault of a demo:// URI that must be one of TEXTS or MODELS; None if it is."""
    if not uri.startswith("demo://") or uri in names:
        return None
    kind = "model" if names == MODELS else "text"
    return f"{uri} is not a demo {kind}; {hint(uri, names)}"


def demo_config(uri: str = MODEL) -> dict[str, Any] | None:
    """The config.json of a demo:// model, which need not exist yet; None for other URIs."""
    return {MODEL: {"model_type": "llama", **LLAMA}, SMOLLM2: smollm2.CONFIG}.get(uri)


def _write_text(folder: Path) -> None:
    """One JSON line per source file of the standard library, without its tests."""
    library = Path(sysconfig.get_paths()["stdlib"])
    skipped_folders = {
        "test",
        "tests",
        "idle_test",
        "site-packages",
        "dist-packages",
        "lib2to3",
        "__pycache__",
    }
    with (folder / "python-stdlib.jsonl").open("w", encoding="utf-8") as out:
        for path in sorted(library.rglob("*.py")):
            if skipped_folders.isdisjoint(path.relative_to(library).parts):
                text = path.read_text("utf-8", errors="replace")
                out.write(
                    json.dumps({"path": path.relative_to(library).as_posix(), "text": text}) + "\n"
                )


def _write_questions(folder: Path) -> None:
    """The purpose of each function and class of the library's top modules, in Alpaca's format."""
    library = Path(sysconfig.get_paths()["stdlib"])
    with (folder / "questions.jsonl").open("w", encoding="utf-8") as out:
        for path in sorted(library.glob("*.py")):
            try:
                tree = ast.parse(path.read_text("utf-8", errors="replace"))
            except SyntaxError:
                continue
            for node in tree.body:
                if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and (
                    docstring := ast.get_docstring(node)
                ):
                    kind = "class" if isinstance(node, ast.ClassDef) else "function"
                    question = f"What is the {kind} {path.stem}.{node.name} for?"
                    out.write(
                        json.dumps({"instruction": question, "output": docstring.split("\n\n")[0]})
                        + "\n"
                    )


def _write_help(folder: Path) -> None:
    """The documentation on this machine, in Alpaca's format."""
    with (folder / "help.jsonl").open("w", encoding="utf-8") as out:
        out.writelines(json.dumps(record) + "\n" for record in documentation())


def _write_model(folder: Path) -> None:
    """A byte-level BPE tokenizer trained on the text, and a Llama with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    with (materialise(TEXT) / "python-stdlib.jsonl").open(encoding="utf-8") as lines:
        save_tokenizer(
            (json.loads(line)["text"] for line in lines), folder, vocabulary=VOCABULARY, end=END
        )
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, "utf-8")
    quiet: Any = logging.disable_progress_bar
    quiet()
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**LLAMA)).save_pretrained(folder)


def save_tokenizer(documents: Iterable[str], folder: Path, *, vocabulary: int, end: str) -> None:
    """Train a byte-level BPE on `documents` and save it as transformers does; `end` (id 0) ends a
    document.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[end],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer_class: Any = PreTrainedTokenizerFast  # transformers has no types here
    tokenizer_class(tokenizer_object=tokenizer, eos_token=end, bos_token=end).save_pretrained(
        folder
    )
