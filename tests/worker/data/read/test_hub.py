"""Hub datasets are read by ranges, with the same result on any number of machines; a busy hub is
retried.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from smtrain.core.errors import DataError, SmtrainError
from smtrain.core.protocol.entrypoints import entrypoints_folder
from smtrain.worker.data.read import hub
from smtrain.worker.data.read.hub import HubName, ask_hub
from smtrain.worker.object_store import StorageError
from tests.client.launch.hub import COMMIT, CONVERTED, Hub

ROOT = Path(__file__).parents[4]
# The hub's address is read when its packages are imported.
_SCRIPT = """
import hashlib, json, random, sys
from pathlib import Path
from smtrain.worker.data.read import blocks
from smtrain.worker.data.prepare.prepare import prepare
from smtrain.worker.data.prepare_options import PrepareOptions
from smtrain.worker.data.read.sources import find_files
from smtrain.core.errors import DataError
from smtrain.worker.data.prepare.spread.driver import Spread
from tests.worker.data.prepare.spread.executors import InThisProcess

blocks.BLOCK_BYTES = 256
local, out, tokenizer = map(Path, sys.argv[1:])
options, quiet = PrepareOptions(seq_len=8), {"progress": lambda _: None}
said, sums = [], {}
prepare(local, out / "files", tokenizer, options, **quiet)
prepare("hf://org/set", out / "hub", tokenizer, options, say=said.append, **quiet)
spread = Spread(InThisProcess(random.Random(1)))
made = prepare("hf://org/set", out / "three", tokenizer, options, spread=spread, **quiet)
for name in ("files", "hub", "three"):
    sums[name] = [hashlib.sha256((out / name / f"tokens.{end}").read_bytes()).hexdigest() for end in ("bin", "idx")]
both = [file.name for file in find_files("hf://org/set@test+train#main")]
try:
    find_files("hf://org/set@dev")
except DataError as error:
    said.append(str(error))
print(json.dumps({"files": sums, "said": said, "sources": made.sources, "both": both}))
"""


@pytest.mark.slow
def test_files_of_the_hub_are_sources_on_any_number_of_machines(
    tmp_path: Path, tokenizer_folder: Path
) -> None:
    pytest.importorskip("datasets")
    data = tmp_path / "set/data"
    data.mkdir(parents=True)
    for number in range(3):
        rows = [f"words of the text {number} {row} " * (row % 7) for row in range(60)]
        pq.write_table(
            pa.table({"text": rows}),
            data / f"train-{number:05}-of-00003.parquet",
            row_group_size=11,
        )
    pq.write_table(pa.table({"text": ["a test"]}), data / "test-00000-of-00001.parquet")
    token = "hf_of_a_private_set"
    served = Hub(tmp_path, "org/set", token, data=tmp_path / "set")
    served.busy = 1
    environment = {
        **os.environ,
        "HF_ENDPOINT": served.url,
        "HF_HOME": str(tmp_path / "home"),
        "HF_TOKEN": token,
    }
    try:
        done = subprocess.run(
            [
                sys.executable,
                "-c",
                _SCRIPT,
                str(tmp_path / "set"),
                str(tmp_path / "out"),
                str(tokenizer_folder),
            ],
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
    finally:
        served.close()
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert result["files"]["hub"] == result["files"]["files"] == result["files"]["three"]
    assert served.tokens == {token}
    assert served.busy == 0
    assert {*served.ranges} == {f"data/train-{number:05}-of-00003.parquet" for number in range(3)}
    assert not list((tmp_path / "home").rglob("*.arrow")), "nothing was downloaded"
    assert result["said"][:2] == [
        "prepare: hf://org/set: split test is left out; name it as hf://org/set@SPLIT",
        (
            f"prepare: hf://org/set: read at commit {COMMIT}; name it as #COMMIT to read the same"
            " again"
        ),
    ]
    assert result["said"][-1] == "hf://org/set@dev: there is no split dev; it has train, test."
    assert result["both"][:2] == [
        f"org/set@{COMMIT[:12]}/data/{name}.parquet"
        for name in ("test-00000-of-00001", "train-00000-of-00003")
    ]
    assert {row["name"].partition("/data/")[0] for row in result["sources"]} == {
        f"org/set@{COMMIT[:12]}"
    }


_MOVING = """
import json, random, sys
from pathlib import Path
from smtrain.worker.data.prepare.prepare import prepare
from smtrain.worker.data.prepare_options import PrepareOptions
from smtrain.worker.data.read import blocks
from smtrain.worker.data.prepare.spread.driver import Spread
from tests.worker.data.prepare.spread.executors import InThisProcess

