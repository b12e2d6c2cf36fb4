"""Requests are held against the service's model: every pattern of any operation can be read, and still refuses."""

from __future__ import annotations

import botocore.session
import pytest

from smtrain.plane.server.validation import _compiled, fault_of

PACKAGE = {"ModelPackageGroupName": "group", "SourceUri": "arn:aws:sagemaker:us-east-1:123456789012:training-job/x"}


@pytest.mark.parametrize("service", ["sagemaker", "logs", "iam", "scheduler", "cloudwatch"])
def test_every_pattern_of_a_service_can_be_read(service: str) -> None:
    model = botocore.session.get_session().get_service_model(service)
    patterns = {str(model.shape_for(name).metadata.get("pattern") or "") for name in model.shape_names}
    assert len(patterns) > 3
    for pattern in patterns:
        _compiled(pattern)


def test_letters_of_any_script_and_signs_pass_where_the_model_has_their_classes() -> None:
    asked = {**PACKAGE, "ModelPackageDescription": "modèle, 模型: 100 %!"}
    assert fault_of("sagemaker", "CreateModelPackage", asked) is None
    fault = fault_of("sagemaker", "CreateModelPackage", {**PACKAGE, "ModelPackageDescription": "a\x00b"})
    assert fault is not None
    assert "modelPackageDescription" in fault
