"""Real clients with only the environment that `smtrain local env` prints."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from smtrain.cli.local import env, status
from smtrain.plane.client import Endpoint, running_endpoint
from tests import as_told

from .conftest import Client


@pytest.fixture
def of_home(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> Endpoint:
    """The control plane of SMTRAIN_HOME."""
    monkeypatch.setenv("SMTRAIN_HOME", str(endpoint.home))
    return endpoint


def test_status_shows_no_secret_and_says_how_to_get_it(
    of_home: Endpoint, capsys: pytest.CaptureFixture[str]
) -> None:
    status(secrets=False)
    output = capsys.readouterr().out
    assert of_home.secret_key not in output
    assert f"export AWS_ENDPOINT_URL={of_home.url}" in output
    assert 'eval "$(smtrain local env)"' in output
    assert "--secrets" in output
    status(secrets=True)
    assert f"export AWS_SECRET_ACCESS_KEY={of_home.secret_key}\n" in capsys.readouterr().out


def test_nothing_else_that_shows_an_endpoint_shows_its_secret(of_home: Endpoint) -> None:
    shown = [
        repr(of_home),
        str(of_home),
        f"{of_home}",
        repr(of_home.session()),
        repr(running_endpoint(of_home.home)),
    ]
    log = (of_home.home / "local" / "server.log").read_text()
    config = (of_home.home / "local" / "aws_config").read_text()
    assert [text for text in (*shown, log, config) if of_home.secret_key in text] == []


def test_a_shell_that_evaluates_env_has_the_public_environment(
    of_home: Endpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also if the user's settings contain special characters of the shell."""
    monkeypatch.setenv("NO_PROXY", "it's $HOME; `id`")
    env()
    lines = capsys.readouterr().out
    program = "import json, os; print(json.dumps(dict(os.environ)))"
    done = subprocess.run(
        ["bash", "-c", f'eval "$1"; exec {sys.executable} -c "$2"', "bash", lines, program],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
    )
    seen = json.loads(done.stdout)
    expected = of_home.environment()
    assert {name: seen[name] for name in expected} == expected


def test_env_starts_the_control_plane(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from smtrain.plane.client import shut_down

    monkeypatch.setenv("SMTRAIN_HOME", str(tmp_path))
    try:
        env()
        endpoint = running_endpoint(tmp_path)
        assert endpoint is not None
        assert f"export AWS_ENDPOINT_URL={endpoint.url}\n" in capsys.readouterr().out
    finally:
        shut_down(tmp_path)


@pytest.mark.skipif(shutil.which("aws") is None, reason="there is no AWS CLI")
def test_the_aws_cli(client: Client) -> None:
    def aws(*words: str) -> str:
        done = subprocess.run(
            ["aws", *words, "--output", "json"],
            env=as_told.environment(client.endpoint),
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout if done.returncode == 0 else done.stderr

    client.put("cli/a", b"x")
    listed = json.loads(
        aws("s3api", "list-objects-v2", "--bucket", client.bucket, "--prefix", "cli/")
    )
    assert [item["Key"] for item in listed["Contents"]] == ["cli/a"]
    refused = aws("sagemaker", "list-clusters")
    assert "(NotImplemented)" in refused
    assert "sagemaker:ListClusters cannot be called" in refused


V3 = """
import sys
from sagemaker.core.helper.session_helper import Session
from sagemaker.core.training.configs import Compute, OutputDataConfig
from sagemaker.train import ModelTrainer

session = Session()
assert session.default_bucket() == sys.argv[2]
for role in sys.argv[3:]:
    try:
        ModelTrainer(
            training_image="image", role=role, sagemaker_session=session, base_job_name="v3",
            compute=Compute(instance_type="ml.m5.large", instance_count=1),
            output_data_config=OutputDataConfig(s3_output_path=f"s3://{sys.argv[2]}/out"),
        )
        print("MADE", role)
    except Exception as error:
        print("REFUSED", role, type(error).__name__)
"""


@pytest.mark.slow
# the gate has ModelTrainer in tests/client/sdk, and the policies in test_simulator.py
@pytest.mark.full
def test_a_model_trainer_of_sdk_v3_validates_its_role(client: Client, tmp_path: Path) -> None:
    """It simulates the role's policies: the default role passes, one without permissions does
    not.
    """
    pytest.importorskip("sagemaker.train")
    trust = {
        "Effect": "Allow",
        "Principal": {"Service": "sagemaker.amazonaws.com"},
        "Action": "sts:AssumeRole",
    }
    iam = client.endpoint.session().client("iam")
    poor = iam.create_role(
        RoleName="v3-poor", AssumeRolePolicyDocument=json.dumps({"Statement": [trust]})
    )["Role"]["Arn"]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", V3, "v3", client.bucket, client.endpoint.role, poor],
        cwd=tmp_path,
        env=as_told.environment(client.endpoint),
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(("MADE", "REFUSED"))]
    assert lines == [
        f"MADE {client.endpoint.role}",
        f"REFUSED {poor} RoleValidationError",
    ], done.stderr[-2000:]
