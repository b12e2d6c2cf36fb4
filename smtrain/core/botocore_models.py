"""The descriptions of AWS's services that botocore brings, read once by a process: each session would read its own.

A client of SageMaker or EC2 takes a tenth of a second to describe.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any


def share_models(session: Any) -> None:
    """Have a botocore session take the descriptions that other sessions of this process have read."""
    session.register_component("data_loader", _loader(session.get_config_variable("data_path")))


@cache
def described(service: str) -> Any:
    """botocore's model of a service, whatever the user's own AWS settings are."""
    import botocore.session

    # AWS_PROFILE names a profile of the user's files, which are not read: botocore would say that there is none.
    session = botocore.session.Session(
        session_vars={
            "profile": (None, None, None, None),
            "config_file": (None, None, os.devnull, None),
            "credentials_file": (None, None, os.devnull, None),
        }
    )
    share_models(session)
    return session.get_service_model(service)


@cache
def _loader(data_path: str | None) -> Any:
    import botocore.loaders

    return botocore.loaders.create_loader(data_path)