blocks.BLOCK_BYTES = 256
out, tokenizer = map(Path, sys.argv[1:])
options = PrepareOptions(seq_len=8)
spread = Spread(InThisProcess(random.Random(1)))
made = prepare(["hf://org/set", "hf://org/set@train[:50%]"], out / "three", tokenizer, options, spread=spread)
print(json.dumps([row["name"] for row in made.sources]))
"""


@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("form", ["csv", "arrow"])
def test_all_machines_read_the_commit_that_the_first_was_told(
    form: str, tmp_path: Path, tokenizer_folder: Path
) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "set").mkdir()
    for number in range(3):
        rows = [f"words of the text {number} {row}" for row in range(60)]
        path = tmp_path / f"set/train-{number}.{form}"
        if form == "arrow":
            table = pa.table({"text": rows})
            with pa.OSFile(str(path), "wb") as raw, pa.ipc.new_stream(raw, table.schema) as stream:
                stream.write_table(table)
            continue
        lines = ["text", *rows] if form == "csv" else [json.dumps({"text": row}) for row in rows]
        path.write_text("\n".join(lines) + "\n")
    served = Hub(tmp_path, "org/set", data=tmp_path / "set")
    served.moves = True  # as if there were a push between any two requests
    environment = {**os.environ, "HF_ENDPOINT": served.url, "HF_HOME": str(tmp_path / "home")}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _MOVING, str(tmp_path / "out"), str(tokenizer_folder)],
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
    finally:
        served.close()
    assert done.returncode == 0, done.stderr
    names = json.loads(done.stdout.splitlines()[-1])
    commits = {name.partition("@")[2][:12] for name in names}
    assert len(names) == (2 if form == "csv" else 4), names
    assert commits == {commit[:12] for commit in served.read}
    assert len(commits) == 2, "one for each path"


_A_SCRIPT = """
import json, sys
from smtrain.core.errors import DataError
from smtrain.worker.data.read.sources import find_files

told, said = [], []
for uri in ("hf://org/set", "hf://org/set:en@test", "hf://org/set@refs/convert/parquet"):
    try:
        find_files(uri)
    except DataError as error:
        told.append(str(error))
