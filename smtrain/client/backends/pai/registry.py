"""Jobs that were submitted to PAI-DLC from here."""

from __future__ import annotations

from smtrain.client.backends.job_registry import JobRegistry
from smtrain.core.config.pai import Pai
from smtrain.core.protocol.uris import OSS


def _pai(text: str) -> Pai:
    region, _, bucket_path = text.partition(f"={OSS}")
    region, _, workspace = region.partition("/")
    return Pai(region=region, workspace=workspace or None, storage=f"{OSS}{bucket_path}")


REGISTRY = JobRegistry(
    "pai-dlc",
    Pai,
    "SMTRAIN_PAI",
    _pai,
    "cn-beijing=oss://my-bucket/smtrain, or cn-beijing/WORKSPACE=oss://...",
    "no place on PAI-DLC is known here; start a run with --target pai-dlc, or set "
    "SMTRAIN_PAI=cn-beijing=oss://my-bucket/smtrain",
)
