"""A run with model.rope: trained, resumed, exported and merged with the positions that it asks
for.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from smtrain.core.errors import SmtrainError
from smtrain.core.model.extension import described_rope
from smtrain.worker.checkpoint.convert import convert
from smtrain.worker.checkpoint.export import BaseModel, export
from smtrain.worker.checkpoint.targets import HuggingFace, Peft
from smtrain.worker.data.prepare.prepare import prepare
from smtrain.worker.data.prepare_options import PrepareOptions
from tests.worker.train.test_resume import Run

LENGTH = 64
YARN = {"type": "yarn", "factor": 4}
ONE = {"steps": 1, "global_batch_size": 1, "seq_len": LENGTH, "save_interval": 1}
BATCH = {"parallel": {"micro_batch_size": 1}}


def model(**rope: Any) -> dict[str, Any]:
    return {"model": {"path": "s3://unused", "rope": rope}}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory, trained_inputs: dict[str, Path]) -> Path:
    """The inputs of a run on rows of four times the model's positions."""
    root = tmp_path_factory.mktemp("rope") / "ml"
    shutil.copytree(trained_inputs["model"], root / "input/data/model")
    described = json.loads((root / "input/data/model/config.json").read_text()) | {
        "max_position_embeddings": 16
    }
    (root / "input/data/model/config.json").write_text(json.dumps(described))
    options = PrepareOptions(seq_len=LENGTH, workers=1)
    prepare(trained_inputs["text"], root / "input/data/data", trained_inputs["model"], options)
    return root


@pytest.fixture
def run(inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    shutil.copytree(inputs, tmp_path / "ml")
    return Run(tmp_path / "ml", capsys)


def exported(run: Run, **options: Any) -> Path:
    folder = run.root / "exported"
    export(run.checkpoints, BaseModel(run.root / "input/data/model"), folder, **options)
    return folder


@torch.no_grad()
def losses_of(folder: Path, weights: Path, data: Path) -> list[float]:
    """The loss of each row for plain transformers, built from a folder's config.json, with the
    weights of another.
    """
    config = AutoConfig.from_pretrained(folder)
    plain: Any = AutoModelForCausalLM.from_pretrained(weights, config=config, dtype=torch.float32)
    tokens = np.fromfile(data / "tokens.bin", np.uint16).astype(np.int64)
    rows = torch.tensor(
        np.stack([tokens[at : at + LENGTH + 1] for at in range(0, len(tokens) - LENGTH, LENGTH)])
    )
    logits = plain(input_ids=rows[:, :-1]).logits.transpose(1, 2)
    return torch.nn.functional.cross_entropy(logits, rows[:, 1:], reduction="none").mean(1).tolist()


def test_the_export_computes_in_transformers_what_was_trained_and_resumes_only_so(run: Run) -> None:
    run.attempt(ONE, **BATCH, **model(**YARN))
    folder, base = exported(run), run.root / "input/data/model"
    described = json.loads((folder / "config.json").read_text())
    assert described["max_position_embeddings"] == 64
    assert (
        described["rope_parameters"]["rope_type"]
        == described["rope_scaling"]["rope_type"]
        == "yarn"
    )
    losses = losses_of(folder, base, run.root / "input/data/data")
    assert min(abs(loss - run.losses()[1][0]) for loss in losses) < 1e-5
    plain = losses_of(base, base, run.root / "input/data/data")
    assert min(abs(loss - run.losses()[1][0]) for loss in plain) > 1e-5
    more = {**ONE, "steps": 2}
    for other in (model(type="yarn", factor=8), {}):
        with pytest.raises(
            SmtrainError, match=r"model\.rope: step_00000001 of this run was .* yarn"
        ):
            run.attempt(more, **BATCH, **other)
    run.attempt(more, **BATCH, **model(**YARN, original_max_position_embeddings=16))
    assert sorted(run.losses()) == [1, 2]


@pytest.mark.full
def test_a_merged_adapter_has_the_positions_and_an_adapter_alone_is_refused(
    run: Run, tmp_path: Path
) -> None:
    adapted = {**ONE, "adapter": {"rank": 2}, "lr": 0.1, "schedule": "constant"}
    run.attempt(adapted, **BATCH, **model(**YARN), export={"merge": True})
    base = run.root / "input/data/model"
    with pytest.raises(SmtrainError, match=r"was trained with model\.rope"):
        convert(run.checkpoints, tmp_path / "peft", to=Peft())
    merged = exported(run, merge=True)
    convert(base, tmp_path / "again", to=HuggingFace(), merge_adapter=run.checkpoints)
    for folder in (merged, tmp_path / "again"):
        rope = described_rope(json.loads((folder / "config.json").read_text()))
        assert (rope["rope_type"], rope["max_position_embeddings"]) == ("yarn", 64)
