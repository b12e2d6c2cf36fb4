"""The list of a stage's uploads with their digests, which the container compares
(entrypoints/uploads.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from smtrain.client.backends.base import size_of
from smtrain.client.launch.inputs import Upload

UPLOADS = "uploads.json"
"""Its name, next to the stage's config."""


def upload_digests(inputs: Mapping[str, str], uploads: Sequence[Upload], config: Upload) -> bytes:
    """The content of uploads.json: size and SHA-256 of each uploaded file of a stage, by its
    channel.

    Args:
        inputs: The s3:// prefix of each channel; prefixes of no upload are left out.
        uploads: The uploads of the run.
        config: The upload of the stage's config.
    """
    by_uri = {upload.uri: upload for upload in uploads}
    uploads_by_input = {name: by_uri[uri] for name, uri in inputs.items() if uri in by_uri} | {
        "config": config
    }
    entries = {
        name: {
            "uri": upload.uri,
            "files": {
                file: [size_of(body), digest]
                for (file, body), digest in zip(upload.files, upload.digests, strict=True)
            },
        }
        for name, upload in uploads_by_input.items()
    }
    return (json.dumps(entries, indent=1, sort_keys=True) + "\n").encode()
