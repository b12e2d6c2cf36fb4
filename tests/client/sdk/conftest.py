"""One config with every option set, on AWS, with no requests to anything."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

ROLE = "arn:aws:iam::111122223333:role/training"


@pytest.fixture(scope="session", autouse=True)
def schema_checked_once() -> Iterator[None]:
    """The SDKs validate the same constant schema four times a trainer with jsonschema, which takes
    most of the time of these tests.
    """
    judged: dict[int, Any] = {}
    judge = Draft202012Validator.check_schema

    def once(schema: Any, *rest: Any) -> None:
        if judged.get(id(schema)) is not schema:
            judge(schema, *rest)
            judged[id(schema)] = schema

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Draft202012Validator, "check_schema", staticmethod(once))
        yield


@pytest.fixture(autouse=True)
def no_defaults_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An environment without defaults file, credentials and variables of the user."""
    (tmp_path / "none.yaml").write_text("SchemaVersion: '1.0'\n")
    for name in ("SAGEMAKER_ADMIN_CONFIG_OVERRIDE", "SAGEMAKER_USER_CONFIG_OVERRIDE"):
        monkeypatch.setenv(name, str(tmp_path / "none.yaml"))
    for name in (
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_PROFILE",
        "AWS_REGION",
        "AWS_DEFAULT_REGION",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/dev/null")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture
def plain() -> dict[str, Any]:
    """A config with only the required keys."""
    return {
        "name": "wire",
        "target": "aws",
        "model": {"path": "s3://bucket/model"},
        "data": {"path": "s3://bucket/text"},
        "parallel": {"tp": 2, "pp": 2},
        "train": {"steps": 4, "global_batch_size": 4, "seq_len": 32},
        "compute": {
            "instance_type": "ml.trn1.2xlarge",
            "instance_count": 2,
            "processes_per_instance": 2,
            "role": ROLE,
            "region": "us-west-2",
        },
        "output": {"s3_uri": "s3://bucket/out"},
    }


@pytest.fixture
def full(plain: dict[str, Any]) -> dict[str, Any]:
    """Every option that a request has a field for."""
    return {
        **plain,
        "compute": {
            **plain["compute"],
            "max_run": "2h",
            "max_wait": "5h",
            "spot": True,
            "volume_gb": 512,
            "retries": 7,
            "session_tag_chaining": True,
            "image": "123456789012.dkr.ecr.us-west-2.amazonaws.com/own:sdk2.29.1",
            "environment": {"NCCL_DEBUG": "INFO"},
        },
        "network": {
            "subnets": ["subnet-1", "subnet-2"],
            "security_group_ids": ["sg-1"],
            "isolation": True,
            "encrypt_inter_container_traffic": True,
        },
        "output": {**plain["output"], "kms_key": "arn:aws:kms:us-west-2:111122223333:key/one"},
        "tags": {"team": "llm", "it's": "a 'quoted' value"},
    }