read = [[file.name for file in find_files(uri, say=said.append)] for uri in sys.argv[1:]]
print(json.dumps({"told": told, "read": read, "said": said}))
"""


@pytest.mark.slow
def test_a_set_that_is_a_script_is_read_from_the_hubs_copy_in_parquet(tmp_path: Path) -> None:
    pytest.importorskip("datasets", minversion="4")
    (tmp_path / "set").mkdir()
    (tmp_path / "set/set.py").write_text("raise SystemExit('a program of a stranger')")
    for name in ("en/train/0000", "en/test/0000", "de/train/0000"):
        path = tmp_path / f"converted/{name}.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table({"text": [f"words of {name}"]}), path)
    served = Hub(tmp_path, "org/set", data=tmp_path / "set", converted=tmp_path / "converted")
    environment = {**os.environ, "HF_ENDPOINT": served.url, "HF_HOME": str(tmp_path / "home")}
    copies = ["hf://org/set:en@refs/convert/parquet", "hf://org/set:en@test#refs/convert/parquet"]
    try:
        done = subprocess.run(
            [sys.executable, "-c", _A_SCRIPT, *copies],
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
    finally:
        served.close()
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    script = "is a script, which datasets from 4.0 on does not run; read the hub's copy in Parquet:"
    assert result["told"] == [
        f"hf://org/set {script} hf://org/set@refs/convert/parquet",
        f"hf://org/set:en@test {script} {copies[1]}",
        (
            "hf://org/set@refs/convert/parquet: names no configuration, and there are de, en; name"
            " one, as in hf://org/set:de@refs/convert/parquet"
        ),
    ]
    at = f"org/set@{CONVERTED[:12]}/en"
    assert result["read"] == [[f"{at}/train/0000.parquet"], [f"{at}/test/0000.parquet"]]
    assert f"{copies[1]}: read at commit {CONVERTED}" in result["said"]


@pytest.mark.parametrize(
    ("uri", "parts"),
    [
        ("hf://a/b", ("a/b", None, "", None)),
        ("hf://a/b:en@train[:5%]", ("a/b", "en", "train[:5%]", None)),
        ("hf://a/b@train+test#v1.0", ("a/b", None, "train+test", "v1.0")),
        ("hf://a/b:2024#0123abc", ("a/b", "2024", "", "0123abc")),
        ("hf://a/b:en@refs/convert/parquet", ("a/b", "en", "", "refs/convert/parquet")),
        ("hf://a/b@train#refs/convert/parquet", ("a/b", None, "train", "refs/convert/parquet")),
    ],
)
def test_a_name_has_config_split_and_revision(uri: str, parts: tuple[str | None, ...]) -> None:
    name = HubName.of(uri)
    assert (name.name, name.config, name.split, name.revision) == parts


class AnsweredError(Exception):
    """An error of the hub as its packages raise it."""

    def __init__(self, status: int, **headers: str) -> None:
        super().__init__(f"the hub said {status}")
        self.response = type("Answer", (), {"status_code": status, "headers": headers})


@pytest.mark.parametrize("answers", [0, 1])
def test_without_a_network_it_says_so_soon_unless_the_hub_has_answered(
    answers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    monkeypatch.setattr(hub, "_has_answered", threading.Event())
    if answers:
        ask_hub("hf://a/b", lambda: None)
    for error in (ConnectionError("refused"), TimeoutError("timed out")):
        waited.clear()

        def ask(error: OSError = error) -> None:
            raise error

        with pytest.raises(StorageError, match=r"hf://a/b: the hub .* check the network"):
            ask_hub("hf://a/b", ask)
        assert len(waited) == (9 if answers else 2)


@pytest.mark.parametrize("is_refused", [True, False], ids=["refused", "silent"])
def test_a_proxy_that_is_away_is_the_network(
    is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("time.sleep", lambda _: None)
    monkeypatch.setattr(hub, "_has_answered", threading.Event())
    monkeypatch.setattr(hub, "SILENT_S", 0.05)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    with socket.socket() as proxy:
        proxy.bind(("127.0.0.1", 0))
        if not is_refused:
            proxy.listen()
        for name in ("HTTPS_PROXY", "HTTP_PROXY", "https_proxy", "http_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        huggingface_hub.close_session()  # a session reads the proxy when it is made
        try:
            with pytest.raises(StorageError, match=r"^hf://wikitext@train: .* check the network"):
                hub.commits_of(["hf://wikitext@train"])
            monkeypatch.syspath_prepend(entrypoints_folder())
            fetch = importlib.import_module("fetch")
            config = SimpleNamespace(model=SimpleNamespace(path="hf://org/model", token=None))
            monkeypatch.setattr(fetch, "SILENT_S", 0.05)
            with pytest.raises(SmtrainError, match=r"hf://org/model: .* check the network"):
                fetch.stage(config, SimpleNamespace(model_dir=Path("nowhere")))
        finally:
            huggingface_hub.close_session()


def test_a_busy_hub_is_asked_again_when_it_says_and_a_refusal_ends_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waited: list[float] = []
    monkeypatch.setattr("time.sleep", waited.append)
    answers: list[Any] = [
        AnsweredError(429, **{"Retry-After": "17"}),
        AnsweredError(503),
        ConnectionError("away"),
        b"text",
    ]

    def ask() -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert ask_hub("hf://a/b", ask) == b"text"
    assert waited[0] == 17
    assert [1 <= waited[1] <= 2, 2 <= waited[2] <= 4] == [True, True]
    answers[:] = [AnsweredError(403)]
    with pytest.raises(DataError, match=r"^hf://a/b cannot be read \(the hub said 403\)"):
        ask_hub("hf://a/b", ask)
    answers[:] = [AnsweredError(500)] * 50
    with pytest.raises(StorageError, match="the hub said 500"):
        ask_hub("hf://a/b", ask)
    assert len(waited) < 20
