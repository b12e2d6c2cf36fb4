"""The parts of a URI, for the client, the control plane and the container alike."""

from __future__ import annotations

HUBS = ("hf://", "modelscope://")
"""Where stage fetch gets a model from: the Hugging Face hub, or a mirror of it, and ModelScope."""


def split_uri(uri: str) -> tuple[str, str]:
    """Bucket and key (or key prefix) of an s3:// URI: `s3://bucket/some/key` gives `("bucket", "some/key")`; of a file://
    URI no bucket, and its path."""
    if uri.startswith("file://"):
        return "", uri.removeprefix("file://")
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    return bucket, key
