"""Share botocore's models of AWS services between sessions, which each read their own (0.1 s for
SageMaker or EC2).
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any


def share_models(session: Any) -> None:
    """Let a botocore session use the models that other sessions of this process have read."""
    session.register_component("data_loader", _loader(session.get_config_variable("data_path")))


@cache
def service_model(service: str) -> Any:
    """botocore's model of a service, independent of the user's AWS settings."""
    return isolated_session().get_service_model(service)


def isolated_session() -> Any:
    """A botocore session that reads no file of the user, and shares its models."""
    import botocore.session

    # Without its files botocore would not find the profile in AWS_PROFILE and raise.
    session = botocore.session.Session(
        session_vars={
            "profile": (None, None, None, None),
            "config_file": (None, None, os.devnull, None),
            "credentials_file": (None, None, os.devnull, None),
        }
    )
    share_models(session)
    return session


@cache
def _loader(data_path: str | None) -> Any:
    import botocore.loaders

    return botocore.loaders.create_loader(data_path)
