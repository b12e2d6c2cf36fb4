"""The AWS region of a session that names none."""

from __future__ import annotations

import re
from typing import Any

# Replaces botocore's row, which only knows AWS_DEFAULT_REGION; the AWS CLI and all other SDKs use AWS_REGION.
VARIABLES = {"region": ("region", ["AWS_REGION", "AWS_DEFAULT_REGION"], None, None)}
UNKNOWN = (
    "compute.region: is not set, nor are AWS_REGION, AWS_DEFAULT_REGION or a region of the AWS profile, and this "
    "machine is no instance of AWS; set one"
)
_REGION = re.compile(r"[a-z]{2}(-[a-z]+)+-\d+")
_SETTINGS = ("ec2_metadata_service_endpoint", "ec2_metadata_service_endpoint_mode", "ec2_metadata_v1_disabled")


def region_of(session: Any) -> str | None:
    """The region of a botocore session that was made with `VARIABLES`: AWS_REGION, else AWS_DEFAULT_REGION, else the
    profile (AWS_PROFILE, SSO or not), else that of the EC2 or notebook instance.

    Looking for an instance takes two seconds if this machine is none.
    """
    from botocore.utils import InstanceMetadataRegionFetcher

    if known := session.get_config_variable("region"):
        return str(known)
    settings = {name: session.get_config_variable(name) for name in _SETTINGS}
    fetcher: Any = InstanceMetadataRegionFetcher
    own = fetcher(timeout=1, num_attempts=1, config=settings).retrieve_region()
    return own if own and _REGION.fullmatch(own) else None
