"""Conversion from and to object stores: no local copy, and nothing appears before it is whole."""

from __future__ import annotations

import importlib.util
import itertools
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from smtrain.core.errors import CheckpointError
from smtrain.worker.checkpoint import staging, uploading
from smtrain.worker.checkpoint.convert import convert
from smtrain.worker.checkpoint.summary import diff, inspect
from smtrain.worker.checkpoint.targets import HuggingFace, Native, Nxd
from tests import as_told
from tests.worker.checkpoint.folders import LLAMA, hf_folder


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """fsspec's store in memory, in which a file appears when it is committed, as in S3, not when it
    is opened.
    """
    real = MemoryFileSystem._open

    def opened(
        self: Any, path: str, mode: str = "rb", *rest: Any, autocommit: bool = True, **kwargs: Any
    ) -> Any:
        if mode == "wb" and not autocommit:
            return MemoryFile(self, self._strip_protocol(path))
        return real(self, path, mode, *rest, autocommit=autocommit, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "_open", opened)
    yield "memory://bucket/models"
    memory = fsspec.filesystem("memory")
    if memory.exists("/bucket"):
        memory.rm("/bucket", recursive=True)


@pytest.mark.parametrize("form", ["pt", "xser"])
def test_there_and_back(tmp_path: Path, store: str, form: str) -> None:
    source = hf_folder(tmp_path / "hf", LLAMA)
    fsspec.filesystem("memory").pipe_file("/bucket/models/mine", b"kept")
    convert(source, f"{store}/nxd", to=Nxd(tp=2, pp=2, form=form))  # type: ignore[arg-type]
    assert inspect(f"{store}/nxd").topology == {"tp": 2, "pp": 2}
    convert(source, tmp_path / "here", to=Nxd(tp=2, pp=2, form=form))  # type: ignore[arg-type]
    here = {
        p.relative_to(tmp_path / "here").as_posix(): p.read_bytes()
        for p in (tmp_path / "here").rglob("*.pt")
    }
    memory = fsspec.filesystem("memory")
    assert here == {name: memory.cat_file(f"/bucket/models/nxd/{name}") for name in here}
    convert(f"{store}/nxd", f"{store}/hf", to=HuggingFace(max_shard_size=6000))
    assert not list(diff(source, f"{store}/hf"))
    convert(f"{store}/hf", tmp_path / "back", to=Native(tp=2))
    assert not list(diff(f"{store}/nxd", tmp_path / "back"))
    with pytest.raises(CheckpointError, match="overlap"):
        convert(f"{store}/nxd", f"{store}/nxd/below", to=Nxd(tp=1))


def inspectable(uri: str) -> dict[str, int] | None:
    """The topology of the checkpoint there, or None if it is not a whole one."""
    try:
        return inspect(uri).topology
    except CheckpointError:
        return None


@contextmanager
def killed(after: int) -> Iterator[list[str]]:
    """Stop all changes of the store after `after` of them, as if the process was gone; yields those
    that were done.
    """
    seen: list[str] = []

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def change(*args: Any, **kwargs: Any) -> Any:
            if len(seen) >= after:
                seen.append("")
                raise KeyboardInterrupt
            seen.append(real.__name__)
            return real(*args, **kwargs)

        return change

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (MemoryFileSystem, "pipe_file"),
            (MemoryFileSystem, "rm_file"),
            (uploading._Upload, "commit"),
        ):
            patch.setattr(owner, name, counted(getattr(owner, name)))
        patch.setattr(uploading, "_JOURNAL_EVERY", 0)
        patch.setattr("smtrain.worker.checkpoint.conversion_plan.cores_here", lambda: 1)
        with suppress(KeyboardInterrupt):
            yield seen


@pytest.mark.parametrize("before", ["nothing", "an older output", "half of another"])
@pytest.mark.parametrize("form", ["pt", "xser"])
def test_any_change_of_the_store_may_be_the_last(
    tmp_path: Path, store: str, before: str, form: Any
) -> None:
    layers, stride = (2, 1) if form == "pt" else (1, 5)
    source = hf_folder(tmp_path / "hf", {**LLAMA, "num_hidden_layers": layers})
    old = hf_folder(tmp_path / "old", {**LLAMA, "num_hidden_layers": layers}, torch.bfloat16)
    convert(source, tmp_path / "here", to=Nxd(tp=2, pp=layers, form=form))
    here = (p.relative_to(tmp_path / "here") for p in (tmp_path / "here").rglob("*") if p.is_file())
    wanted, memory = {p.as_posix() for p in here}, fsspec.filesystem("memory")
    for after in itertools.count(0, stride):
        uri = f"{store}/{after}"
        if before != "nothing":
            with killed(5 if before == "half of another" else 1000):
                convert(old, uri, to=Nxd(tp=4, pp=1, form=form))
        memory.pipe_file(f"/bucket/models/{after}/mine", b"kept")
        with killed(after) as seen:
            convert(source, uri, to=Nxd(tp=2, pp=layers, form=form), overwrite=True)
        there = inspectable(uri)
        assert there is None or not list(
            diff(source if there == {"tp": 2, "pp": layers} else old, uri)
        )
        if after == 0:
            assert (there is None) == (before != "an older output")
        convert(source, uri, to=Nxd(tp=2, pp=layers, form=form), overwrite=True)
        assert inspectable(uri) == {"tp": 2, "pp": layers}
        assert not list(diff(source, uri))
        names = {
            file.removeprefix(f"/bucket/models/{after}/")
            for file in memory.find(f"/bucket/models/{after}")
        }
        assert names == {"mine", *wanted}
        memory.rm(f"/bucket/models/{after}", recursive=True)
        if len(seen) <= after:
            break
    assert after > 6


