"""The models of AWS's services are read with any AWS settings of the user."""

from __future__ import annotations

import pytest

from smtrain.core.botocore_models import described


def test_a_profile_of_the_user_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting from the user's config file is not read."""
    monkeypatch.setenv("AWS_PROFILE", "work")
    described.cache_clear()
    assert described("sts").service_name == "sts"
