"""Runs of long sequences through the local control plane: rows cut over processes, positions
extended by config.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml

import smtrain
from smtrain import JobError
from smtrain.core.demo.inputs import CHAT_TEMPLATE
from tests import warm
from tests.client.launch.test_local_run import exact_records, wait_for_step
from tests.conftest import LLAMA

pytestmark = [pytest.mark.slow, pytest.mark.full]

STEPS = 4
CUT: dict[str, Any] = {"parallel": {"cp": 2, "tp": 2}, "processes": 4}
WHOLE: dict[str, Any] = {"parallel": {}, "processes": 1}


@pytest.fixture(scope="module")
def base(
    local_home: Path, trained_inputs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("long")
    shutil.copytree(trained_inputs["model"], folder / "model")
    (folder / "model/chat_template.jinja").write_text(CHAT_TEMPLATE)
    lines = [f"the red fox number {i}: {i * 7 % 13} red fox.\n" for i in range(3000)]
    texts = ["".join(lines[i : i + 10 + i // 10 % 60]) for i in range(0, len(lines), 10)]
    for name, rows in (
        ("text", [{"text": text} for text in texts]),
        (
            "sft",
            [
                {"instruction": f"what is red number {i}?", "output": f"the red fox number {i}."}
                for i in range(240)
            ],
        ),
    ):
        (folder / name).mkdir()
        (folder / name / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "target": "local",
        "model": {"path": str(folder / "model"), "rope": {"type": "yarn", "factor": 2}},
        "data": {"path": str(folder / "text"), "document_mask": True},
        "train": {
            "steps": STEPS, "global_batch_size": 4, "seq_len": 512, "precision": "fp32", "lr": 1e-3,
            "schedule": "constant", "save_interval": 2,
            "validation": {"fraction": 0.1, "interval": 2, "batches": 2},
        },
        "generate": {"prompts": ["the red fox"], "max_new_tokens": 4},
    }  # fmt: skip


def config(base: dict[str, Any], name: str, mesh: dict[str, Any], **train: Any) -> dict[str, Any]:
    compute = {"instance_type": "ml.trn1.2xlarge", "processes_per_instance": mesh["processes"]}
    parallel = {"micro_batch_size": 1, **mesh["parallel"]}
    return {
        **base,
        "name": name,
        "parallel": parallel,
        "compute": compute,
        "train": {**base["train"], **train},
    }


def trained(raw: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The records of a training without the stages after it."""
    for stage in ("prepare", "convert", "train"):
        job = smtrain.launch(raw, stage=stage, say=_silent)  # type: ignore[arg-type]
    return exact_records(job)


def agree(ours: dict[int, dict[str, Any]], theirs: dict[int, dict[str, Any]]) -> None:
    assert sorted(ours) == sorted(theirs)
    for step, record in ours.items():
        for key in ("loss", "grad_norm", "val_loss"):
            assert (key in record) == (key in theirs[step])
            assert record.get(key, 0.0) == pytest.approx(theirs[step].get(key, 0.0), rel=1e-4), (
                step,
                key,
            )


