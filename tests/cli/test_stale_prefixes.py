"""Commands that read from a prefix, after it has got other files: the new content or one sentence,
never the old.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from smtrain.cli import evaluate
from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.client.jobs import copies
from smtrain.client.jobs.job import Job
from smtrain.client.launch.inputs import upload_all
from smtrain.client.launch.stages import Chain
from smtrain.client.planner.resolve import load_config
from smtrain.core.errors import CheckpointError
from smtrain.tools.chat.chat import find_models
from smtrain.tools.chat.resolve_model import find
from smtrain.tools.publish import push
from smtrain.worker.checkpoint import execute, tensor_files, uploading
from smtrain.worker.checkpoint.convert import convert
from smtrain.worker.checkpoint.storage import RemotePlace
from smtrain.worker.checkpoint.targets import HuggingFace, Nxd
from smtrain.worker.data import report
from smtrain.worker.data.prepare.prepare import prepare
from smtrain.worker.data.prepare_options import PrepareOptions
from tests import as_told
from tests.cli.writers import plain_tokenizer
from tests.worker.checkpoint.folders import LLAMA, hf_folder

Files = dict[str, bytes]
CHANGES = ("other files", "fewer files", "same size")


def files_of(folder: Path) -> Files:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Files]:
    """A model, and by change what replaces it."""
    root = tmp_path_factory.mktemp("models")
    config = {**LLAMA, "num_hidden_layers": 1}
    before = files_of(hf_folder(root / "before", config))
    whole = before["model.safetensors"]
    data = 8 + int.from_bytes(whole[:8], "little")
    (root / "before/generation_config.json").write_text('{"do_sample": true}')
    convert(root / "before", root / "shards", to=HuggingFace(max_shard_size=10_000))
    shards = {
        name: body for name, body in files_of(root / "shards").items() if name != "manifest.json"
    }
    return {
        "": {**before, "generation_config.json": b'{"do_sample": true}'},
        "other files": shards,
        "fewer files": before,
        "same size": {
            **before,
            "model.safetensors": whole[:data] + bytes(byte ^ 1 for byte in whole[data:]),
        },
    }


class Prefix:
    """A prefix of the local control plane's S3, or of a store in memory."""

    def __init__(self, uri: str) -> None:
        self.uri = uri

    def hold(self, files: Files) -> None:
        """Replace everything below it."""
        target, (bucket, _, prefix) = (
            SageMakerBackend("local"),
            self.uri.removeprefix("s3://").partition("/"),
        )
        for item in target.listing(self.uri):
            target.s3.delete_object(Bucket=bucket, Key=item["Key"])
        for name, body in files.items():
            target.s3.put_object(Bucket=bucket, Key=f"{prefix}{name}", Body=body)


class InMemory(Prefix):
    def hold(self, files: Files) -> None:
        memory, folder = fsspec.filesystem("memory"), self.uri.removeprefix("memory:/").rstrip("/")
        if memory.exists(folder):
            memory.rm(folder, recursive=True)
        for name, body in files.items():
            memory.pipe_file(f"{folder}/{name}", body)


@pytest.fixture
def prefix(local_home: Path) -> Iterator[Prefix]:
    target, bucket = SageMakerBackend("local"), f"stale-{time.time_ns()}"
    region = target.region_name()
    place = (
        {}
        if region == "us-east-1"
        else {"CreateBucketConfiguration": {"LocationConstraint": region}}
    )
    target.s3.create_bucket(Bucket=bucket, **place)
    yield Prefix(f"s3://{bucket}/m/")
    copies._in_use.clear()


@pytest.fixture
def in_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemory]:
    """A store in memory, whose objects have no ETag."""
    monkeypatch.setattr(RemotePlace, "version", staticmethod(lambda about: str(about["created"])))
    made = InMemory("memory://stale/m/")
    yield made
    made.hold({})


def _listed(_: str) -> None:
    pass


