"""MlflowConfig and ModelPackageConfig, answered as AWS documents them."""

from __future__ import annotations

from typing import Any

from testing.plane import Plane

from .conftest import Client, refused

MLFLOW = "arn:aws:sagemaker:us-east-1:123456789012:mlflow-app/ours"
GROUP = "arn:aws:sagemaker:us-east-1:123456789012:model-package-group/ours"


def test_a_completed_job_makes_a_version_in_its_group(plane: Plane, client: Client) -> None:
    config: dict[str, Any] = {"ModelPackageGroupArn": GROUP}
    code, told = refused(lambda: client.start("true", ModelPackageConfig=config))
    assert code == "ValidationException"
    assert f"Model Package Group {GROUP} does not exist" in told
    client.sagemaker.create_model_package_group(ModelPackageGroupName="ours")
    job = client.completed("true", ModelPackageConfig=config)
    assert job["ModelPackageConfig"] == config
    package = client.sagemaker.describe_model_package(ModelPackageName=job["OutputModelPackageArn"])
    (container,) = package["InferenceSpecification"]["Containers"]
    source = container["ModelDataSource"]["S3DataSource"]
    assert source["S3Uri"] == job["ModelArtifacts"]["S3ModelArtifacts"]
    assert package["ModelPackageVersion"] == 1
    failed = client.run("false", ModelPackageConfig=config)
    assert failed["TrainingJobStatus"] == "Failed"
    assert "OutputModelPackageArn" not in failed


def test_mlflow_is_accepted_and_its_details_answered(client: Client) -> None:
    config = {"MlflowResourceArn": MLFLOW, "MlflowExperimentName": "smtrain"}
    job = client.completed("true", MlflowConfig=config)
    assert job["MlflowConfig"] == config
    assert set(job["MlflowDetails"]) == {"MlflowExperimentId", "MlflowRunId"}
