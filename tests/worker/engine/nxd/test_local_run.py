"""entrypoints/train.py with engine nxd as a job of the local control plane."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

import smtrain
from smtrain.core.demo.inputs import CHAT_TEMPLATE
from smtrain.core.errors import JobError
from tests.client.launch.test_compile import PATH
from tests.worker.engine.nxd import shim

HERE = Path(__file__).resolve().parent
CONFIG: dict[str, Any] = {
    "target": "local",
    "train": {
        "engine": "nxd",
        "steps": 4,
        "global_batch_size": 4,
        "seq_len": 32,
        "precision": "fp32",
        "lr": 1e-3,
        "save_interval": 2,
    },
    "parallel": {"tp": 2, "sequence_parallel": True},
    "compute": {
        "instance_type": "ml.trn1.2xlarge",
        "instance_count": 1,
        "processes_per_instance": 2,
    },
    "generate": {"max_new_tokens": 4},
}


def config(inputs: dict[str, Path], name: str, **train: Any) -> dict[str, Any]:
    paths = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    cpu = {
        "NXD_CPU_MODE": "1",
        "PJRT_DEVICE": "CPU",
        "PYTHONPATH": os.pathsep.join([str(HERE / "cpu"), *paths]),
    }
    return {
        **CONFIG,
        "name": name,
        "model": {"path": str(inputs["model"])},
        "data": {"path": str(inputs["text"])},
        "train": {**CONFIG["train"], **train},
        "compute": {**CONFIG["compute"], "environment": cpu},
    }


@pytest.mark.full
@pytest.mark.skipif(shim.available(), reason="neuronx_distributed can be imported here")
def test_without_the_library_the_job_says_which_image_has_it(
    local_home: Path, trained_inputs: dict[str, Path]
) -> None:
    raw = config(trained_inputs, "lacking")
    raw["compute"] = CONFIG["compute"]
    smtrain.launch(raw, stage="prepare", say=_silent)
    smtrain.launch(raw, stage="convert", say=_silent)
    with pytest.raises(JobError) as failed:
        smtrain.launch(raw, stage="train", say=_silent)
    assert "train.engine: nxd needs" in str(failed.value)
    assert "pytorch-training-neuronx:2.9.0-neuronx-py312-sdk2.30.0-ubuntu24.04" in str(failed.value)


@pytest.mark.nxd
def test_from_text_to_a_model_and_on_again(
    local_home: Path, trained_inputs: dict[str, Path], tmp_path: Path
) -> None:
    first = smtrain.run(config(trained_inputs, "nxd"), say=_silent).loss
    assert len(first) == 4
    assert first[-1] < first[0]
    native = config(trained_inputs, "native", engine="native")
    for loss, known in zip(first, smtrain.run(native, say=_silent).loss, strict=True):
        assert abs(loss - known) < 1e-5
    again = smtrain.run(config(trained_inputs, "nxd", steps=6), say=_silent)
    assert len(again.loss) == 6
    assert again.loss[:4] == first
    assert resumed_from(again, "step_00000004")
    other = {**config(trained_inputs, "nxd", steps=8), "parallel": {"pp": 2}}
    with pytest.raises(
        JobError, match=r"was written with tp 2 \(here 1\), pp 1 \(here 2\).*`smtrain convert`"
    ):
        smtrain.launch(other, stage="train", say=_silent)
    with pytest.raises(
        JobError, match=r"step_00000006 of this run was written by engine nxd.*`smtrain convert`"
    ):
        smtrain.launch(
            config(trained_inputs, "nxd", steps=8, engine="native"), stage="train", say=_silent
        )
    assert [uri.rstrip("/")[-4:] for uri in again.job("train").checkpoints] == ["0004", "0006"]
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(again.download(tmp_path / "model"))


@pytest.mark.nxd
def test_stages_of_unequal_layers_train_and_resume_as_with_the_native_engine(
    local_home: Path, trained_inputs: dict[str, Path]
) -> None:
    uneven = {"parallel": {"pp": 2, "layers_per_stage": [1, 3]}}
    first = smtrain.run({**config(trained_inputs, "nxd-uneven"), **uneven}, say=_silent).loss
    native = {**config(trained_inputs, "native-uneven", engine="native"), **uneven}
    known = [
        smtrain.launch(native, stage=stage, say=_silent)
        for stage in ("prepare", "convert", "train")
    ][-1]
    assert len(first) == 4
    assert all(
        abs(loss - other["loss"]) < 1e-5 for loss, other in zip(first, known.records, strict=True)
    )
    as_cuts = {
        **config(trained_inputs, "nxd-uneven", steps=6),
        "parallel": {"pp": 2, "pipeline_cuts": [0]},
    }
    again = smtrain.run(as_cuts, say=_silent)
    assert again.loss[:4] == first
    assert resumed_from(again, "step_00000004")
    even = {**config(trained_inputs, "nxd-uneven", steps=8), "parallel": {"pp": 2}}
    with pytest.raises(
        JobError, match=r"was written with pipeline_cuts \[0\] \(here \[\]\).*`smtrain convert`"
    ):
        smtrain.launch(even, stage="train", say=_silent)


@pytest.mark.nxd
def test_instruction_data_and_masked_documents_train_and_validate_as_with_the_native_engine(
    local_home: Path, trained_inputs: dict[str, Path], tmp_path: Path
) -> None:
    model, chats = tmp_path / "model", tmp_path / "chats.jsonl"
    shutil.copytree(trained_inputs["model"], model)
    (model / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    pairs = [(f"what is red number {i}?", f"the red fox number {i}.") for i in range(120)]
    chats.write_text("".join(json.dumps({"instruction": q, "output": a}) + "\n" for q, a in pairs))
    sft = {"model": {"path": str(model)}, "data": {"path": str(chats)}}
    documents = {"data": {"path": str(trained_inputs["text"]), "document_mask": True}}
    held_out = {"fraction": 0.2, "interval": 2}
    for name, changes, train in (
        ("sft", sft, {"objective": "sft", "seq_len": 64, "validation": held_out}),
        ("documents", documents, {"validation": held_out}),
    ):
        made = smtrain.run(
            {**config(trained_inputs, f"nxd-{name}", **train), **changes}, say=_silent
        )
        native = {**config(trained_inputs, f"native-{name}", engine="native", **train), **changes}
        known = smtrain.run(native, say=_silent)
        assert len(made.loss) == 4
        assert all(
            abs(loss - other) < 1e-5 for loss, other in zip(made.loss, known.loss, strict=True)
        )
        for mine, other in zip(validations(made), validations(known), strict=True):
            assert mine.keys() == other.keys()
            assert all(abs(mine[key] - other[key]) < 1e-4 for key in other), (mine, other)


@pytest.mark.nxd
def test_the_traced_run_of_stage_compile_is_the_training_entry_on_one_host(
    local_home: Path, trained_inputs: dict[str, Path]
) -> None:
    """Under the stand-in of Neuron's program: two hosts' processes on one, ten steps, nothing
    saved.
    """
    raw = config(trained_inputs, "traced")
    raw["compute"]["instance_count"] = 2
    raw["compute"]["environment"] |= {"PATH": PATH, "STANDIN_TRIAL": "1"}
    smtrain.launch(raw, stage="prepare", say=_silent)
    job = smtrain.launch(raw, stage="compile", say=_silent)
    assert json.loads(job.read("compilation.json"))["successful"] == 3
    assert any("traced 10 steps on 4 processes" in line.text for line in job.lines("algo-1"))
    assert not job.loss


@pytest.mark.nxd
def test_an_adapter_resumes_under_the_other_engine_and_is_exported(
    local_home: Path, trained_inputs: dict[str, Path], tmp_path: Path
) -> None:
    train: dict[str, Any] = {
        "adapter": {"rank": 4, "targets": ["q_proj", "down_proj"]},
        "schedule": "constant",
    }
    known = smtrain.run(
        config(trained_inputs, "alone", engine="native", steps=6, **train), say=_silent
    ).loss
    smtrain.run(config(trained_inputs, "adapted", **train), say=_silent)
    again = smtrain.run(
        config(trained_inputs, "adapted", engine="native", steps=6, **train), say=_silent
    )
    assert resumed_from(again, "step_00000004")
    assert len(again.loss) == 6
    assert all(
        abs(loss - expected) < 1e-5 for loss, expected in zip(again.loss, known, strict=True)
    )
    back = smtrain.run(config(trained_inputs, "adapted", steps=8, **train), say=_silent)
    assert resumed_from(back, "step_00000006")
    folder = back.download(tmp_path / "adapter")
    exported = json.loads((folder / "adapter_config.json").read_text())
    assert (exported["r"], exported["target_modules"]) == (4, ["down_proj", "q_proj"])
    with pytest.raises(JobError, match="holds a LoRA adapter"):
        smtrain.launch(config(trained_inputs, "adapted", steps=9), stage="train", say=_silent)


def validations(run: smtrain.Run) -> list[dict[str, float]]:
    """The results of a run's validations, by its log."""
    rows = [row for row in run.job("train").records if "val_loss" in row]
    assert len(rows) == 3
    return [{key: row[key] for key in row if key in ("val_loss", "val_accuracy")} for row in rows]


def resumed_from(run: smtrain.Run, step: str) -> bool:
    """Whether the train job of a run said that it resumes from a step's checkpoint."""
    said = (line.text for line in run.job("train").lines("algo-1"))
    return any(text.rstrip().endswith(step) and " from checkpoint " in text for text in said)


def _silent(_line: str) -> None:
    pass
