"""What a job leaves: /opt/ml/model and /opt/ml/output/data of all hosts, merged, to the request's S3OutputPath.

A link is uploaded as the file that it leads to.
"""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

from smtrain.contract.uris import split_uri
from smtrain.local.files import TRANSFER


def merged(hosts: list[dict[str, Path]]) -> dict[str, Path]:
    """Relative name -> file over all hosts' folders; the first host that has a name wins."""
    files = {name: path for found in reversed(hosts) for name, path in found.items()}
    return dict(sorted(files.items()))


def upload(
    client: Any, request: dict[str, Any], what: str, archive: str, hosts: list[dict[str, Path]], work: Path
) -> str | None:
    """Upload one artefact; gives its URI, or None when the hosts left nothing.

    `hosts` holds the files of each host by name, `what` is the folder name for CompressionType NONE (model, data),
    `archive` the tar.gz name otherwise.
    """
    output = request["OutputDataConfig"]
    base = f"{output['S3OutputPath'].rstrip('/')}/{request['TrainingJobName']}/output"
    bucket, prefix = split_uri(base)
    files = merged(hosts)
    if not files:
        return None
    if output.get("CompressionType") == "NONE":
        for name, path in files.items():
            client.upload_file(str(path), bucket, f"{prefix}/{what}/{name}", Config=TRANSFER)
        return f"{base}/{what}/"
    packed = work / archive
    # Level 1: weights hardly compress, and a laptop waits for this.
    with tarfile.open(packed, "w:gz", compresslevel=1, dereference=True) as tar:
        for name, path in files.items():
            tar.add(path, arcname=name, recursive=False)
    client.upload_file(str(packed), bucket, f"{prefix}/{archive}", Config=TRANSFER)
    packed.unlink()
    return f"{base}/{archive}"
