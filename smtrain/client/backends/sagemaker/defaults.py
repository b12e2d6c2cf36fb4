"""SageMaker's defaults file ("intelligent defaults"), read once for every way to send a request.

Each SDK applies a part of it by different rules, and boto3 does not apply it. So smtrain reads it:
values that the config leaves open are filled in before the request is built, a dry run shows them,
and the SDKs have nothing to add.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.client.config.checks import secret_faults
from smtrain.core.config import JobConfig
from smtrain.core.config.secrets import hide
from smtrain.core.errors import ConfigError
from smtrain.core.protocol.uris import split_uri
from smtrain.core.text import with_article
from smtrain.core.yaml_text import YamlError, parse

# The keys that are read; each mapping comes before its own keys.
_KINDS: dict[str, type] = {
    "TrainingJob": dict,
    "TrainingJob.RoleArn": str,
    "TrainingJob.Environment": dict,
    "TrainingJob.Tags": list,
    "TrainingJob.EnableNetworkIsolation": bool,
    "TrainingJob.EnableInterContainerTrafficEncryption": bool,
    "TrainingJob.VpcConfig": dict,
    "TrainingJob.VpcConfig.Subnets": list,
    "TrainingJob.VpcConfig.SecurityGroupIds": list,
    "TrainingJob.OutputDataConfig": dict,
    "TrainingJob.OutputDataConfig.S3OutputPath": str,
    "TrainingJob.OutputDataConfig.KmsKeyId": str,
    "TrainingJob.ResourceConfig": dict,
    "TrainingJob.ResourceConfig.VolumeKmsKeyId": str,
    "PythonSDK": dict,
    "PythonSDK.Modules": dict,
    "PythonSDK.Modules.Session": dict,
    "PythonSDK.Modules.Session.DefaultS3Bucket": str,
    "PythonSDK.Modules.Session.DefaultS3ObjectKeyPrefix": str,
}


def sagemaker_defaults(target: SageMakerBackend) -> dict[str, Any]:
    """The section SageMaker of the administrator's file, with the user's merged over it; empty
    without files.

    Files are looked up as the SDKs do: SAGEMAKER_ADMIN_CONFIG_OVERRIDE and
    SAGEMAKER_USER_CONFIG_OVERRIDE (a file, a folder or an s3:// URI), else sagemaker/config.yaml in
    the configuration folders of the site and of the user. Raises `ConfigError` for a file that
    cannot be read.
    """
    import platformdirs

    defaults: dict[str, Any] = {}
    for variable, folder in (
        ("SAGEMAKER_ADMIN_CONFIG_OVERRIDE", platformdirs.site_config_dir("sagemaker")),
        ("SAGEMAKER_USER_CONFIG_OVERRIDE", platformdirs.user_config_dir("sagemaker")),
    ):
        variable_path = os.environ.get(variable)
        path = variable_path or folder
        text = _read(target, path, must_exist=variable_path is not None)
        try:
            content = parse(text) if text else {}
            section = content.get("SageMaker") or {}
            defaults = _merge(defaults, _validate_section(section))
        except (YamlError, AttributeError, TypeError) as error:
            reason = f" ({error})" if isinstance(error, (YamlError, TypeError)) else ""
            raise ConfigError(
                [
                    hide(
                        f"{path}: is not a SageMaker defaults file{reason}; correct it or unset"
                        f" {variable}"
                    )
                ],
                code="config.unreadable",
            ) from None
    return defaults


def _validate_section(section: dict[str, Any]) -> dict[str, Any]:
    """The section SageMaker.

    Raises `TypeError` if such a key has a value of the wrong type.
    """
    for way, kind in _KINDS.items():
        value: Any = section
        for key in way.split("."):
            value = value.get(key) if value is not None else None
        if value is not None and not isinstance(value, kind):
            raise TypeError(
                f"{way} is {with_article(type(value).__name__)}, not {with_article(kind.__name__)}"
            )
    job = section.get("TrainingJob") or {}
    if not all(
        isinstance(tag, dict) and isinstance(tag.get("Key"), str) for tag in job.get("Tags") or []
    ):
        raise TypeError("TrainingJob.Tags is not a list of Key and Value")
    return section


def with_defaults(config: JobConfig, defaults: dict[str, Any]) -> JobConfig:
    """The config, with everything that it leaves open taken from SageMaker's defaults.

    Raises `ConfigError` if the defaults contain a secret in plain text.
    """
    job = defaults.get("TrainingJob") or {}
    vpc, output = job.get("VpcConfig") or {}, job.get("OutputDataConfig") or {}
    session = ((defaults.get("PythonSDK") or {}).get("Modules") or {}).get("Session") or {}
    network: dict[str, Any] = {}
    if not config.network.subnets and vpc:
        network["subnets"] = tuple(vpc.get("Subnets") or ())
        network["security_group_ids"] = tuple(vpc.get("SecurityGroupIds") or ())
    for field, key in (
        ("isolation", "EnableNetworkIsolation"),
        ("encrypt_inter_container_traffic", "EnableInterContainerTrafficEncryption"),
    ):
        if field not in config.network.model_fields_set and key in job:
            network[field] = bool(job[key])
    bucket = session.get("DefaultS3Bucket")
    prefix = "/".join(filter(None, [bucket, session.get("DefaultS3ObjectKeyPrefix"), "smtrain"]))
    place = output.get("S3OutputPath") or (f"s3://{prefix}" if bucket else None)
    volume_key = (job.get("ResourceConfig") or {}).get("VolumeKmsKeyId")
    tags = {tag["Key"]: tag.get("Value", "") for tag in job.get("Tags") or []}
    full_config = config.model_copy(
        update={
            "compute": config.compute.model_copy(
                update={
                    "role": config.compute.role or job.get("RoleArn"),
                    "environment": {**(job.get("Environment") or {}), **config.compute.environment},
                }
            ),
            "network": config.network.model_copy(update=network),
            "output": config.output.model_copy(
                update={
                    "s3_uri": config.output.s3_uri or place,
                    "kms_key": config.output.kms_key or output.get("KmsKeyId"),
                    "volume_kms_key": config.output.volume_kms_key or volume_key,
                }
            ),
            "tags": {**tags, **config.tags},
        }
    )
    if faults := [text for _, text in secret_faults(full_config)]:
        raise ConfigError(
            [hide(f"SageMaker's defaults file, {text}") for text in faults], code="config.secret"
        )
    return full_config


def _read(target: SageMakerBackend, path: str, *, must_exist: bool) -> str | None:
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        if path.startswith("s3://"):
            bucket, key = split_uri(path)
            key = (
                key
                if key.endswith((".yaml", ".yml"))
                else f"{key.rstrip('/')}/config.yaml".lstrip("/")
            )
            body: bytes = target.s3.get_object(Bucket=bucket, Key=key)["Body"].read()
            return body.decode()
        file = Path(path).expanduser()
        file = file / "config.yaml" if file.is_dir() or not must_exist else file
        return file.read_text("utf-8") if must_exist or file.is_file() else None
    except (OSError, UnicodeDecodeError, BotoCoreError, ClientError) as error:
        raise ConfigError(
            f"{path}: SageMaker's defaults file cannot be read ({error}); correct the path",
            code="config.unreadable",
        ) from None


def _merge(base: dict[str, Any], override: dict[str, Any]) -> dict[str, Any]:
    """Merge mappings; any other value in `override` replaces the one in `base`."""
    result = dict(base)
    for key, value in override.items():
        are_mappings = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = _merge(result[key], value) if are_mappings else value
    return result
