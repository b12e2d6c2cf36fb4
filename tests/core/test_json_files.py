"""Readers of JSON files that smtrain did not write: one sentence for any content, and no wait or
end of memory.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from smtrain.client.config.checks.weights import _read_config
from smtrain.client.jobs import checkpoints
from smtrain.client.preflight.dataset import model_folder
from smtrain.core import files
from smtrain.core.config.stage_file import stage_config
from smtrain.core.errors import DataError, SmtrainError
from smtrain.core.model.hf_tokenizer import vocab_in
from smtrain.core.protocol.container import Container
from smtrain.tools.chat.generate import read_prompts
from smtrain.tools.compare.sources import read
from smtrain.worker.checkpoint.manifest import Manifest
from smtrain.worker.checkpoint.open import format_of
from smtrain.worker.checkpoint.storage import place
from smtrain.worker.data.manifest import DatasetManifest
from smtrain.worker.data.pack.exchange import prefixes
from smtrain.worker.data.tokenizer import _json
from smtrain.worker.evaluation.questions import _rows
from smtrain.worker.generation.load import not_loaded
from smtrain.worker.generation.memory_fit import described_in


def stage_config_in(folder: Path) -> object:
    """The config of a stage whose channel and hyperparameters are in one folder."""
    for name in ("input/data/config/config.json", "input/config/hyperparameters.json"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).unlink(missing_ok=True)
        if os.path.lexists(here := folder / Path(name).name):
            (folder / name).symlink_to(here)
    if not os.path.lexists(folder / "config.json"):
        (folder / "input/data/config/config.json").write_text('{"model": {"path": "m"}}')
    return stage_config(Container(folder, ("algo-1",), "algo-1"))


READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "prepared": ("manifest.json", prefixes),
    "checkpoint": ("manifest.json", Manifest.read),
    "format": ("manifest.json", lambda folder: format_of(place(str(folder)))),
    "config check": ("config.json", lambda folder: _read_config(folder, "an s3://")),
    "model": ("config.json", lambda folder: list(model_folder(folder))),
    "model not loaded": ("config.json", lambda folder: not_loaded(folder, ValueError("x"))),
    "memory": ("config.json", described_in),
    "tokenizer settings": (
        "tokenizer_config.json",
        lambda folder: _json(folder / "tokenizer_config.json"),
    ),
    "vocabulary": ("tokenizer.json", vocab_in),
    "stage": ("config.json", stage_config_in),
    "hyperparameters": ("hyperparameters.json", stage_config_in),
    "prompts": ("prompts.jsonl", lambda folder: read_prompts([folder / "prompts.jsonl"])),
    "questions": ("questions.json", lambda folder: list(_rows(folder / "questions.json"))),
    "log": ("log.jsonl", lambda folder: read(folder / "log.jsonl")),
}

PREPARED: dict[str, Any] = {
    "format_version": 1,
    "vocab_size": 8,
    "model_vocab_size": 8,
    "tokenizer_sha256": "0",
    "eos_id": 1,
    "append_eod": True,
    "seq_len": 4,
    "dtype": "uint16",
    "documents": 1,
    "tokens": 9,
    "samples": 2,
    "text_column": "text",
    "sources": [],
    "bad_line_count": 0,
    "bad_lines": [],
    "files": {"tokens.bin": {"bytes": 18, "sha256": "0"}},
    "parts": [{"prefix": "tokens", "documents": 1, "tokens": 9, "samples": 2}],
}
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
TEXTS = st.one_of(
    VALUES.map(json.dumps),
    st.tuples(st.sampled_from(sorted(PREPARED)), VALUES).map(
        lambda one: json.dumps({**PREPARED, one[0]: one[1]})
    ),
    st.sampled_from(
        ["", "[" * 100_000, "\ufeff{}", '{"model_type": 7}', '{"format": "smtrain", "version": []}']
    ),
)


def answered(reader: str, folder: Path) -> None:
    """A reader gives a value or a sentence: any other error fails the test."""
    with contextlib.suppress(SmtrainError):
        READERS[reader][1](folder)


@pytest.mark.parametrize("reader", READERS)
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(content=TEXTS.map(str.encode) | st.binary(max_size=30))
def test_any_content_gives_a_value_or_a_sentence(
    reader: str, tmp_path: Path, content: bytes
) -> None:
    (tmp_path / READERS[reader][0]).write_bytes(content)
    answered(reader, tmp_path)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", ["device", "pipe", "folder", "nowhere"])
def test_no_reader_waits_or_fills_the_memory(reader: str, tmp_path: Path, kind: str) -> None:
    file = tmp_path / READERS[reader][0]
    if kind == "device":
        file.symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    else:
        file.symlink_to(tmp_path / "nowhere")
    answered(reader, tmp_path)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": "long"}')
    with pytest.raises(ValueError, match="more than 8 bytes"):
        files.read_object(tmp_path / "a.json", 8)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("parts", 7),
        ("parts", [7]),
        ("parts", [{"prefix": "tokens"}]),
        ("files", {"tokens.bin": 7}),
        ("tokens", "9"),
    ],
)
def test_a_manifest_of_prepared_data_names_the_key_with_another_type(
    tmp_path: Path, key: str, value: Any
) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps({**PREPARED, key: value}))
    with pytest.raises(
        DataError, match=rf"manifest.json is damaged \({key}.*\); prepare the data again"
    ):
        DatasetManifest.load(tmp_path)


@given(
    text=TEXTS.map(str.encode)
    | st.binary(max_size=30)
    | st.builds(
        lambda files: json.dumps({"files": files}).encode(),
        VALUES | st.dictionaries(st.text(max_size=4), VALUES),
    )
)
def test_a_damaged_record_of_a_checkpoint_is_a_step_that_is_not_whole(text: bytes) -> None:
    lacking, model = checkpoints.compare_with_record(text, {}, "step_00000001")
    assert lacking is None or all(isinstance(name, str) for name in lacking)
    assert model is None or isinstance(model, dict)


def test_a_damaged_record_lacks_itself() -> None:
    def compare(
        text: str, folder: str = "job/step_00000002"
    ) -> tuple[list[str] | None, dict[str, Any] | None]:
        return checkpoints.compare_with_record(text.encode(), {"a": 3}, folder)

    assert compare('{"step": 2, "files": {"a": 3}') == (None, None), "cut short"
    assert compare('{"step": 2, "files": {"a": {"size": 3}, "b": 1}}') == (["b"], None)
    assert compare('{"step": 2, "files": {"a": {"size": 4}}}') == (["a"], None)
    assert compare('{"step": 2, "files": {"a": 3}, "config": {}}') == ([], {})
    assert compare('{"step": 2, "files": {"a": 3}}', "step_00000004") == (
        None,
        None,
    ), "a folder that was renamed"


OWN = {
    "worker/generation/ranks",
    "worker/train/device_use",
    "worker/data/prepare/spread/shared_folder",
    "core/files",
    "worker/checkpoint/huggingface/safetensors",
    "tools/doctor/task",
    "tools/doctor/devices",
    "tools/image/lock",
    "tools/image/registry",
    "client/planner/result",
    "client/planner/probing",
    "client/backends/slurm/backend",
    "client/launch/image_inspect",
    "client/launch/image_probe",
    "client/config/load",
    "core/demo/inputs",
    "core/digests",
}
"""Modules that parse what smtrain's own processes or a registry just wrote, or that catch
RecursionError.
"""


def test_text_of_others_is_parsed_by_one_function() -> None:
    package = Path(files.__file__).parents[1]
    sources = (
        path for path in package.rglob("*.py") if path.relative_to(package).parts[0] != "plane"
    )
    users = {
        str(path.relative_to(package).with_suffix(""))
        for path in sources
        if "json.loads(" in path.read_text()
    }
    assert users <= OWN, (
        "json.loads raises RecursionError for nested text; use parse_json or parse_object"
    )