def test_what_is_there_whole_is_not_converted_again(
    tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = hf_folder(tmp_path / "hf", LLAMA)
    real = vars(uploading)["run"]
    calls: list[str] = []
    monkeypatch.setattr(
        uploading, "run", lambda job, *rest: calls.append(job[0].name) or real(job, *rest)
    )
    first = {"model.embed_tokens.weight"}  # and the layer of stage 0
    with killed(1 + 2 * 2):  # the journal, and two files, each with a journal again
        convert(source, f"{store}/out", to=Nxd(tp=2, pp=2))
    with pytest.raises(CheckpointError, match="left over from a conversion"):
        inspect(f"{store}/out")
    done = {name for name in calls if name in first or ".layers.0." in name}
    calls.clear()
    convert(source, f"{store}/out", to=Nxd(tp=2, pp=2))
    assert len(done) == 9
    assert not done & set(calls)
    assert not list(diff(source, f"{store}/out"))


def test_an_error_leaves_nothing_and_an_older_output_as_it_was(
    tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, old = (
        hf_folder(tmp_path / "hf", LLAMA),
        hf_folder(tmp_path / "old", LLAMA, torch.bfloat16),
    )
    convert(old, f"{store}/there", to=Nxd(tp=2))
    memory = fsspec.filesystem("memory")
    before = memory.find("/bucket")
    real = vars(uploading)["run"]
    calls: list[Any] = []

    def fails(job: Any, *rest: Any) -> Any:
        calls.append(job)
        if len(calls) == 20:
            raise CheckpointError("it is broken")
        return real(job, *rest)

    monkeypatch.setattr(uploading, "run", fails)
    monkeypatch.setattr("smtrain.worker.checkpoint.conversion_plan.cores_here", lambda: 1)
    for name in ("there", "new"):
        calls.clear()
        with pytest.raises(CheckpointError, match="it is broken"):
            convert(source, f"{store}/{name}", to=Nxd(tp=2, pp=2), overwrite=True)
        assert memory.find("/bucket") == before
    assert not list(diff(old, f"{store}/there"))


@pytest.mark.parametrize("operation", ["cat_file", "find", "pipe_file", "info"])
def test_a_store_that_fails_now_and_then_changes_nothing(
    operation: str, tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    source, real, calls = (
        hf_folder(tmp_path / "hf", LLAMA),
        getattr(MemoryFileSystem, operation),
        itertools.count(),
    )

    def fails(*args: Any, **kwargs: Any) -> Any:
        number = next(calls)
        if number % 3 == 0:
            raise OSError("SlowDown: Please reduce your request rate")
        answer = real(*args, **kwargs)
        return (
            answer[:-1]
            if operation == "cat_file" and number % 3 == 1 and len(answer) > 8
            else answer
        )

    convert(source, f"{store}/one", to=Nxd(tp=2))
    monkeypatch.setattr(MemoryFileSystem, operation, fails)
    convert(f"{store}/one", f"{store}/two", to=HuggingFace())
    assert next(calls) > 1
    monkeypatch.setattr(MemoryFileSystem, operation, real)
    assert not list(diff(source, f"{store}/two"))


@pytest.mark.parametrize("there", [True, False])
def test_a_store_that_is_away_keeps_finished_files_and_the_next_run_resumes(
    there: bool, tmp_path: Path, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source's store fails while the target is written, in a store or in a folder."""
    monkeypatch.setattr("time.sleep", lambda _: None)
    monkeypatch.setattr("smtrain.worker.checkpoint.conversion_plan.cores_here", lambda: 1)
    source, real = hf_folder(tmp_path / "hf", LLAMA), MemoryFileSystem.cat_file
    convert(source, f"{store}/one", to=Nxd(tp=1, pp=2, form="xser"))
    target, read, allowed = f"{store}/two" if there else str(tmp_path / "two"), list[Any](), 0

    def counted(self: Any, path: str, *args: Any, **kwargs: Any) -> Any:
        if ".tensors/" in path:
            read.append(path)
            if len(read) > allowed:
                raise OSError("SlowDown: Please reduce your request rate")
        return real(self, path, *args, **kwargs)

    monkeypatch.setattr(MemoryFileSystem, "cat_file", counted)
    allowed = 10**9
    convert(f"{store}/one", f"{store}/whole", to=HuggingFace(max_shard_size=6000))
    whole = len(read)
    read.clear()
    allowed = whole - 3  # the headers come first
    with pytest.raises(CheckpointError, match=r"SlowDown.*run the same command again"):
        convert(f"{store}/one", target, to=HuggingFace(max_shard_size=6000))
    read.clear()
    allowed = 10**9
    convert(f"{store}/one", target, to=HuggingFace(max_shard_size=6000))
    assert len(read) < whole, "finished files are not converted again"
    assert not list(diff(source, target))


@pytest.mark.skipif(importlib.util.find_spec("s3fs") is None, reason="s3fs is not installed")
def test_s3(tmp_path: Path, local_home: Path) -> None:
    from smtrain.plane.client import ensure_running

    endpoint = ensure_running()
    s3 = endpoint.session().client("s3")
    s3.create_bucket(Bucket="conversions")
    source = hf_folder(
        tmp_path / "hf",
        {**LLAMA, "hidden_size": 512, "intermediate_size": 2048, "vocab_size": 6000},
    )
    code = (
        "import sys; from pathlib import Path; from smtrain.core.errors import CheckpointError\n"
        "from smtrain import HuggingFace, Nxd, convert; s, b, t = sys.argv[1:]\n"
        "convert(s, f'{b}/nxd', to=Nxd(tp=2, pp=2))\n"
        "convert(f'{b}/nxd', f'{b}/hf', to=HuggingFace())\n"
        "convert(f'{b}/hf', t, to=HuggingFace())\n"
        "file = next(Path(f'{t}/../broken/model').glob('*tp_rank_01*'))\n"
        "data = bytearray(file.read_bytes()); data[len(data) // 2] ^= 1; file.write_bytes(data)\n"
        "try: convert(f'{t}/../broken', f'{b}/none', to=HuggingFace())\n"
        "except CheckpointError as error: print(error)\n"
    )
    convert(source, tmp_path / "broken", to=Nxd(tp=2, pp=1))
    command = [
        sys.executable,
        "-c",
        code,
        str(source),
        "s3://conversions/m",
        str(tmp_path / "back"),
    ]
    done = subprocess.run(
        command, env=as_told.environment(endpoint), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not list(diff(source, tmp_path / "back"))
    assert "is not what was written" in done.stdout
    held = [o["Key"] for o in s3.list_objects_v2(Bucket="conversions")["Contents"]]
    assert "m/nxd/manifest.json" in held
    assert not [key for key in held if key.startswith("m/none")]
    assert not s3.list_multipart_uploads(Bucket="conversions").get("Uploads")


@pytest.mark.skipif(importlib.util.find_spec("s3fs") is None, reason="s3fs is not installed")
def test_a_killed_conversion_to_s3_goes_on(tmp_path: Path, local_home: Path) -> None:
    from smtrain.plane.client import ensure_running

    endpoint = ensure_running()
    s3 = endpoint.session().client("s3")
    s3.create_bucket(Bucket="killed")
    source = hf_folder(tmp_path / "hf", LLAMA)
    code = (
        "import os, signal, sys; from smtrain.worker.checkpoint import conversion_plan,"
        " uploading\nfrom smtrain import Nxd, convert; from smtrain.worker.checkpoint.summary"
        " import diff\ncalls, real, (s, t, most) = 0, uploading.run, sys.argv[1:]\ndef"
        " counted(*job):\n    global calls; calls += 1\n    if calls > int(most):"
        " os.kill(os.getpid(), signal.SIGKILL)\n    return real(*job)\nuploading.run,"
        " uploading._JOURNAL_EVERY, conversion_plan.cores_here = counted, 0, lambda: 1\nconvert(s,"
        " t, to=Nxd(tp=2, pp=2)); print(calls, len(list(diff(s, t))))\n"
    )
    for most in (15, 1000):
        command = [sys.executable, "-c", code, str(source), "s3://killed/out", str(most)]
        done = subprocess.run(
            command, env=as_told.environment(endpoint), capture_output=True, text=True, check=False
        )
        held = {o["Key"].rsplit("/")[-1] for o in s3.list_objects_v2(Bucket="killed")["Contents"]}
        parts = {f"dp_rank_00_tp_rank_{t:02d}_pp_rank_{p:02d}.pt" for t in (0, 1) for p in (0, 1)}
        if most == 15:
            assert held == {staging.JOURNAL, *(part for part in parts if "pp_rank_00" in part)}
    rest = 2 * 8 + 2  # two layers, the last norm and the head
    assert done.stdout.split() == [str(rest), "0"], done.stderr
    assert held == {*parts, "config.json", "manifest.json"}


@pytest.mark.skipif(
    not importlib.util.find_spec("s3fs"), reason="needs s3fs (scripts/test has it in .venv/s3)"
)
def test_s3_that_does_not_answer_is_said_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{nobody.getsockname()[1]}")
        for call in (
            lambda: inspect("s3://bucket/x"),
            lambda: convert("s3://bucket/x", tmp_path / "to", to=Nxd()),
        ):
            with pytest.raises(
                CheckpointError,
                match=r"S3 could not be reached at .* \(connection refused\); check the",
            ):
                call()
    assert not (tmp_path / "to").exists()
