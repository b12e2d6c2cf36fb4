"""`model.path: jumpstart://MODEL_ID[@VERSION]`: JumpStart's public bucket, with its documented layout,
on the local control plane.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import smtrain
from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.client.jobs import jumpstart
from smtrain.client.launch.stages import Chain
from smtrain.core.demo import materialise

BUCKET = "jumpstart-cache-prod-us-east-1"
MODEL = "meta-textgeneration-tiny-llama"
EULA = "fmhMetadata/eula/tinyEula.txt"


def header(model_id: str, version: str) -> dict[str, Any]:
    """A row of models_manifest.json."""
    spec_key = f"community_models_specs/{model_id}/specs_v{version}.json"
    return {
        "model_id": model_id,
        "version": version,
        "min_version": "2.49.0",
        "spec_key": spec_key,
        "search_keywords": [],
    }


@pytest.fixture
def bucket(local_home: Path, model_folder: Path) -> SageMakerBackend:
    """JumpStart's bucket: two versions of a model, a gated one and one in an archive."""
    place = SageMakerBackend("local")
    place.s3.create_bucket(Bucket=BUCKET)  # nothing happens if it is there
    jumpstart._MODELS.clear()

    def put(key: str, body: bytes) -> None:
        place.s3.put_object(Bucket=BUCKET, Key=key, Body=body)

    folder = f"meta-textgeneration/{MODEL}/artifacts/inference-prepack/"
    specs: dict[tuple[str, str], dict[str, Any]] = {
        (MODEL, "1.0.0"): {"hosting_prepacked_artifact_key": f"{folder}v1.0.0/"},
        (MODEL, "1.10.0"): {
            "hosting_prepacked_artifact_key": f"{folder}v1.1.0/",
            "training_artifact_key": f"meta-training/train-{MODEL}.tar.gz",
        },
        ("meta-textgeneration-gated", "2.0.0"): {
            "gated_bucket": True,
            "hosting_eula_key": EULA,
            "hosting_artifact_key": "meta-textgeneration/gated/artifacts/v2.0.0/",
        },
        ("huggingface-packed", "1.0.0"): {"hosting_artifact_key": "packed/infer.tar.gz"},
    }
    put("models_manifest.json", json.dumps([header(*key) for key in specs]).encode())
    for key, spec in specs.items():
        row = header(*key)
        put(row["spec_key"], json.dumps({"model_id": key[0], "version": key[1], **spec}).encode())
    for version in ("v1.0.0", "v1.1.0"):
        for file in model_folder.iterdir():
            put(f"{folder}{version}/{file.name}", file.read_bytes())
    return place


@pytest.fixture
def config(raw: dict[str, Any], bucket: SageMakerBackend) -> dict[str, Any]:
    return {**raw, "target": "local", "model": {"path": f"jumpstart://{MODEL}"}}


@pytest.mark.parametrize(
    ("version", "folder"), [("", "v1.1.0"), ("@1.0.0", "v1.0.0"), ("@1.0*", "v1.0.0")]
)
def test_a_version_is_its_folder_in_the_bucket(
    config: dict[str, Any], bucket: SageMakerBackend, version: str, folder: str
) -> None:
    config["model"]["path"] += version
    chain = Chain(smtrain.load_config(config), bucket, look=False)
    uri = f"s3://{BUCKET}/meta-textgeneration/{MODEL}/artifacts/inference-prepack/{folder}/"
    assert chain.config.model.path == uri
    assert "fetch" not in [stage for stage in ("fetch", "convert") if chain.has(stage)]
    channels = {
        channel["ChannelName"]: channel["DataSource"]["S3DataSource"]["S3Uri"]
        for channel in chain.plan("convert").request["InputDataConfig"]
    }
    assert channels["model"] == uri
    assert chain.resolved.model_config
    assert chain.resolved.model_config["model_type"] == "llama"


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        (
            "meta-textgeneration-tiny-lama",
            f"has no model meta-textgeneration-tiny-lama; did you mean {MODEL}",
        ),
        (f"{MODEL}@3.0.0", "JumpStart has no such version; it has 1.0.0, 1.10.0"),
        ("meta-textgeneration-gated", rf"gated 2.0.0 is gated: .*\(s3://{BUCKET}/{EULA}\)"),
        (
            "huggingface-packed",
            r"no folder with a config.json \(packed/infer.tar.gz is an archive\)",
        ),
        ("two words", "must look like jumpstart://MODEL_ID"),
    ],
    ids=["wrong id", "wrong version", "gated", "archive", "no id"],
)
def test_another_model_is_refused_in_one_sentence(
    config: dict[str, Any], path: str, sentence: str
) -> None:
    config["model"]["path"] = f"jumpstart://{path}"
    with pytest.raises(smtrain.ConfigError, match=sentence) as caught:
        smtrain.request(config)
    assert len(caught.value.faults) == 1


def test_a_bucket_that_is_not_there_is_said(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jumpstart, "JUMPSTART_BUCKET", "jumpstart-nowhere-")
    jumpstart._MODELS.clear()
    with pytest.raises(smtrain.SmtrainError, match=r"models_manifest\.json cannot be read"):
        smtrain.request(config)


@pytest.mark.full
def test_a_conversion_reads_the_models_folder(
    config: dict[str, Any], bucket: SageMakerBackend
) -> None:
    """As it reads a folder that stage fetch wrote from the hub."""
    folder = f"meta-textgeneration/{MODEL}/artifacts/inference-prepack/v1.1.0/"
    for file in materialise("demo://tiny-llama").iterdir():
        bucket.s3.put_object(Bucket=BUCKET, Key=f"{folder}{file.name}", Body=file.read_bytes())
    job = smtrain.launch(config, stage="convert", say=lambda _: None)
    assert job.status == "Completed", job.failure
    assert any(
        "shards" in item["Key"] or ".pt" in item["Key"] for item in bucket.listing(job.output)
    )
