"""Check once whether S3 answers, before a client would retry for minutes."""

from __future__ import annotations

import glob
import http.client
import os
import ssl
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

PATIENCE_S = 10.0


def s3_outage(uri: str) -> str | None:
    """The reason why S3 cannot be asked about a URI, with a remedy, without full stop; None if it
    answers.

    Any answer counts: the client finds out about permissions.
    """
    if not uri.startswith("s3://"):
        return None
    endpoint = _endpoint()
    if endpoint is None:
        return None
    try:
        request = urllib.request.Request(endpoint, method="HEAD")  # noqa: S310 - from the user's own variables
        urllib.request.urlopen(request, timeout=PATIENCE_S).close()  # noqa: S310
    except urllib.error.HTTPError as error:
        error.close()
        return None
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLError):
            return None
        cause = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
        cause = f"{cause[0].lower()}{cause[1:]}"
        return (
            f"S3 could not be reached at {endpoint} ({cause}); check the network, the proxy and the"
            " region"
        )
    return None


def _endpoint() -> str | None:
    """The endpoint of S3 according to the environment; None if a file may name another."""
    for variable in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
        if set_ := os.environ.get(variable):
            return set_
    files = (os.environ.get("AWS_CONFIG_FILE", "~/.aws/config"), "~/.config/fsspec/*")
    for path in (Path(file) for name in files for file in glob.glob(os.path.expanduser(name))):
        with suppress(OSError):
            if "endpoint_url" in path.read_text("utf-8", "replace"):
                return None
    if any("endpoint_url" in name.lower() for name in os.environ if name.startswith("FSSPEC_")):
        return None
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
    return f"https://s3.{region}.amazonaws.com{'.cn' if region.startswith('cn-') else ''}"