MODELS: dict[str, Callable[[str], Files]] = {
    "chat, generate": lambda uri: files_of(find_models(uri, None, None, "local")[0].fetch(_listed)),
    "evaluate": lambda uri: files_of(evaluate._find_model(uri, None).fetch(_listed)),
    "serve, deploy, data --model": lambda uri: files_of(find(uri, "local").fetch(_listed)),
    "push": lambda uri: {
        name: path.read_bytes()
        for name, path in push._files(find(uri, "local").fetch(_listed)).items()
    },
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("command", MODELS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_model_is_the_one_that_is_there_now(
    command: str,
    change: str,
    prefix: Prefix,
    models: dict[str, Files],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SMTRAIN_TARGET", "local")
    for content in ("", change):
        prefix.hold(models[content])
        assert MODELS[command](prefix.uri) == models[content]


@pytest.mark.parametrize("change", CHANGES)
def test_a_conversion_reads_what_is_there_now(
    change: str,
    in_memory: InMemory,
    models: dict[str, Files],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def converted(name: str) -> Files:
        convert(in_memory.uri, tmp_path / name, to=Nxd(tp=2), say=_listed)
        return {
            file: body
            for file, body in files_of(tmp_path / name).items()
            if file != "manifest.json"
        }

    in_memory.hold(models[""])
    before = converted("before")
    real, calls = tensor_files.run, list[Any]()

    def interrupted(*job: Any) -> Any:
        calls.append(job)
        if len(calls) > 5:
            raise KeyboardInterrupt
        return real(*job)

    monkeypatch.setattr(execute, "run", interrupted)
    monkeypatch.setattr("smtrain.worker.checkpoint.conversion_plan.cores_here", lambda: 1)
    with pytest.raises(KeyboardInterrupt):
        converted("again")
    in_memory.hold(models[change])
    monkeypatch.setattr(execute, "run", real)
    assert converted("again") == converted("whole")
    assert converted("again") != before


def test_a_source_that_changes_while_it_is_converted_is_refused(
    in_memory: InMemory, models: dict[str, Files], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_memory.hold(models[""])
    real = tensor_files.run

    def changing(*job: Any) -> Any:
        in_memory.hold(models["same size"])
        return real(*job)

    for module in (execute, uploading):
        monkeypatch.setattr(module, "run", changing)
    for output in (tmp_path / "out", "memory://stale-out/m"):
        with pytest.raises(
            CheckpointError, match="changed while it was being read; run the same command again"
        ):
            convert(in_memory.uri, output, to=Nxd(tp=2))
        in_memory.hold(models[""])
    assert not (tmp_path / "out").exists()
    assert not fsspec.filesystem("memory").exists("/stale-out/m")


TEXTS = {
    "": {"a.jsonl": b'{"text": "aaaa bbbb"}\n' * 9, "b.jsonl": b'{"text": "cccc"}\n' * 9},
    "other files": {"c.jsonl": b'{"text": "bbbb aaaa"}\n' * 9},
    "fewer files": {"a.jsonl": b'{"text": "aaaa bbbb"}\n' * 9},
    "same size": {"a.jsonl": b'{"text": "bbbb aaaa"}\n' * 9, "b.jsonl": b'{"text": "cccc"}\n' * 9},
}


@pytest.mark.parametrize("change", CHANGES)
def test_text_is_the_one_that_is_there_now(
    change: str, prefix: Prefix, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_told.tell(monkeypatch)
    tokenizer = plain_tokenizer(tmp_path / "tokenizer")
    for content in ("", change):
        prefix.hold(TEXTS[content])
        here = tmp_path / f"here-{content}"
        here.mkdir()
        for name, body in TEXTS[content].items():
            (here / name).write_bytes(body)
        made: list[Any] = []
        for number, source in enumerate((prefix.uri, str(here))):
            out = tmp_path / f"{content}-{number}"
            prepare(source, out, tokenizer, PrepareOptions(seq_len=8), say=_listed)
            made.append((out / "tokens.bin").read_bytes())
            made.append([one.documents for one in report.report([source], None).sources])
        assert made[:2] == made[2:]


@pytest.mark.parametrize("change", CHANGES)
def test_a_stage_that_has_read_other_files_is_named(
    change: str, prefix: Prefix, raw: dict[str, Any]
) -> None:
    def plan() -> Any:
        config = load_config({**raw, "data": {"path": prefix.uri}}, target="local")
        return Chain(config, SageMakerBackend("local")).plan("prepare")

    prefix.hold(TEXTS[""])
    before = plan()
    upload_all(SageMakerBackend("local"), list(before.uploads), _listed)
    job = Job(before.request["TrainingJobName"], SageMakerBackend("local"))
    assert plan().stale_note(job) == ""
    prefix.hold(TEXTS[change])
    assert (
        plan().stale_note(job)
        == f"; {prefix.uri} has changed since, and --again (again=True) reads the new files"
    )
    assert plan().stale_note(Job("of-an-earlier-release", SageMakerBackend("local"))) == ""
