"""Chat on a real terminal, through a pipe, from Python, and with a model in S3."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import smtrain
from smtrain.core.errors import CheckpointError, ConfigError, DataError, JobError
from smtrain.tools.chat.conversation import Conversation
from smtrain.worker.checkpoint.adapter import BASE
from smtrain.worker.checkpoint.digest import weights_digest
from smtrain.worker.checkpoint.open import open_weights
from smtrain.worker.evaluation.evaluate import evaluate
from smtrain.worker.evaluation.harness import EvaluationRequest
from tests import warm
from tests.core.model.test_generate import make
from tests.processes import read
from tests.worker.generation.test_generating import TEMPLATE

GREEDY: dict[str, Any] = {"temperature": 0, "max_new_tokens": 6}


@pytest.fixture(scope="module")
def other(folder: Path) -> Path:
    """The same model, trained to say something else."""
    made = make(folder.parent / "trained", "llama")
    (made / "chat_template.jinja").write_text(TEMPLATE)
    model = AutoModelForCausalLM.from_pretrained(made)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(-1)
    model.save_pretrained(made)
    return made


class Terminal:
    """A command on a terminal, and its output so far."""

    def __init__(self, *arguments: str, columns: int = 80, **environment: str) -> None:
        self._parent, child = pty.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.text = ""

        def own_terminal() -> None:
            os.setsid()
            signal.signal(
                signal.SIGINT, signal.SIG_DFL
            )  # what starts the tests in the background ignores it
            fcntl.ioctl(child, termios.TIOCSCTTY, 0)  # or Ctrl-C would reach no process

        self.process = subprocess.Popen(
            [sys.executable, "-m", "smtrain", *arguments],
            stdin=child,
            stdout=child,
            stderr=child,
            close_fds=True,
            env={**os.environ, "TERM": "xterm-256color", **environment},
            preexec_fn=own_terminal,
        )
        os.close(child)

    def until(self, word: str, patience: float = 120) -> str:
        """The output before a word; output and word are consumed."""
        end = time.monotonic() + patience
        while word not in self.text:
            assert time.monotonic() < end, f"no {word!r} in {self.text!r}"
            self._read()
        output, _, self.text = self.text.partition(word)
        return output

    def _read(self) -> None:
        if select.select([self._parent], [], [], 0.2)[0]:
            try:
                self.text += (
                    os.read(self._parent, 1 << 16).decode("utf-8", "replace").replace("\r\n", "\n")
                )
            except OSError:
                raise AssertionError(f"it ended: {self.text!r}") from None

    def prompt(self, mark: str = "> ") -> str:
        """The output before the next prompt, which is alone on its line: answers may hold the same
        characters.
        """
        alone = re.compile(rf"(?:^|[\n\r])(?:\x1b\[\?2004h)?{re.escape(mark)}$")
        end = time.monotonic() + 120
        while not alone.search(self.text):
            assert time.monotonic() < end, f"no prompt in {self.text!r}"
            self._read()
        output, self.text = self.text, ""
        return output

    def type(self, text: str) -> None:
        os.write(self._parent, text.encode())

    def interrupt(self) -> None:
        """Ctrl-C at a prompt, once the program waits there: Python loses one that comes between
        prompt and wait.
        """
        while (status := read(self.process.pid, "stat")) and status.rpartition(b")")[2].split()[
            0
        ] != b"S":
            time.sleep(0.01)
        self.type("\x03")

    def close(self) -> None:
        """End what still runs."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(60)

    def ended(self) -> int:
        """Exit status."""
        while True:
            assert select.select([self._parent], [], [], 60)[0], f"it does not end: {self.text!r}"
            try:
                piece = os.read(self._parent, 1 << 16)
            except OSError:
                break
            if not piece:
                break
            self.text += piece.decode("utf-8", "replace")
        os.close(self._parent)
        return self.process.wait(60)


@pytest.fixture
def terminal() -> Iterator[Callable[..., Terminal]]:
    """Starts commands on terminals, which end with the test."""
    with contextlib.ExitStack() as open_ones:

        def start(*arguments: str, **settings: Any) -> Terminal:
            return open_ones.enter_context(contextlib.closing(Terminal(*arguments, **settings)))

        yield start


