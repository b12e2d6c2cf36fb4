"""A gated model of a hub: its token goes by name, is read in the container, and is nowhere else."""

from __future__ import annotations

import importlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import smtrain
from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.core.config.section import Secret
from smtrain.core.protocol.entrypoints import entrypoints_folder
from tests import as_told
from tests.client.launch.hub import Hub

pytestmark = pytest.mark.slow

TOKEN = "hf_" + "AbCdEfGhIjKlMnOpQrStUvWxYz" + "AbCdEfGh"


@pytest.fixture
def hub(trained_inputs: dict[str, Path]) -> Iterator[Hub]:
    served = Hub(trained_inputs["model"], "org/gated", TOKEN, data=trained_inputs["text"])
    yield served
    served.close()


def config(hub: Hub, text: Path, token: dict[str, str] | None) -> dict[str, Any]:
    return {
        "name": "fetched",
        "model": {"path": "hf://org/gated@main", **({"token": token} if token else {})},
        "data": {"path": text},
        "train": {"seq_len": 32, "steps": 1},
        "compute": {
            "processes_per_instance": 1,
            "environment": {"HF_ENDPOINT": hub.url, "HF_HOME": tempfile.mkdtemp(dir=text.parent)},
        },
    }


@pytest.mark.full
def test_the_token_is_read_in_the_container_and_lies_nowhere(
    hub: Hub, local_home: Path, trained_inputs: dict[str, Path]
) -> None:
    target = SageMakerBackend("local")
    target.client("secretsmanager").create_secret(
        Name="team/hub", SecretString=json.dumps({"token": TOKEN})
    )
    raw = config(hub, trained_inputs["text"], {"secret": "team/hub", "key": "token"})
    assert smtrain.check(raw, stage="fetch").ok
    said: list[str] = []
    job = smtrain.launch(raw, stage="fetch", say=said.append)
    assert hub.tokens == {TOKEN}
    listed = target.s3.list_objects_v2(
        Bucket="smtrain-local", Prefix=job.output.removeprefix("s3://smtrain-local/")
    )
    names = {item["Key"].rpartition("/")[2] for item in listed["Contents"]}
    assert names >= {"config.json", "model.safetensors", "tokenizer.json"}
    # The other stages read the fetched folder, and data of the hub with the same token.
    hub.tokens.clear()
    prepared = smtrain.launch(
        {**raw, "data": {"path": "hf://org/gated"}}, stage="prepare", say=said.append
    )
    assert prepared.status == "Completed"
    assert hub.tokens == {TOKEN}
    assert hub.ranges
    assert TOKEN not in json.dumps([job.describe(), prepared.describe()], default=str)
    assert TOKEN not in "\n".join(said)
    holding = [p for p in local_home.rglob("*") if p.is_file() and TOKEN.encode() in p.read_bytes()]
    assert holding == []


@pytest.mark.parametrize(
    ("token", "reason"),
    [
        pytest.param(
            {"ssm": "/nowhere"},
            r"model\.token: /nowhere could not be read \(ParameterNotFound\)",
            marks=pytest.mark.full,
        ),
        (None, r"hf://org/gated@main could not be fetched \(GatedRepoError\).*model\.token"),
    ],
)
def test_what_went_wrong_is_one_sentence(
    hub: Hub,
    local_home: Path,
    trained_inputs: dict[str, Path],
    token: dict[str, str] | None,
    reason: str,
) -> None:
    with pytest.raises(smtrain.JobError, match=reason):
        smtrain.launch(
            config(hub, trained_inputs["text"], token), stage="fetch", say=lambda _: None
        )


def test_a_token_nobody_keeps_is_found_before_anything_runs(
    hub: Hub, local_home: Path, trained_inputs: dict[str, Path]
) -> None:
    found = smtrain.check(config(hub, trained_inputs["text"], {"ssm": "/nowhere"}), stage="fetch")
    assert [f.text for f in found.faults] == ["there is no SSM parameter /nowhere in us-east-1"]
    SageMakerBackend("local").client("ssm").put_parameter(
        Name="/hub/token", Value=TOKEN, Type="SecureString"
    )
    assert smtrain.check(
        config(hub, trained_inputs["text"], {"ssm": "/hub/token"}), stage="fetch"
    ).ok


def test_a_parameter_is_read_as_a_secret_is(
    local_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_told.tell(monkeypatch)
    monkeypatch.setattr("boto3.DEFAULT_SESSION", None)
    monkeypatch.syspath_prepend(str(entrypoints_folder()))
    read = importlib.import_module("token_by_name").read
    ssm, secrets = (SageMakerBackend("local").client(name) for name in ("ssm", "secretsmanager"))
    ssm.put_parameter(Name="/a/token", Value=f"{TOKEN}\n", Type="SecureString")
    assert read(Secret(ssm="/a/token")) == TOKEN
    arn = secrets.create_secret(Name="plain", SecretString=TOKEN)["ARN"]
    assert read(Secret(secret=arn)) == TOKEN
    with pytest.raises(smtrain.SmtrainError, match="no JSON object with a field 'token'") as caught:
        read(Secret(secret="plain", key="token"))
    assert TOKEN not in str(caught.value)
