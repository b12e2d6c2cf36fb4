"""A model of ModelScope: all that belongs to it, as it was at one commit, through broken
connections, and its token.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import smtrain
from smtrain.client.planner.resolve import load_config
from smtrain.core.errors import SmtrainError
from smtrain.core.model import modelscope
from smtrain.core.protocol.container import Container
from smtrain.core.protocol.entrypoints import entrypoints_folder
from smtrain.stages import stages_of
from tests.client.launch.modelscope import NEW, OLD, ModelScope

TOKEN = "ms-" + "0123456789abcdef" * 2


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    (folder / "onnx").mkdir(parents=True)
    names = [
        "config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "LICENSE",
        "NOTICE.txt",
        "USE_POLICY.md",
        "README.md",
    ]
    for name in (*names, "configuration.json", "onnx/model.onnx", "training_args.bin"):
        (folder / name).write_text(f"{name} of the repository")
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 4000)
    return folder


@pytest.fixture
def site(repository: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModelScope]:
    served = ModelScope(repository, "org/model")
    monkeypatch.setenv("MODELSCOPE_ENDPOINT", served.url)
    monkeypatch.setattr(modelscope, "_PAUSE_S", 0)
    yield served
    served.close()


@pytest.fixture
def fetched(
    raw: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Path]:
    """Run stage fetch and return the prefix of the model."""
    monkeypatch.syspath_prepend(str(entrypoints_folder()))
    monkeypatch.setenv("SM_MODEL_DIR", str(tmp_path / "fetched"))
    module = importlib.import_module("fetch")

    def run(path: str, token: str | None = None) -> Path:
        (tmp_path / "fetched").mkdir()
        monkeypatch.setattr(module, "read", lambda _: token)
        model = {"path": path, **({"token": {"ssm": "/team/modelscope"}} if token else {})}
        module.stage(
            load_config({**raw, "model": model}), Container(tmp_path, ("algo-1",), "algo-1")
        )
        return tmp_path / "fetched"

    return run


def test_all_that_belongs_to_a_model_comes_as_it_was_at_one_commit(
    site: ModelScope, repository: Path, fetched: Callable[..., Path]
) -> None:
    site.breaks = 1
    folder = fetched("modelscope://org/model")
    source = json.loads((folder / "source.json").read_text())
    assert source == {
        "endpoint": site.url,
        "model": "org/model",
        "revision": "master",
        "commit": NEW,
        "hub": "modelscope",
    }
    wanted = {path.name for path in repository.iterdir() if path.is_file()} - {"training_args.bin"}
    assert {path.name for path in folder.iterdir()} == wanted | {"source.json"}
    assert all((folder / name).read_bytes() == (repository / name).read_bytes() for name in wanted)
    assert {(commit, name) for commit, name in site.asked} == {
        (NEW if name == "README.md" else OLD, name) for name in wanted
    }


def test_a_connection_that_breaks_goes_on_where_it_was(
    site: ModelScope, repository: Path, fetched: Callable[..., Path]
) -> None:
    for path in repository.iterdir():
        if path.is_file() and path.name != "model.safetensors":
            path.unlink()
    site.breaks = 3
    folder = fetched("modelscope://org/model@v1")
    assert (folder / "model.safetensors").read_bytes() == (
        repository / "model.safetensors"
    ).read_bytes()
    assert site.ranges == ["model.safetensors"] * 3


def test_a_token_goes_to_modelscope_alone(site: ModelScope, fetched: Callable[..., Path]) -> None:
    site.token = TOKEN
    folder = fetched("modelscope://org/model", TOKEN)
    assert (folder / "model.safetensors").is_file()
    assert site.store_was_told == set()
    assert not any(TOKEN.encode() in path.read_bytes() for path in folder.iterdir())


@pytest.mark.parametrize(
    ("path", "change", "words"),
    [
        (
            "org/none",
            "",
            r"refuses org/none at master \(404 Not Found\); check its name and revision",
        ),
        ("org/model@v9", "", r"refuses org/model at v9 \(404 Not Found\)"),
        (
            "org/model",
            "token",
            r"refuses org/model at master \(403 Forbidden\); .*token \(model.token\)",
        ),
        (
            "org/model",
            "other",
            r"config.json of org/model did not arrive .* \(it is not what ModelScope lists\)",
        ),
        (
            "org/model",
            "weights",
            r"modelscope://org/model holds an ONNX export \(onnx/model.onnx\); take the model",
        ),
        ("org/model", "empty", r"lists no files of org/model at master"),
    ],
)
def test_what_went_wrong_is_one_sentence(
    site: ModelScope,
    repository: Path,
    fetched: Callable[..., Path],
    path: str,
    change: str,
    words: str,
) -> None:
    if change == "token":
        site.token = TOKEN
    elif change == "other":
        site.other = "config.json"
    elif change == "weights":
        (repository / "model.safetensors").unlink()
    elif change == "empty":
        repository.rename(repository.with_name("away"))
        repository.mkdir()
    with pytest.raises(SmtrainError, match=words):
        fetched(f"modelscope://{path}")


def test_nobody_there_is_one_sentence(
    site: ModelScope, fetched: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    site.close()
    with pytest.raises(
        SmtrainError, match=r"cannot be reached \(URLError\); check the network and try again"
    ):
        fetched("modelscope://org/model")


def test_a_run_has_a_stage_that_fetches_it(raw: dict[str, Any]) -> None:
    config = load_config({**raw, "model": {"path": "modelscope://org/model@v1"}})
    assert stages_of(config, "local")[0] == "fetch"
    request = smtrain.request(config, stage="fetch")
    assert "modelscope" not in json.dumps(request["InputDataConfig"])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"model": {"path": "modelscope://model"}},
            "must look like modelscope://organization/model@revision",
        ),
        (
            {
                "model": {"path": "modelscope://org/model", "token": {"ssm": "/t"}},
                "data": {"path": "hf://org/text"},
            },
            "model.token: is the token of one hub, and model and data are on two",
        ),
        (
            {"model": {"path": "modelscope://org/model"}, "network": {"isolation": True}},
            "keeps the fetch stage from the hub",
        ),
    ],
)
def test_what_cannot_be_is_told_before_anything_starts(
    raw: dict[str, Any], changes: Any, words: str
) -> None:
    with pytest.raises(smtrain.ConfigError, match=words):
        load_config({**raw, **changes})