def test_a_conversation_on_a_terminal(
    terminal: Callable[..., Terminal], folder: Path, tmp_path: Path
) -> None:
    saved = tmp_path / "talk.json"
    arguments = ("--max-new-tokens", "8", "--seed", "1", "--turns", "1")
    at = terminal("chat", str(folder), *arguments, columns=300)  # no sentence is wrapped
    at.prompt()
    at.type("one\n")
    at.prompt()
    at.type("/retry\n")
    at.prompt()
    at.type("/system be brief\n")
    at.prompt()
    at.type("/sing\n")
    assert "there is no command /sing" in at.prompt()
    at.type("/help\n")
    assert "/retry" in at.prompt()
    at.type("two \\\n")
    at.prompt(". ")
    at.type("lines\n")
    at.prompt()
    for _ in range(2):
        at.type(f"/save {saved}\n")
        lines = at.prompt()
    assert "is there already" in lines
    at.interrupt()
    assert "again leaves" in at.prompt()
    at.type("/clear\n")
    at.prompt()
    at.type("/retry\n")
    assert "nothing has been asked yet" in at.prompt()
    at.type("/quit\n")
    assert at.ended() == 0
    messages = json.loads(saved.read_text())["messages"]
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert [m["content"] for m in messages if m["role"] == "user"] == ["one", "two \nlines"]


@pytest.mark.full
def test_ctrl_c_stops_the_answer_and_not_the_program(
    terminal: Callable[..., Terminal], folder: Path, tmp_path: Path
) -> None:
    model = make(tmp_path / "long", "llama")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 100_000}))
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": None}))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    at = terminal("chat", str(model), "--max-new-tokens", "50000", "--temperature", "3")
    at.prompt()
    at.type("more\n")
    at.until("more\n")
    while len(at.text) < 20:
        time.sleep(0.05)
        at.text += os.read(at._parent, 1 << 16).decode("utf-8", "replace")
    at.type("\x03")
    at.until("(stopped)")
    at.prompt()
    at.type(f"/save {tmp_path / 'talk.json'}\n")
    at.prompt()
    at.interrupt()
    at.until("again leaves")
    at.prompt()
    at.interrupt()
    assert at.ended() == 0
    kept = json.loads((tmp_path / "talk.json").read_text())["messages"]
    assert len(kept) == 2
    assert len(kept[1]["content"]) >= 10