@pytest.fixture(scope="module")
def whole(base: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Every number of the same training in one process."""
    return trained(config(base, "whole", WHOLE))


@pytest.fixture(scope="module")
def cut(base: dict[str, Any]) -> smtrain.Run:
    raw = config(base, "cut", CUT)
    assert smtrain.check(raw).ok
    planned = str(smtrain.plan(raw, target="local"))
    assert "cp 2" in planned
    assert "()" not in planned, "the parts of so small a memory are left out"
    return smtrain.run(raw, say=_silent)


def test_a_run_has_the_numbers_of_one_process_and_exports_the_longer_model(
    cut: smtrain.Run, whole: dict[int, dict[str, Any]], tmp_path: Path
) -> None:
    agree(exact_records(cut.job("train")), whole)
    assert cut.loss[-1] < cut.loss[0] - 0.2
    model = transformers.AutoModelForCausalLM.from_pretrained(cut.download(tmp_path / "model"))
    assert model.config.max_position_embeddings == 512
    with torch.no_grad():
        assert torch.isfinite(model(torch.arange(500)[None] % 512).logits).all()
    assert "cp 2" in smtrain.report("cut", tmp_path / "page.html").read_text("utf-8")


def test_detach_is_refused_by_its_own_name(base: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config(base, "detached", CUT)))
    done = subprocess.run(
        [warm.smtrain(), "run", "run.yaml", "--detach"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert "--detach: only a Slurm cluster runs a chain by itself" in done.stderr


def trained_steps(records: dict[int, dict[str, Any]]) -> list[int]:
    """The steps that trained; other records are of validations alone."""
    return [step for step, record in records.items() if "loss" in record]


def test_it_is_stopped_and_resumes_with_another_cut(base: dict[str, Any]) -> None:
    steps = 10 * STEPS
    raw = config(base, "stopped", CUT, steps=steps)
    for stage in ("prepare", "convert"):
        smtrain.launch(raw, stage=stage, say=_silent)  # type: ignore[arg-type]
    first = smtrain.launch(raw, stage="train", wait=False, say=_silent)
    wait_for_step(first, 3)
    first.stop()
    with pytest.raises(JobError, match="the same command resumes from its last save"):
        first.wait()
    before = exact_records(first)
    after = trained(config(base, "stopped", {"parallel": {"cp": 4}, "processes": 4}, steps=steps))
    # A stop comes before the validation of its step, which the resumed job then makes up for.
    assert min(trained_steps(after)) == max(trained_steps(before)) + 1
    # At a step whose validation is made up for, the resumed job logs only that.
    both = {step: {**before.get(step, {}), **after.get(step, {})} for step in {*before, *after}}
    agree(both, trained(config(base, "stopped-whole", WHOLE, steps=steps)))


@pytest.mark.parametrize("kind", ["sft", "experts", "adapter"])
def test_so_it_is_with(kind: str, base: dict[str, Any], tmp_path: Path) -> None:
    changed, train, mesh = dict(base), dict[str, Any](), CUT
    folder = Path(base["model"]["path"]).parent
    if kind == "sft":
        changed["data"], train = {"path": str(folder / "sft")}, {"objective": "sft"}
    if kind == "adapter":
        train = {"adapter": {"rank": 4, "dropout": 0.1}}
        changed["export"] = {"merge": True}
    if kind == "experts":
        mesh = {"parallel": {"cp": 2, "ep": 2}, "processes": 2}
        shutil.copytree(folder / "model", tmp_path / "model")
        sizes = {
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
        }
        left_out = ("model_type", "architectures", "torch_dtype")
        described = {key: value for key, value in LLAMA.items() if key not in left_out} | sizes
        torch.manual_seed(0)
        transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**described)).save_pretrained(
            tmp_path / "model"
        )
        changed["model"] = {**base["model"], "path": str(tmp_path / "model")}
    run = smtrain.run(config(changed, f"cut-{kind}", mesh, **train), say=_silent)
    assert run.results[-1].stage == "generate"
    agree(
        exact_records(run.job("train")), trained(config(changed, f"whole-{kind}", WHOLE, **train))
    )


def test_its_needles_and_losses_by_position_are_measured(
    cut: smtrain.Run, base: dict[str, Any], tmp_path: Path
) -> None:
    folder = Path(base["model"]["path"]).parent
    words = [
        "--base",
        str(folder / "model"),
        "--tasks",
        "needle,loss_by_position",
        "--text",
        str(folder / "text"),
    ]
    more = ["--lengths", "64,128,256,500", "--limit", "4", "--out", str(tmp_path / "out")]
    done = subprocess.run(
        [warm.smtrain(), "evaluate", cut.config.name, *words, *more], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    made = json.loads((tmp_path / "out/evaluation.json").read_text())["long"]["after"]
    assert [last for _, last, _ in made["loss_by_position"]] == [64, 128, 256, 500]


def _silent(_text: str) -> None:
    """Say nothing."""
