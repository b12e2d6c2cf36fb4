"""The models of AWS's services are read with any AWS settings of the user."""

from __future__ import annotations

import pytest

from smtrain.core.botocore_models import service_model


def test_a_profile_of_the_user_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting from the user's config file is not read."""
    monkeypatch.setenv("AWS_PROFILE", "work")
    service_model.cache_clear()
    assert service_model("sts").service_name == "sts"