@pytest.mark.full
def test_a_pipe_gets_answers_alone(folder: Path, other: Path) -> None:
    done = subprocess.run(
        [
            warm.smtrain(),
            "chat",
            str(other),
            "--compare",
            str(folder),
            "--max-new-tokens",
            "4",
            "--temperature",
            "0",
        ],
        input="one\ntwo\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("base:") == done.stdout.count("trained:") == 2
    assert "> " not in done.stdout
    assert "\x1b" not in done.stdout + done.stderr


def test_two_models_answer_each_in_its_own_conversation(folder: Path, other: Path) -> None:
    talk = smtrain.chat(other, compare=folder, **GREEDY)
    assert repr(talk) == f"<a conversation with {' and '.join(talk.names)}: ask(TEXT) answers>"
    answers = talk.ask("hello")
    assert isinstance(answers, dict)
    assert answers["base"] != answers["trained"]
    assert answers["base"] == smtrain.chat(folder, **GREEDY).ask("hello")
    talk.ask("again")
    held = talk.to_dict()["answers"]
    assert held["base"][1]["content"] == answers["base"]
    assert held["trained"][1]["content"] == answers["trained"]


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft asks transformers 5 by an older name
def test_an_adapter_is_compared_with_its_base_in_one_copy_of_the_weights(
    folder: Path, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    options: dict[str, Any] = {
        "r": 8,
        "lora_alpha": 512,
        "init_lora_weights": False,
        "task_type": "CAUSAL_LM",
    }
    config = peft.LoraConfig(target_modules=["q_proj", "o_proj", "down_proj"], **options)
    model: Any = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config)
    model.save_pretrained(tmp_path / "adapter")
    alone = smtrain.chat(tmp_path / "adapter", **GREEDY)  # its config names the base
    talk = smtrain.chat(tmp_path / "adapter", compare=folder, **GREEDY)
    answers: Any = talk.ask("hello")
    assert talk._speakers[0].model is talk._speakers[1].model
    assert answers["trained"] == alone.ask("hello") != answers["base"]
    assert answers["base"] == smtrain.chat(folder, **GREEDY).ask("hello")
    with pytest.raises(CheckpointError, match="is not an adapter"):
        smtrain.chat(folder, adapter=folder, **GREEDY)
    wrong = make(tmp_path / "wrong", "gpt_neox")
    with pytest.raises(CheckpointError, match="is not an adapter for the model in"):
        smtrain.chat(wrong, adapter=tmp_path / "adapter", **GREEDY)
    narrow = make(tmp_path / "narrow", "llama")
    smaller: Any = AutoConfig.from_pretrained(narrow)
    smaller.intermediate_size //= 2
    AutoModelForCausalLM.from_config(smaller).save_pretrained(narrow)
    with pytest.raises(CheckpointError, match="its factors have the shapes of another model's"):
        smtrain.chat(narrow, adapter=tmp_path / "adapter", **GREEDY)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft asks transformers 5 by an older name
def test_an_adapter_of_ours_is_put_on_the_weights_alone_that_it_was_trained_on(
    folder: Path, other: Path, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    model: Any = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config)
    model.save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter/adapter_model.safetensors"
    save_file(
        load_file(file), file, metadata={"format": "pt", BASE: weights_digest(open_weights(folder))}
    )
    assert smtrain.chat(folder, adapter=tmp_path / "adapter", **GREEDY).ask("hello")
    with pytest.raises(
        CheckpointError,
        match=r"was trained on other weights than those in .*trained; name the model",
    ):
        smtrain.chat(other, adapter=tmp_path / "adapter", **GREEDY)
    with pytest.raises(CheckpointError, match="was trained on other weights"):
        evaluate(tmp_path / "adapter", other, EvaluationRequest(("any",)), under=other)
    file.unlink()
    with pytest.raises(
        CheckpointError,
        match=r"has adapter_config.json and no adapter_model.safetensors; copy that",
    ):
        smtrain.chat(folder, adapter=tmp_path / "adapter", **GREEDY)


def test_a_record_of_messages_is_shown_by_its_question(folder: Path, tmp_path: Path) -> None:
    records = [{"messages": [{"role": "user", "content": "what?"}]}, {"instruction": "and this"}]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    more = ("--max-new-tokens", "2", "--stop", "never there")
    for how in ((), ("--stream",)):
        done = subprocess.run(
            [warm.smtrain(), "generate", str(folder), str(tmp_path / "p.jsonl"), *more, *how],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("> what?\n")
        assert "\n> and this" in done.stdout
        assert "deprecated" not in done.stderr


def test_prompts_from_files_go_on_where_they_were(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    (tmp_path / "b.jsonl").write_text(
        '{"id": 7, "question": "three"}\n{"messages": [{"role": "user", "content": "x"}]}\n'
    )
    out = tmp_path / "out.jsonl"
    files = [tmp_path / "a.txt", tmp_path / "b.jsonl"]
    whole = smtrain.generate(folder, files=files, out=out, max_new_tokens=4)
    assert [json.loads(line) for line in out.read_text().splitlines()] == whole
    assert [record["completion"] != "" for record in whole] == [True] * 4
    assert whole[2]["id"] == 7
    with pytest.raises(DataError, match="is there already"):
        smtrain.generate(folder, files=files, out=out, max_new_tokens=4)
    lines, second = list[str](), tmp_path / "second.jsonl"
    with pytest.raises(RuntimeError):
        smtrain.generate(
            folder, files=files, out=second, max_new_tokens=4, say=_ends_after(lines, 2)
        )
    assert not second.exists()
    lines.clear()
    again = smtrain.generate(folder, files=files, out=second, max_new_tokens=4, say=lines.append)
    assert again == whole
    assert lines == ["3 of 4 prompts", "4 of 4 prompts"]


def test_an_interrupted_file_is_not_resumed_with_another_model_or_template(
    folder: Path, tmp_path: Path
) -> None:
    model, out = tmp_path / "model", tmp_path / "out.jsonl"
    shutil.copytree(folder, model)
    template = tmp_path / "template"
    prompts = ["one", "two", "three"]

    def begin(template_text: str) -> Any:
        template.write_text(template_text)
        options: dict[str, Any] = {
            "chat": True,
            "template": template,
            "batch": 1,
            "max_new_tokens": 4,
        }
        with pytest.raises(RuntimeError):
            smtrain.generate(model, prompts, out=out, say=_ends_after([], 1), **options)
        return options

    options = begin("{% for m in messages %}{{ m.content }}{% endfor %}")
    lines = list[str]()
    smtrain.generate(model, prompts, out=out, say=lines.append, **options)
    assert lines == ["2 of 3 prompts", "3 of 3 prompts"]
    out.unlink()
    begin("{% for m in messages %}{{ m.content }}{% endfor %}")
    template.write_text("{% for m in messages %}> {{ m.content }}{% endfor %}")
    lines.clear()
    smtrain.generate(model, prompts, out=out, say=lines.append, **options)
    assert lines[0] == "1 of 3 prompts"
    out.unlink()
    begin("{% for m in messages %}{{ m.content }}{% endfor %}")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes())  # another export has another time
    lines.clear()
    smtrain.generate(model, prompts, out=out, say=lines.append, **options)
    assert lines[0] == "1 of 3 prompts"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out.jsonl", "template"]


def test_two_processes_do_not_write_one_file_of_texts(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"

    def say(_: str) -> None:
        with pytest.raises(
            DataError, match=r"out\.jsonl is being written by another process; wait"
        ):
            smtrain.generate(folder, ["one"], out=out, max_new_tokens=4)

    assert (
        len(smtrain.generate(folder, ["one", "two"], out=out, batch=1, max_new_tokens=4, say=say))
        == 2
    )
    assert len(out.read_text().splitlines()) == 2


def _ends_after(lines: list[str], count: int) -> Any:
    def say(text: str) -> None:
        lines.append(text)
        if len(lines) == count:
            raise RuntimeError("killed")

    return say


def test_batches_and_settings_reach_the_model(folder: Path) -> None:
    words = ["one", "two words", "three"]
    one_by_one = [
        record["completion"] for record in smtrain.generate(folder, words, max_new_tokens=6)
    ]
    assert [
        r["completion"] for r in smtrain.generate(folder, words, max_new_tokens=6, batch=2)
    ] == one_by_one
    drawn = [
        smtrain.generate(folder, "one", temperature=2.0, seed=seed, max_new_tokens=6)[0][
            "completion"
        ]
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    short: dict[str, Any] = {"max_new_tokens": 6}
    assert smtrain.generate(folder, "one", chat=True, **short) != smtrain.generate(
        folder, "one", **short
    )
    stop = one_by_one[0][2]
    assert (
        smtrain.generate(folder, "one", stop=stop, max_new_tokens=6)[0]["completion"]
        == one_by_one[0].split(stop)[0]
    )


def test_what_cannot_be_is_one_sentence(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="no config"):
        smtrain.chat(tmp_path / "empty")
    with pytest.raises(CheckpointError, match="no such folder"):
        smtrain.chat(str(tmp_path / "nowhere"))
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(CheckpointError, match="is a file"):
        smtrain.chat(tmp_path / "notes.txt")
    (tmp_path / "run.yaml").write_text("name: tiny\n")
    with pytest.raises(CheckpointError, match="it is a config, whose run is tiny; name the folder"):
        smtrain.chat(tmp_path / "run.yaml")
    with pytest.raises(JobError, match="it is a config, whose run is tiny; `smtrain list` lists"):
        smtrain.Job(str(tmp_path / "run.yaml"))
    with pytest.raises(ConfigError, match="warmth: is not a generation setting"):
        smtrain.chat(folder, warmth=1)
    for setting, words in (
        ({"max_new_tokens": "many"}, "max_new_tokens: got 'many'; .* takes a whole number"),
        ({"temperature": [1]}, r"temperature: got \[1\]; .* takes a number"),
        ({"stop": 3}, "stop: got 3; .* takes a list of text"),
    ):
        with pytest.raises(ConfigError, match=words):
            smtrain.generate(folder, "one", **setting)
    with pytest.raises(ConfigError, match="turns: got -1"):
        smtrain.chat(folder, turns=-1)
    with pytest.raises(DataError, match="there are no prompts"):
        smtrain.generate(folder)
    (tmp_path / "bad.jsonl").write_text('{"txt": 1}\n')
    with pytest.raises(DataError, match=r"bad\.jsonl:1: has no prompt"):
        smtrain.generate(folder, files=[tmp_path / "bad.jsonl"])
    (weightless := tmp_path / "weightless").mkdir()  # to load it would fail otherwise
    for name in ("config.json", "tokenizer.json"):
        (weightless / name).write_bytes((folder / name).read_bytes())
    (weightless / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ConfigError, match=r"max_new_tokens: got 100,000.* set at most "):
        smtrain.generate(weightless, "one", max_new_tokens=100_000)
    for ask in (smtrain.chat, partial(smtrain.generate, prompts="one")):
        with pytest.raises(CheckpointError, match="nowhere cannot be read as a chat template"):
            ask(weightless, template=tmp_path / "nowhere")
    plain = make(tmp_path / "plain", "llama")
    with pytest.raises(CheckpointError, match="has no chat template"):
        smtrain.chat(plain)


@pytest.mark.parametrize(
    "command", [("chat",), ("evaluate", "--tasks", "mmlu")], ids=["chat", "evaluate"]
)
def test_a_model_that_memory_does_not_hold_is_refused_before_it_is_loaded(
    command: tuple[str, ...], folder: Path, tmp_path: Path
) -> None:
    large = tmp_path / "large"
    large.mkdir()
    (large / "config.json").write_bytes((folder / "config.json").read_bytes())
    with (large / "model.safetensors").open("wb") as weights:
        weights.truncate(2_000 * 2**30)
    done = subprocess.run(
        [warm.smtrain(), *command, str(large)],
        input="",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert f"this takes 2000.6 GiB of memory ({large} 2000.0 GiB of weights" in done.stderr
    assert done.stderr.count("\n") == 2, "the work of the command, then the sentence"
    assert f"stage {'generate' if command == ('chat',) else 'evaluate'} of a run" in done.stderr


def test_a_run_a_job_and_a_prefix_answer_too(local_home: Path, folder: Path) -> None:
    from smtrain.client.backends.sagemaker.backend import SageMakerBackend

    target = SageMakerBackend("local")
    target.s3.create_bucket(
        Bucket="talks", CreateBucketConfiguration={"LocationConstraint": "us-west-2"}
    )
    for path in folder.iterdir():
        target.s3.upload_file(str(path), "talks", f"models/tiny/{path.name}")
    expected = smtrain.chat(folder, **GREEDY).ask("hello")
    for _ in range(2):  # the second time it is here
        assert (
            smtrain.chat("s3://talks/models/tiny", target="local", **GREEDY).ask("hello")
            == expected
        )
    with pytest.raises(CheckpointError, match="is empty"):
        smtrain.chat("s3://talks/models/tin", target="local")
    with pytest.raises(JobError, match="no run or job of this name here"):
        smtrain.chat("no-such-run", target="local")


@pytest.mark.full  # test_ctrl_c_stops_the_answer_and_not_the_program ends one in the gate
def test_killing_a_chat_leaves_nothing_behind(
    terminal: Callable[..., Terminal], folder: Path
) -> None:
    at = terminal("chat", str(folder))
    at.prompt()
    at.process.send_signal(signal.SIGTERM)
    assert at.ended() in (-signal.SIGTERM, 143)


def test_turns_limit_what_is_remembered() -> None:
    talk = Conversation(turns=1)
    for word in ("one", "two"):
        talk.add(word, "yes")
    assert [m["content"] for m in talk.with_question("three")] == ["two", "yes", "three"]
    assert [
        m["content"] for m in Conversation(turns=0, messages=talk.messages).with_question("three")
    ] == ["three"]
    assert talk.take_back() == "two"
    assert [m["content"] for m in talk.messages] == ["one", "yes"]
