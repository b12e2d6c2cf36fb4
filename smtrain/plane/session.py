"""A boto3 session that talks to the control plane of this machine and to nothing else."""

from __future__ import annotations

import os
from typing import Any

import boto3
import botocore.session
from botocore.config import Config

from smtrain.core.botocore_models import share_models


def session_of(url: str, region: str, access_key: str, secret_key: str) -> boto3.Session:
    # Neither the user's profile nor their files are looked at; a proxy would send 127.0.0.1 elsewhere.
    isolated = botocore.session.Session(
        session_vars={
            "profile": (None, None, None, None),
            "config_file": (None, None, os.devnull, None),
            "credentials_file": (None, None, os.devnull, None),
        }
    )
    share_models(isolated)
    ours = Config(proxies={}, max_pool_connections=32)

    class LocalSession(boto3.Session):
        def client(self, *args: Any, **kwargs: Any) -> Any:
            return super().client(*args, **_pointed_here(kwargs))

        def resource(self, *args: Any, **kwargs: Any) -> Any:
            return super().resource(*args, **_pointed_here(kwargs))

    def _pointed_here(kwargs: dict[str, Any]) -> dict[str, Any]:
        asked = kwargs.get("config")
        config = ours.merge(asked) if asked is not None else ours
        return {**kwargs, "endpoint_url": url, "config": config}

    return LocalSession(
        botocore_session=isolated,
        aws_access_key_id=access_key,
        aws_secret_access_key=secret_key,
        region_name=region,
    )
