"""Each command that writes files: a call that writes its output for input `a` or `b`, or the test
that covers it.

The calls take the folder of `inputs`, the letter, and the folder for the output, and replace an
earlier output.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from smtrain.cli import config, data, init
from smtrain.client.follow import curve, tensorboard
from smtrain.client.jobs import results
from smtrain.core.errors import SmtrainError
from smtrain.core.files import only_writer
from smtrain.tools.chat import terminal
from smtrain.tools.compare import picture
from smtrain.tools.doctor import diagnosis
from smtrain.tools.image import build
from smtrain.tools.image.lock import Interpreter
from smtrain.tools.report import report
from smtrain.tools.tune import tune
from smtrain.tools.tune.trials import Trial, Tuning
from smtrain.worker.data import report as data_report
from smtrain.worker.data.pack import exchange
from smtrain.worker.evaluation import evaluate
from tests.typed import typed
from tests.worker.data.writer import IndexedWriter, save_manifest

assert all((config, data, data_report, init))  # imported before the forks


def plain_tokenizer(folder: Path) -> Path:
    """A tokenizer of bytes, made without transformers, whose import takes seconds."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE({letter: number for number, letter in enumerate(alphabet)}, [])
    )
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<end>"}')
    return folder


def make_inputs(root: Path) -> None:
    """Two inputs of each kind."""
    plain_tokenizer(root / "tokenizer")
    (root / "run.yaml").write_text(
        "name: run\nmodel:\n  path: demo://tiny-llama\ndata:\n  path: demo://python-stdlib\n"
    )
    for letter, first in (("a", 1), ("b", 100)):
        folder = root / letter
        folder.mkdir()
        with IndexedWriter(folder / "tokens.bin", folder / "tokens.idx", np.uint16) as pair:
            for start in range(8):
                pair.add_document([np.arange(20, dtype=np.uint16) + start + first])
        save_manifest(folder, {"tokens": (8, 160)}, seq_len=8)
        (root / f"{letter}.jsonl").write_text(json.dumps({"text": f"text {letter} " * 9}) + "\n")


def smtrain(*words: str) -> None:
    """Run a command in this process; its error is raised."""
    done = typed(*words)
    if done.returncode:
        raise (SmtrainError if done.returncode == 2 else AssertionError)(done.stderr)


@dataclass(frozen=True)
class Drawn:
    """Stands for a figure, which takes a second to draw."""

    letter: str

    def savefig(self, file: Any, **_: object) -> None:
        content = f"picture {self.letter}".encode()
        file.write(content) if hasattr(file, "write") else Path(file).write_bytes(content)


@dataclass(frozen=True)
class Made:
    """Stands for the result of a comparison, an evaluation or a diagnosis."""

    letter: str

    def to_dict(self) -> dict[str, str]:
        return {"letter": self.letter}

    def page(self) -> str:
        return f"page {self.letter}"


def _config_set(inputs: Path, letter: str, out: Path) -> None:
    smtrain(
        "config", "set", str(out / "run.yaml"), f"train.{'seed' if letter == 'a' else 'steps'}=7"
    )


def _init(inputs: Path, letter: str, out: Path) -> None:
    model = (
        "--model",
        "demo://tiny-llama",
        "--data",
        str(inputs / f"{letter}.jsonl"),
        "--machines",
        "here",
    )
    smtrain("init", str(out / "new.yaml"), *model, "--force")


def _tune(inputs: Path, letter: str, out: Path) -> None:
    def plain(*_: object) -> Any:
        return Plain()

    class Plain:
        def model_dump(self, **_: object) -> dict[str, str]:
            return {"letter": letter}

    trials = (
        Trial(
            1, {"train.lr": letter}, "run", "job", "finished" if letter == "a" else "failed", 1.0
        ),
    )
    with (
        patch.object(tune, "with_values", plain),
        patch.object(Tuning, "plot", lambda self: Drawn(self.name)),
    ):
        tune._write_files(Tuning(letter, "loss", (), trials), None, out / "tuned")  # type: ignore[arg-type]


def _compare(inputs: Path, letter: str, out: Path) -> None:
    with (
        patch.object(picture, "draw", lambda made: Drawn(made.letter)),
        patch.object(picture, "page", lambda made: made.page()),
    ):
        picture.save(Made(letter), out / "compared")  # type: ignore[arg-type]


def _report(inputs: Path, letter: str, out: Path) -> None:
    class Account(Made):
        name, jobs = letter, ()

    with (
        patch.object(report, "gather", lambda *_: Account(letter)),
        patch.object(report, "page", lambda account, _: f"{report._MARK} {account.name}"),
    ):
        report.report("run", out / "run.html")


def _tensorboard(inputs: Path, letter: str, out: Path) -> None:
    class Events:
        def __init__(self, folder: Path) -> None:
            (folder / f"events.out.tfevents.{letter}").write_text(letter)

        def close(self) -> None:
            pass

    with (
        patch.object(tensorboard, "EventFiles", Events),
        patch.object(tensorboard, "_read", lambda *_: 1),
    ):
        tensorboard.write([], "run", out / "events")


