"""A run never trains on damaged files or on those of another run; one process, with files changed
between attempts.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
import time
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from smtrain.core.config import JobConfig
from smtrain.core.errors import SmtrainError
from smtrain.core.protocol.container import Container
from smtrain.stages import keys_of
from smtrain.worker.checkpoint.convert import convert
from smtrain.worker.checkpoint.manifest import NAME, Manifest
from smtrain.worker.checkpoint.native import stream
from smtrain.worker.checkpoint.native.reader import StateReader
from smtrain.worker.checkpoint.targets import Dcp, HuggingFace, Native, Nxd, Target
from smtrain.worker.checkpoint.training_state import KINDS
from smtrain.worker.data.prepare.prepare import prepare
from smtrain.worker.data.prepare_options import PrepareOptions
from smtrain.worker.train.data_position import (
    ARITHMETIC,
    DECAY,
    changes,
    difference,
    promise,
    settings,
)
from smtrain.worker.train.start import start

MODEL, OPTIMIZER = "model/tp000_pp000.safetensors", "optim/dp000_tp000_pp000.safetensors"
TRAIN = {
    "steps": 6,
    "global_batch_size": 4,
    "seq_len": 32,
    "precision": "fp32",
    "lr": 1e-3,
    "save_interval": 2,
    "stall_minutes": 0,
}


class Run:
    """A run in this process; each call is one attempt."""

    def __init__(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.root, self._capsys = root, capsys
        self.checkpoints = root / "checkpoints"

    def attempt(self, train: dict[str, Any] | None = None, **sections: dict[str, Any]) -> str:
        """Run once; returns the output, or raises as the run does."""
        raw: dict[str, Any] = {
            "model": {"path": "s3://unused"},
            "parallel": {"micro_batch_size": 4},
            "compute": {"instance_type": "ml.m5.xlarge", "processes_per_instance": 1},
            "checkpoint": {"keep": 9},
            **sections,
            "train": {**TRAIN, **(train or {})},
        }
        config = JobConfig.model_validate(keys_of(JobConfig.model_validate(raw), "train"))
        self._capsys.readouterr()
        handler = signal.getsignal(signal.SIGTERM)
        try:
            start(config, Container(self.root, ("algo-1",), "algo-1"))
        finally:
            signal.signal(signal.SIGTERM, handler)
            if dist.is_initialized():
                dist.destroy_process_group()
            self.said = self._capsys.readouterr().out
        return self.said

    def step(self, step: int) -> Path:
        return self.checkpoints / f"step_{step:08d}"

    def losses(self) -> dict[int, tuple[float, float]]:
        lines = (self.root / "output/data/metrics.jsonl").read_text().splitlines()
        return {r["step"]: (r["loss"], r["grad_norm"]) for r in map(json.loads, lines)}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, trained_inputs: dict[str, Path]) -> Path:
    """A run of 6 steps with checkpoints of 2, 4 and 6."""
    root = tmp_path_factory.mktemp("trained") / "ml"
    prepare(
        trained_inputs["text"],
        root / "input/data/data",
        trained_inputs["model"],
        PrepareOptions(seq_len=32, workers=1),
    )
    shutil.copytree(trained_inputs["model"], root / "input/data/model")
    return root


@pytest.fixture
def run(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """A copy of the trained run in its own folder."""
    if not (trained / "checkpoints").exists():
        Run(trained, capsys).attempt()
    shutil.copytree(trained, tmp_path / "ml")
    return Run(tmp_path / "ml", capsys)


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def zero(path: Path) -> None:
    """64 KiB in the middle, as a disk that lost a write leaves them."""
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + (64 << 10)] = bytes(64 << 10)
    path.write_bytes(data)


def edit(run: Run) -> None:
    path = run.step(6) / NAME
    content = json.loads(path.read_text())
    content["state"]["samples"] = 8
    path.write_text(json.dumps(content))


def lie(run: Run) -> None:
    """Write a valid manifest whose samples do not fit its steps."""
    manifest = Manifest.read(run.step(6))
    manifest.state["samples"] += 4
    (run.step(6) / NAME).write_text(manifest.to_json())


def without_crc32(run: Run) -> None:
    """Leave only a sha256 of each file, and flip a bit."""
    manifest = Manifest.read(run.step(6))
    for about in manifest.files.values():
        del about["crc32"]
    (run.step(6) / NAME).write_text(manifest.to_json())
    flip(run.step(6) / MODEL)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        pytest.param(
            lambda run: flip(run.step(6) / MODEL),
            rf"{MODEL} has crc32 \w{{8}} and was written with \w{{8}}",
            id="model",
        ),
        pytest.param(
            lambda run: flip(run.step(6) / OPTIMIZER), rf"{OPTIMIZER} has crc32", id="optimizer"
        ),
        pytest.param(
            lambda run: flip(run.step(6) / OPTIMIZER, 0),
            rf"{OPTIMIZER} has crc32",
            id="header",
            marks=pytest.mark.full,
        ),
        pytest.param(
            lambda run: zero(run.step(6) / MODEL),
            rf"{MODEL} has crc32",
            id="zeroed",
            marks=pytest.mark.full,
        ),
        pytest.param(
            lambda run: shutil.copy(run.step(4) / OPTIMIZER, run.step(6) / OPTIMIZER),
            rf"{OPTIMIZER} has crc32",
            id="another's optimizer",
            marks=pytest.mark.full,
        ),
        pytest.param(
            without_crc32,
            rf"{MODEL} has sha256 \w{{12}} and was written with \w{{12}}",
            id="sha256",
        ),
        pytest.param(
            edit, r"manifest.json is not what was written \(its digest differs\)", id="edited"
        ),
        pytest.param(
            lie,
            r"its record says 28 samples after 6 steps, and by its own record they are 24 after 6",
            id="wrong samples",
        ),
    ],
)
def test_what_is_damaged_is_named_and_passed_over_for_the_newest_whole_one(
    run: Run, damage: Any, said: str
) -> None:
    known = run.losses()
    damage(run)
    output = run.attempt()
    assert re.search(rf"passing over checkpoint step_00000006.*{said}", output), output
    if "which is damaged" in output:
        assert (
            "resuming from step_00000004, 2 steps are trained again (`--from-step N`,"
            " checkpoint.step" in output
        )
    assert "from checkpoint step_00000004" in output
    assert run.losses() == known, "steps 5 and 6 are done again, bit for bit"
    assert "from checkpoint step_00000006" in run.attempt(), "the damaged one was written again"


def test_a_renamed_folder_is_passed_over(run: Run) -> None:
    shutil.rmtree(run.step(6))
    run.step(2).rename(run.step(6))
    output = run.attempt()
    assert re.search(
        r"passing over checkpoint step_00000006.*written as step 2: the folder was renamed", output
    )
    assert "from checkpoint step_00000004" in output


def test_with_nothing_good_left_it_ends_rather_than_start_over(run: Run) -> None:
    for step in (2, 4, 6):
        flip(run.step(step) / MODEL)
    with pytest.raises(
        SmtrainError,
        match=r"no checkpoint of this run can be trained on: step_00000006: .*MODEL".replace(
            "MODEL", MODEL
        ),
    ):
        run.attempt()
    for step in (2, 4):
        shutil.rmtree(run.step(step))
    run.step(6).rename(run.step(8))
    with pytest.raises(
        SmtrainError, match=r"no checkpoint of this run.*written as step 6: the folder was renamed"
    ):
        run.attempt()


def test_what_never_arrived_starts_over(run: Run) -> None:
    for step in (2, 4):
        shutil.rmtree(run.step(step))
    (run.step(6) / MODEL).unlink()
    assert "step=1 " in run.attempt()


def test_verify_size_compares_only_sizes(run: Run) -> None:
    flip(run.step(6) / OPTIMIZER)
    said = run.attempt({"steps": 7}, checkpoint={"verify": "size"})
    assert "from checkpoint step_00000006" in said
    assert "is what was written" not in said


def test_a_damaged_one_is_not_counted_when_old_ones_are_pruned(run: Run) -> None:
    flip(run.step(6) / MODEL)
    run.attempt({"steps": 5, "save_interval": 9}, checkpoint={"keep": 2})
    assert [p.name[-1] for p in sorted(run.checkpoints.glob("step_*"))] == ["4", "5", "6"]


def test_files_that_no_bf16_run_reads_are_verified_during_the_first_steps(run: Run) -> None:
    bf16, keep = {"precision": "bf16", "save_interval": 1}, {"keep": 2}
    shutil.rmtree(run.checkpoints)
    run.attempt(bf16 | {"steps": 4}, checkpoint=keep)
    flip(run.step(4) / MODEL)
    output = run.attempt(bf16 | {"steps": 6, "save_interval": 9}, checkpoint=keep)
    assert "from checkpoint step_00000004" in output, "its master weights are good"
    assert re.search(
        rf"checkpoint step_00000004 is damaged: {MODEL} has crc32 .*training, which does not read",
        output,
    )
    assert [p.name[-1] for p in sorted(run.checkpoints.glob("step_*"))] == [
        "3",
        "4",
        "6",
    ], "it does not count"
    output = run.attempt(bf16 | {"steps": 8, "save_interval": 9}, checkpoint=keep)
    assert "damaged" not in output
    assert [p.name[-1] for p in sorted(run.checkpoints.glob("step_*"))] == ["6", "8"]


def test_all_files_of_a_finished_run_are_verified_first(run: Run) -> None:
    shutil.rmtree(run.checkpoints)
    run.attempt({"precision": "bf16"})
    flip(run.step(6) / MODEL)
    output = run.attempt({"precision": "bf16"})
    assert re.search(rf"passing over checkpoint step_00000006, which is damaged: {MODEL}", output)
    assert "from checkpoint step_00000004" in output, "its export would be refused"
    assert "nothing is left to train" in run.attempt({"precision": "bf16"})


def test_a_chosen_older_checkpoint_and_its_line_from_then_on(run: Run) -> None:
    known = run.losses()
    said = run.attempt({"steps": 3, "save_interval": 1}, checkpoint={"step": 2})
    assert "from checkpoint step_00000002" in said
    said = run.attempt({"steps": 5, "save_interval": 1}, checkpoint={"step": 2})
    assert "from checkpoint step_00000003" in said, "the same command resumes"
    assert {s: n for s, n in run.losses().items() if s <= 2} == {
        s: n for s, n in known.items() if s <= 2
    }
    assert "from checkpoint step_00000005" in run.attempt(), "what was abandoned is not returned to"
    with pytest.raises(
        SmtrainError,
        match=r"checkpoint.step: 1 is not a whole checkpoint of this run \(those are: 4, 5, 6\)",
    ):
        run.attempt(checkpoint={"step": 1})


def test_pruning_follows_the_line_chosen_by_hand(run: Run) -> None:
    run.attempt({"steps": 3}, checkpoint={"step": 2, "keep": 1})
    assert [p.name[-1] for p in sorted(run.checkpoints.glob("step_*"))] == ["3", "4", "6"]


def test_another_base_model_under_the_same_name_is_refused(run: Run) -> None:
    from safetensors.torch import load_file, save_file

    path = run.root / "input/data/model/model.safetensors"
    tensors = {name: tensor * 1.5 for name, tensor in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(
        SmtrainError,
        match=r"model.path: step_00000006 of this run was trained from another model \(the base",
    ):
        run.attempt()
    config = run.root / "input/data/model/config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "rms_norm_eps": 1e-3}))
    with pytest.raises(
        SmtrainError,
        match=r"config.json differs: rms_norm_eps \S+ there and 0.001 here\); name that",
    ):
        run.attempt()


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        (
            None,
            None,
            (
                "kernels are deterministic: on the same mesh, losses are those of an unbroken run,"
                " bit for bit"
            ),
        ),
        (
            True,
            True,
            (
                "kernels are deterministic: on the same mesh, losses are those of an unbroken run,"
                " bit for bit"
            ),
        ),
        (
            None,
            False,
            (
                "train.deterministic is false: losses differ from those of an unbroken run in the"
                " last digits"
            ),
        ),
        (
            True,
            False,
            (
                "was written with train.deterministic: true, and this job has false: losses differ"
                " from those"
            ),
        ),
        (
            False,
            True,
            (
                "was written with train.deterministic: false, and this job has true: losses differ"
                " from those"
            ),
        ),
    ],
)
def test_a_resume_says_if_the_bits_are_those_of_an_unbroken_run(
    before: bool | None, now: bool | None, words: str
) -> None:
    state = {"decay": DECAY, "arithmetic": ARITHMETIC} | (
        {} if before is None else {"deterministic": before}
    )
    train = {"steps": 3, "deterministic": now}
    config = JobConfig.model_validate(
        {"name": "t", "model": {"path": "m"}, "data": {"path": "d"}, "train": train}
    )
    assert words in promise(state, config)
    for earlier in ({"decay": DECAY}, state | {"arithmetic": "whole logits"}):
        assert "written by a release that may add numbers in another order" in promise(
            earlier, config
        )


def test_a_resume_of_a_run_with_the_earlier_decay_says_that_its_rates_change() -> None:
    def said(
        state: dict[str, Any], steps: int = 6, schedule: str = "cosine"
    ) -> tuple[list[str], str]:
        train = {"steps": steps, "lr": 1e-3, "schedule": schedule}
        config = JobConfig.model_validate(
            {"name": "t", "model": {"path": "m"}, "data": {"path": "d"}, "train": train}
        )
        saved = settings(config) | {"steps": 6}
        state = {"settings": saved, "arithmetic": ARITHMETIC, **state}
        return changes(state, 6 if steps > 6 else 3, config), promise(state, config)

    lines, word = said({"samples": 3})
    assert "each remaining step has the rate of the step before it" in lines[0]
    assert word.startswith("the learning rate decays otherwise than before: losses differ slightly")
    for lines, word in (said({"decay": DECAY}), said({"samples": 3}, schedule="constant")):
        assert (lines, "bit for bit" in word) == ([], True)
    assert "decayed to 0 at step 6" in said({"samples": 3}, steps=9)[0][-1]
    assert "decayed to 6.7e-5 at step 6" in said({"decay": DECAY}, steps=9)[0][-1]


def test_a_run_resumes_from_the_checkpoint_of_another_trainer(run: Run) -> None:
    original = StateReader(run.step(6))
    convert(run.checkpoints, run.root / "titan", to=Dcp())
    shutil.rmtree(run.checkpoints)
    shutil.rmtree(run.root / "output")
    convert(run.root / "titan", run.checkpoints, to=Native())
    imported = StateReader(run.step(6))
    assert imported.optimizer_steps == original.optimizer_steps == 6
    for spec, kind in product(original.manifest.shape.specs, KINDS):
        assert (imported.window(kind, spec.name) == original.window(kind, spec.name)).all()
    said = run.attempt({"steps": 8})
    assert "from checkpoint step_00000006" in said
    assert "another trainer wrote the checkpoint: the data begins with its first sample" in said
    assert list(run.losses()) == [7, 8]
    # The next resume knows its position: 2 of 8 steps had samples.
    assert "from checkpoint step_00000008" in run.attempt({"steps": 9})
    assert Manifest.read(run.step(9)).state["samples"] == 12


def test_the_base_weights_need_not_be_there_any_more(run: Run) -> None:
    (run.root / "input/data/model/model.safetensors").unlink()
    assert "from checkpoint step_00000006" in run.attempt()


def test_changed_settings_are_reported_in_one_line(run: Run) -> None:
    said = run.attempt({"steps": 9, "lr": 2e-4, "betas": (0.9, 0.99), "global_batch_size": 8})
    output = (
        "lr 0.001 -> 2e-4, steps 6 -> 9, global_batch_size 4 -> 8, betas (0.9, 0.95) -> (0.9,"
        " 0.99)\n"
    )
    assert f"continuing with changed {output}" in said
    assert (
        "the learning rate had decayed to 6.7e-5 at step 6, the end of the former train.steps; it"
        " continues at 5e-5" in said
    )
    assert "losses are those of an unbroken run, bit for bit\n" in said
    assert "continuing with changed" not in run.attempt(
        {"steps": 9, "lr": 2e-4, "betas": (0.9, 0.99), "global_batch_size": 8}
    )
    assert Manifest.read(run.step(9)).state["samples"] == 6 * 4 + 3 * 8


def test_a_resume_in_the_middle_of_a_batch_ramp_is_exact(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(
        trained, tmp_path / "whole", ignore=shutil.ignore_patterns("checkpoints", "output")
    )
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    train = {
        "global_batch_size": 16,
        "batch_ramp": {"start": 4, "increment": 4, "samples": 24},
        "param_norm": "layers",
    }
    whole, parts = Run(tmp_path / "whole", capsys), Run(tmp_path / "parts", capsys)
    whole.attempt(train)
    kept = [(2, 4), (1, 8), (1, 12), (2, 16)]
    assert Manifest.read(whole.step(6)).state["spans"] == [list(span) for span in kept]
    shutil.copytree(whole.checkpoints, parts.checkpoints)
    for step in (4, 6):
        shutil.rmtree(parts.step(step))
    assert "from checkpoint step_00000002" in parts.attempt(train)
    records = [
        {
            r["step"]: r
            for r in map(
                json.loads, (one.root / "output/data/metrics.jsonl").read_text().splitlines()
            )
        }
        for one in (whole, parts)
    ]
    exact = ("loss", "grad_norm", "param_norm", "batch", "lr")
    assert [[record[key] for key in exact] for record in records[1].values()] == [
        [records[0][step][key] for key in exact] for step in range(3, 7)
    ]
    assert Manifest.read(parts.step(6)).state["spans"] == [list(span) for span in kept]
    for file in (MODEL, OPTIMIZER):
        assert (parts.step(6) / file).read_bytes() == (whole.step(6) / file).read_bytes()
    assert "batch_ramp None -> " not in parts.said
    said = parts.attempt({**train, "batch_ramp": None, "steps": 7})
    assert "continuing with changed steps 6 -> 7, batch_ramp {" in said


@pytest.mark.parametrize("how", [Nxd(tp=1), Nxd(tp=2, form="xser"), Native(tp=1)])
def test_one_flipped_bit_in_converted_shards_is_found_before_the_first_step(
    run: Run, how: Target
) -> None:
    shutil.rmtree(run.checkpoints)
    shards = run.root / "input/data/shards"
    convert(run.root / "input/data/model", shards, to=how)
    assert "step=1 " in run.attempt({"steps": 1})
    shutil.rmtree(run.checkpoints)
    largest = max((p for p in shards.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    flip(largest, largest.stat().st_size // 2)
    with pytest.raises(
        SmtrainError,
        match=(
            rf"the weights that the run begins from are damaged: .*{largest.name}.*(crc32|sha256)"
        ),
    ):
        run.attempt({"steps": 1})
    run.attempt({"steps": 0}, checkpoint={"verify": "size"})


def lose_checkpoints(run: Run) -> None:
    """Delete all checkpoints, as if the run had ended before its first."""
    for path in run.checkpoints.glob("step_*"):
        shutil.rmtree(path)


def test_one_flipped_bit_in_a_model_without_checksums_is_found_by_the_next_attempt(
    run: Run,
) -> None:
    lose_checkpoints(run)
    shard = run.root / "input/data/model/model.safetensors"
    assert "step=1 " in run.attempt({"steps": 1})
    lose_checkpoints(run)
    flip(shard, shard.stat().st_size // 2)
    for _ in range(2):  # the first does not make it the truth
        with pytest.raises(
            SmtrainError,
            match=r"model\.safetensors.* is not what this run first read.*another name",
        ):
            run.attempt({"steps": 1})
    assert not list(run.checkpoints.glob("step_*"))
    assert "step=1 " in run.attempt({"steps": 1}, checkpoint={"verify": "size"})
    lose_checkpoints(run)
    flip(shard, shard.stat().st_size // 2)
    assert "step=1 " in run.attempt({"steps": 1})


def test_the_base_of_an_adapter_is_compared_at_every_start(run: Run) -> None:
    shutil.rmtree(run.checkpoints)
    adapter = {"adapter": {"rank": 2}}
    run.attempt({"steps": 2, **adapter})
    shard = run.root / "input/data/model/model.safetensors"
    flip(shard, shard.stat().st_size // 2)
    with pytest.raises(SmtrainError, match=r"model\.safetensors.* is not what this run first read"):
        run.attempt({"steps": 4, **adapter})


def test_another_model_in_place_of_one_that_left_no_checkpoint_is_read_again(run: Run) -> None:
    lose_checkpoints(run)
    folder = run.root / "input/data/model"
    config = AutoConfig.from_pretrained(folder)
    config.intermediate_size *= 2
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    assert "step=1 " in run.attempt({"steps": 1})


def test_a_damaged_record_of_the_models_checksums_is_reported_and_made_again(run: Run) -> None:
    lose_checkpoints(run)
    (record,) = (run.checkpoints / "model-checksums").iterdir()
    known = record.read_bytes()
    flip(record, len(known) // 2)
    assert f"{record} is damaged" in run.attempt({"steps": 1})
    assert record.read_bytes() == known


def test_checksums_in_a_model_folder_of_ours_are_compared_at_the_first_start(run: Run) -> None:
    shutil.rmtree(run.checkpoints)
    folder = run.root / "input/data/model"
    convert(folder, run.root / "ours", to=HuggingFace())
    shutil.rmtree(folder)
    (run.root / "ours").rename(folder)
    flip(folder / "model.safetensors")
    with pytest.raises(SmtrainError, match=r"model\.safetensors.*crc32"):
        run.attempt({"steps": 1})


@pytest.mark.parametrize("seconds", [60.0, 0.0], ids=["time", "no time"])
def test_told_to_stop_it_saves_first_and_proves_the_save_only_if_there_is_time(
    run: Run, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("smtrain.worker.train.stop.PROOF_SECONDS", seconds)
    metrics = run.root / "output/data/metrics.jsonl"

    def stop() -> None:
        while '"step": 9,' not in metrics.read_text():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    watcher = threading.Thread(target=stop, daemon=True)
    watcher.start()
    said = run.attempt({"steps": 10**6, "save_interval": 10**6})
    watcher.join()
    stopped = re.search(
        r"asked to stop: saved step (\d+), the same command resumes from here(.*)", said
    )
    assert stopped, said
    assert bool(stopped[2]) == (seconds == 0)
    assert Manifest.read(run.step(int(stopped[1]))).state["proven"] == (seconds > 0)
    assert f"from checkpoint {run.step(int(stopped[1])).name}" in run.attempt(
        {"steps": int(stopped[1]) + 1}
    )


def test_what_did_not_reach_the_disk_as_written_is_no_checkpoint_and_nothing_is_pruned_for_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lossy(file: int) -> None:
        os.fsync(file)
        flip(Path(os.readlink(f"/proc/self/fd/{file}")))

    monkeypatch.setattr(stream, "_flush", lossy)
    with pytest.raises(
        SmtrainError, match=r"was not written.*safetensors is not on the disk as it was written"
    ):
        run.attempt({"steps": 8}, checkpoint={"keep": 1})
    monkeypatch.undo()
    assert "from checkpoint step_00000006" in run.attempt({"steps": 7})


def test_a_base_that_another_release_quantises_otherwise_is_another_model() -> None:
    saved = {"weights": "a", "quantized": "bitsandbytes 0.46.1 11"}
    assert difference(saved, {"weights": "a", "quantized": "bitsandbytes 0.50.2 11"}) is None
    assert difference(saved, {"weights": "a"}) is None
    reason = difference(saved, {"weights": "a", "quantized": "bitsandbytes 0.50.2 22"})
    assert reason == (
        "the base in 4 bits differs, which bitsandbytes 0.46.1 made there and bitsandbytes 0.50.2"
        " here"
    )
