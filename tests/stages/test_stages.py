"""Stages of a run: their order, and the recipe by which one more is added (CONTRIBUTING.md)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from smtrain.client.planner.resolve import load_config
from smtrain.core.errors import ConfigError
from smtrain.stages import STAGES, keys_of, stage_named, stages_before, stages_of

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "examples/tiny-llama.yaml"

QUANTIZE = '''
"""Stage quantize: the exported model in 8 bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smtrain.core.config import JobConfig
from smtrain.stages.base import Inputs, JobStage, select_keys


class QuantizeStage(JobStage):
    """Reads the exported model; leaves a smaller one."""

    name = "quantize"
    follows = "export"
    upstream = ("export",)

    def is_needed(self, config: JobConfig, target: str) -> bool:
        return target == "aws"

    def keys(self, config: JobConfig) -> dict[str, Any]:
        return select_keys(config, "model.path")

    def inputs(self, chain: Inputs) -> dict[str, str]:
        return {"model": chain.need(self.name, "export")}

    def metrics(self, config: JobConfig, hf_config: Mapping[str, Any] | None) -> tuple[str, ...]:
        return ("error",)


STAGE = QuantizeStage()
'''


def test_a_run_goes_through_its_stages_in_order() -> None:
    assert STAGES == (
        "fetch",
        "prepare",
        "convert",
        "compile",
        "train",
        "export",
        "generate",
        "evaluate",
    )
    assert stages_before("train") == ("fetch", "prepare", "convert", "compile")
    assert stages_of(load_config(CONFIG)) == ["prepare", "convert", "train", "export", "generate"]


def test_every_stage_has_an_entry_script_and_says_what_it_runs_on() -> None:
    for name in STAGES:
        stage = stage_named(name)
        assert (ROOT / f"entrypoints/{name}.py").is_file()
        assert stage.name == name
        assert stage.on_accelerators == (name in ("compile", "train"))
        assert stage.resumable == (name in ("prepare", "train"))


def test_an_unknown_stage_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"stage: got 'trian'; did you mean train\?"):
        keys_of(load_config(CONFIG), "trian")


def test_stages_bring_no_torch() -> None:
    code = (
        "import sys, smtrain.stages; assert not {'torch', 'numpy', 'boto3', 'transformers'} &"
        " set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.full
def test_a_stage_is_one_module_one_entry_script_and_one_test(tmp_path: Path) -> None:
    """The recipe, followed in a copy: the command line, the chain and the bundle know the stage by
    its module.
    """
    for folder in ("smtrain", "entrypoints", "examples"):
        shutil.copytree(ROOT / folder, tmp_path / folder)  # with what Python has compiled
    (tmp_path / "smtrain/stages/quantize.py").write_text(QUANTIZE)
    (tmp_path / "entrypoints/quantize.py").write_text('print("quantized")\n')
    set_ = [
        "compute.role=arn:aws:iam::123456789012:role/r",
        "output.s3_uri=s3://my-bucket/x",
        "compute.region=us-west-2",
    ]
    command = [
        "launch",
        "examples/tiny-llama.yaml",
        "--stage",
        "quantize",
        "--target",
        "aws",
        "--dry-run",
    ]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "smtrain",
            *command,
            *(word for one in set_ for word in ("--set", one)),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    request = json.loads(done.stdout)
    assert request["TrainingJobName"].startswith("tiny-llama-quantize-")
    assert request["AlgorithmSpecification"]["MetricDefinitions"][0]["Name"] == "quantize:error"
    assert [channel["ChannelName"] for channel in request["InputDataConfig"]] == [
        "model",
        "code",
        "config",
    ]
    code = (
        "from smtrain.stages import STAGES; from smtrain.client.launch.bundle import bundle_files"
        " as files; print(STAGES.index('quantize') > STAGES.index('export'),"
        " 'smtrain/stages/quantize.py' in files())"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert answer.stdout == "True True\n"