def _download(inputs: Path, letter: str, out: Path) -> None:
    names = ("model-1.safetensors", "model-2.safetensors", f"{letter}.json")
    bodies = {f"m/{name}": f"{name} of {letter}".encode() for name in names}

    class Store:
        def listing(self, uri: str) -> list[dict[str, Any]]:
            tags = {key: hashlib.md5(body).hexdigest() for key, body in bodies.items()}
            return [
                {"Key": key, "Size": len(bodies[key]), "ETag": tag} for key, tag in tags.items()
            ]

        def fetch(self, bucket: str, key: str, path: Path) -> None:
            path.write_bytes(bodies[key])

    class Job:
        name, target = "job", Store()

        def describe(self) -> dict[str, str]:
            return {}

    with patch.object(results, "parts", lambda *_: [results.ResultPart("s3://bucket/m/")]):
        results.fetch(Job(), out / "model", "model", overwrite=True)  # type: ignore[arg-type]


def _demo(inputs: Path, letter: str, out: Path) -> None:
    with patch.object(curve, "draw", lambda records, title: Drawn(title)):
        curve.save_curve([], out / "demo/loss.png", letter)


def _chat(inputs: Path, letter: str, out: Path) -> None:
    terminal.Terminal(Made(letter))._save(str(out / "talk.json"))  # type: ignore[arg-type]


def _evaluate(inputs: Path, letter: str, out: Path) -> None:
    place = out / "judged"
    drawn = patch.object(
        evaluate, "pictures", lambda made: {f"needle-{made['letter']}": made["letter"]}
    )
    with only_writer(place / "evaluation.json", SmtrainError), drawn:  # as the command does
        evaluate.save(Made(letter).to_dict(), place, with_pictures=True)


def _doctor(inputs: Path, letter: str, out: Path) -> None:
    diagnosis.write(Made(letter), None, out / "doctor.json")  # type: ignore[arg-type]


def _image_build(inputs: Path, letter: str, out: Path) -> None:
    def download(lock: Path, interpreter: Interpreter, folder: Path) -> None:
        folder.mkdir()
        (folder / f"{letter}.whl").write_text(letter)

    unread = ("some-package",) if letter == "a" else ()
    recipe = build.Recipe(letter, "", Interpreter("3.12.0", "x86_64"), (), f"{letter}==1\n", unread)
    with patch.object(build, "download", download):
        recipe.write(out / "context", lambda *_, **__: None)


def _export(inputs: Path, letter: str, out: Path) -> None:
    exchange.export_blocks(inputs / letter, out / "blocks", 8)


def _import(inputs: Path, letter: str, out: Path) -> None:
    exchange.import_tokens(
        inputs / letter / "tokens", out / "tokens", inputs / "tokenizer", 8, overwrite=True
    )


def _merge(inputs: Path, letter: str, out: Path) -> None:
    pair = inputs / letter / "tokens"
    exchange.merge([pair, pair], out / "merged", [pair], overwrite=True)


def _split(inputs: Path, letter: str, out: Path) -> None:
    exchange.split(inputs / letter / "tokens", out / "part", [1, 1], overwrite=True)


def _data_report(inputs: Path, letter: str, out: Path) -> None:
    smtrain(
        "data",
        "report",
        str(inputs / f"{letter}.jsonl"),
        "--out",
        str(out / "page.html"),
        "--overwrite",
    )


CALLS: dict[str, Callable[[Path, str, Path], None]] = {
    "init": _init,
    "config set": _config_set,
    "tune": _tune,
    "compare": _compare,
    "report": _report,
    "tensorboard": _tensorboard,
    "download": _download,
    "demo": _demo,
    "chat": _chat,
    "evaluate": _evaluate,
    "doctor": _doctor,
    "image build": _image_build,
    "data export": _export,
    "data import": _import,
    "data merge": _merge,
    "data split": _split,
    "data report": _data_report,
}
COVERED = {
    "run": "tests/client/launch/test_submit.py",
    "launch": "tests/client/launch/test_submit.py",
    "generate": "tests/tools/chat/test_chat.py",
    "convert": "tests/worker/checkpoint/test_staging.py",
    "data prepare": "tests/worker/data/prepare/test_prepare.py",
    "data inspect": "tests/cli/test_data.py",
}
"""Commands that write, and the test of two at once or of a kill; a picture is one file."""
NO_FILES = {
    "plan",
    "check",
    "iam policy",
    "pipeline",
    "list",
    "status",
    "logs",
    "stop",
    "serve",
    "push",
    "register",
    "deploy",
    "undeploy",
    "checkpoint inspect",
    "checkpoint diff",
    "checkpoint verify",
    "image verify",
    "image pull",
    "image tiny",
    "images",
    "config schema",
    "help",
    "config show",
    "cluster template",
    "cluster network",
    "cluster post-install",
    "cluster clean",
    "pool extend",
    "pool list",
    "pool release",
    "local status",
    "local env",
    "local stop",
    "local clean",
}
"""Commands that print, delete, or change something outside of this machine's files."""
DESTINATIONS = {"out", "output", "folder", "file", "context", "page", "png", "download"}
"""Names of the parameters that name a place to write."""
