"""Policies for pods of a Kubernetes cluster: the service account's role, its trust, the caller."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from smtrain.cli.iam import app
from smtrain.client.iam import policies
from testing.kubernetes_api import StandInCluster
from tests.client.backends.kubernetes.conftest import BOX, cluster  # noqa: F401

ARN = "arn:aws-cn:eks:cn-north-1:123456789012:cluster/team"


@pytest.fixture
def raw() -> dict[str, Any]:
    return {
        "name": "own",
        "target": "kubernetes",
        "machines": {"box": BOX},
        "model": {"path": "s3://models/llama/"},
        "data": {"path": "s3://bucket/smtrain/texts/"},
        "compute": {"instance_type": "box", "image": "registry/train:1"},
        "kubernetes": {
            "namespace": "team-a",
            "service_account": "trainer",
            "storage": "s3://bucket/smtrain",
            "resources": {"cpu": "4"},
        },
    }


def test_the_role_may_use_the_storage_and_read_the_inputs(
    raw: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))  # no cluster is needed
    found = policies(raw)
    assert {one["Sid"]: one["Resource"] for one in found["role"]["Statement"]} == {
        "UseStorage": ["arn:aws:s3:::bucket/smtrain/*"],
        "List": ["arn:aws:s3:::bucket"],
        "List1": ["arn:aws:s3:::models"],
        "ReadInputs": ["arn:aws:s3:::models/llama/*"],
    }
    by_token, by_agent = found["trust"]["Statement"]
    issuer = "oidc.eks.REGION.amazonaws.com/id/ISSUER_ID"
    assert by_token["Principal"]["Federated"] == f"arn:aws:iam::ACCOUNT:oidc-provider/{issuer}"
    assert by_token["Condition"]["StringEquals"] == {
        f"{issuer}:aud": "sts.amazonaws.com",
        f"{issuer}:sub": "system:serviceaccount:team-a:trainer",
    }
    assert by_agent["Principal"] == {"Service": "pods.eks.amazonaws.com"}
    assert found["caller"]["Statement"][-1]["Action"] == ["eks:DescribeCluster"]
    raw["kubernetes"]["context"] = ARN
    found = policies(raw)
    federated = found["trust"]["Statement"][0]["Principal"]["Federated"]
    assert federated.startswith("arn:aws-cn:iam::123456789012:oidc-provider/oidc.eks.cn-north-1.")
    assert found["caller"]["Statement"][-1]["Resource"] == [ARN]


def test_the_command_asks_the_cluster_for_its_issuer(
    cluster: StandInCluster,  # noqa: F811
    raw: dict[str, Any],
    tmp_path: Path,
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(raw))
    result = CliRunner().invoke(app, ["policy", str(file), "--trust"])
    assert result.exit_code == 0, result.output
    by_token, _ = json.loads(result.stdout)["Statement"]
    issuer = "oidc.eks.us-east-1.amazonaws.com/id/0123456789ABCDEF"
    assert by_token["Principal"]["Federated"] == f"arn:aws:iam::ACCOUNT:oidc-provider/{issuer}"
