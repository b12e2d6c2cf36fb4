"""Read a secret by its name with the job's own role.

Next to the entry scripts, because the package's worker half imports no AWS client.
"""

from __future__ import annotations

import json
import os

from smtrain.core.config.section import Secret
from smtrain.core.errors import SmtrainError


def read(name: Secret) -> str:
    """The secret's text.

    Raises `SmtrainError`, without the text, if it does not exist or the role may not read it.
    """
    import boto3
    from botocore.exceptions import BotoCoreError, ClientError

    secret_id = name.secret or name.ssm or ""
    # An ARN has its own region: arn:partition:service:region:...
    region = (
        secret_id.split(":")[3] if secret_id.startswith("arn:") else os.environ.get("AWS_REGION")
    )
    try:
        if name.secret:
            text = boto3.client("secretsmanager", region_name=region).get_secret_value(
                SecretId=secret_id
            )["SecretString"]
        else:
            client = boto3.client("ssm", region_name=region)
            text = client.get_parameter(Name=secret_id, WithDecryption=True)["Parameter"]["Value"]
    except ClientError as error:
        raise SmtrainError(
            f"model.token: {secret_id} could not be read ({error.response['Error'].get('Code')});"
            " check the name, and let the role read it (`smtrain iam policy CONFIG --role`)"
        ) from None
    except (BotoCoreError, KeyError) as error:
        raise SmtrainError(
            f"model.token: {secret_id} could not be read ({type(error).__name__})"
        ) from None
    if name.key is None:
        return str(text).strip()
    try:
        return str(json.loads(text)[name.key]).strip()
    except (ValueError, KeyError, TypeError):
        raise SmtrainError(
            f"model.token: {secret_id} is no JSON object with a field {name.key!r}"
        ) from None
