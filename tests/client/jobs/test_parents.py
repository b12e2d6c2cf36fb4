"""`model.path: run://NAME`: the model that an earlier run exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import smtrain
from smtrain.cli.options import model_folder
from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.client.backends.slurm.registry import REGISTRY
from smtrain.client.jobs.job import Job
from smtrain.client.launch.stages import Chain
from smtrain.core.config.cluster import Cluster
from smtrain.tools.chat.resolve_model import find
from testing.plane import plane
from tests.conftest import LLAMA

ONE, TWO = "11111111", "22222222"
WEIGHTS = b"\x08\0\0\0\0\0\0\0{}      "


def leave(job: str, **files: bytes) -> str:
    """Write files as the model of a job; returns its prefix."""
    target = SageMakerBackend("local")
    uri = f"{Job(job, target).output.rstrip('/')}/"
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    for name, content in files.items():
        target.s3.put_object(
            Bucket=bucket, Key=f"{prefix}{name.replace('_json', '.json')}", Body=content
        )
    return uri


def exported(run: str, mark: str = ONE, **described: Any) -> str:
    """The prefix of the model of a new finished run."""
    control = plane()
    control.synthetic_job(lines=1, name=f"{run}-train-{mark}")
    control.synthetic_job(lines=1, name=f"{run}-export-{mark}")
    config = json.dumps({**LLAMA, **described}).encode()
    files = {"config_json": config, "tokenizer_json": b"{}", "model.safetensors": WEIGHTS}
    return leave(f"{run}-export-{mark}", **files)


@pytest.fixture
def child(raw: dict[str, Any], local_home: Path) -> dict[str, Any]:
    return {**raw, "name": "child"}


def starting(child: dict[str, Any], path: str) -> dict[str, Any]:
    return {**child, "model": {"path": path}}


def refusal(child: dict[str, Any], path: str, **sections: Any) -> str:
    with pytest.raises(smtrain.ConfigError) as caught:
        smtrain.load_config(starting(child, path), **sections)
    [fault] = caught.value.faults
    return fault


def test_every_command_takes_it(child: dict[str, Any]) -> None:
    uri = exported("first")
    config = starting(child, "run://first")
    made = smtrain.plan(config, target="local")
    assert (made.parameters, made.fits) == (smtrain.plan(child, target="local").parameters, True)
    assert made.model == f"first (exported by first-export-{ONE})"
    assert made.model in str(made)
    convert = smtrain.request(config, stage="convert")
    [channel] = [one for one in convert["InputDataConfig"] if one["ChannelName"] == "model"]
    assert channel["DataSource"]["S3DataSource"]["S3Uri"] == uri
    report = smtrain.check(config)
    assert not [fault for fault in report.faults if fault.check != "documents"], (
        report
    )  # its tokenizer is empty
    assert any(
        one.check == "model" and "run://first: " + uri in one.text for one in report.findings
    )
    for name in ("run://first", f"run://first-export-{ONE}", "first"):
        assert find(name).store_copy is not None
    assert (Path(model_folder("run://first")) / "tokenizer.json").read_bytes() == b"{}"


def test_the_newest_export_counts_and_another_parent_is_another_job(child: dict[str, Any]) -> None:
    config = starting(child, "run://again")
    exported("again")
    before = Chain(smtrain.load_config(config), SageMakerBackend("local")).base_name("convert")
    newer = exported("again", TWO)
    chain = Chain(smtrain.load_config(config), SageMakerBackend("local"))
    assert chain.config.model.path == newer
    assert chain.base_name("convert") != before
    named = smtrain.load_config(starting(child, f"run://again-export-{ONE}"))
    assert Chain(named, SageMakerBackend("local")).base_name("convert") == before


def test_what_is_no_model_is_one_sentence_with_a_remedy(child: dict[str, Any]) -> None:
    control = plane()
    control.synthetic_job(lines=1, name=f"bad-train-{ONE}", end="Failed", reason="boom")
    assert (
        f"bad-train-{ONE} failed before a model was exported; `smtrain status bad-train"
        in refusal(child, "run://bad")
    )
    held = control.synthetic_job(lines=1, name=f"slow-train-{ONE}", held=True)
    assert f"slow-train-{ONE} is running; `smtrain logs" in refusal(child, "run://slow")
    control.release(held)
    control.synthetic_job(lines=1, name=f"half-train-{ONE}")
    assert "exported no model" in refusal(child, "run://half")
    control.synthetic_job(lines=1, name=f"gone-export-{ONE}")
    assert "was deleted; `smtrain launch CONFIG --stage export --again`" in refusal(
        child, "run://gone"
    )
    leave(f"gone-export-{ONE}", adapter_config_json=b"{}")
    assert "exported an adapter" in refusal(child, "run://gone")
    exported("twice")
    control.synthetic_job(lines=1, name=f"twice-train-{TWO}")
    clear = refusal(child, "run://twice")
    assert f"trained again by twice-train-{TWO}" in clear
    assert f"run://twice-export-{ONE}" in clear
    smtrain.load_config(starting(child, f"run://twice-export-{ONE}"))
    assert "is a job of stage train; name its run, run://twice" in refusal(
        child, f"run://twice-train-{ONE}"
    )
    assert "did you mean twice?" in refusal(child, "run://twicee")
    assert "there is no such run on this machine; `smtrain list" in refusal(child, "run://zzzz")
    assert "is this run itself" in refusal(child, "run://child")
    assert "must look like run://NAME" in refusal(child, "run://a/b")
    assert "is written run://twice here" in refusal(child, "RUN:twice")


def test_a_shape_that_does_not_fit_is_a_fault(child: dict[str, Any]) -> None:
    exported("odd", max_position_embeddings=16)
    assert "beyond the model's 16 positions" in refusal(child, "run://odd")


def test_the_reference_of_dpo_may_be_a_run_too(child: dict[str, Any]) -> None:
    uri = exported("told")

    def learning(path: str) -> dict[str, Any]:
        return {
            **child,
            "train": {**child["train"], "objective": "dpo", "dpo": {"reference": path}},
        }

    train = Chain(
        smtrain.load_config(learning("run://told")), SageMakerBackend("local")
    ).config.train
    assert train.dpo is not None
    assert train.dpo.reference == uri
    exported("wider", vocab_size=1024)
    for path, why in {
        "run://nowhere": "there is no such run on this machine",
        "run://wider": "is another kind of model than model.path (vocab_size 1024 and 512)",
        "run://a/b": "must look like run://NAME",
    }.items():
        with pytest.raises(smtrain.ConfigError, match=r"^train\.dpo\.reference: run://") as caught:
            smtrain.load_config(learning(path))
        assert why in str(caught.value)


def test_a_run_of_another_target_is_named_with_the_way_to_copy_it(
    child: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exported("here")
    slurm = {"target": "slurm", "cluster": {"shared": str(tmp_path / "shared")}}
    (tmp_path / "shared").mkdir()
    assert "only on this machine; `smtrain download here FOLDER --target local`" in refusal(
        {**child, **slurm}, "run://here"
    )
    REGISTRY.remember(Cluster(shared=str(tmp_path)), f"there-export-{ONE}")
    assert "only on the cluster; `smtrain download there FOLDER --target slurm`" in refusal(
        child, "run://there"
    )
    planned = smtrain.plan(
        starting(child, "run://here"), target="aws"
    )  # its shape is known, without credentials
    assert planned.model.startswith("here ")
