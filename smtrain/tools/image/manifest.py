"""How large an image is, told by its registry before a byte of it is fetched: the Distribution API, without a login."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

SECONDS = 20
MOST = 4 << 20
"""Bytes of an answer that are read: manifests are kilobytes."""
_KINDS = ", ".join(
    f"application/vnd.{kind}+json"
    for kind in (
        "docker.distribution.manifest.v2", "docker.distribution.manifest.list.v2",
        "oci.image.manifest.v1", "oci.image.index.v1",
    )
)  # fmt: skip
_HUB = "registry-1.docker.io"


def layers_size(name: str, architecture: str) -> int | None:
    """Bytes of the compressed layers of `name` for a processor (`amd64`).

    None where the registry does not say: it wants a login, does not have the image, or does not answer.
    """
    registry, repository, tag = parts(name)
    try:
        manifest = _manifest(registry, repository, tag)
        for entry in manifest.get("manifests") or []:
            if (entry.get("platform") or {}).get("architecture") == architecture:
                manifest = _manifest(registry, repository, entry["digest"])
                break
        return sum(int(layer["size"]) for layer in manifest.get("layers") or []) or None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def parts(name: str) -> tuple[str, str, str]:
    """Registry, repository and tag or digest, as Docker understands an image's name."""
    name, _, digest = name.partition("@")
    head, _, rest = name.partition("/")
    if not rest or not ("." in head or ":" in head or head == "localhost"):
        head, rest = "docker.io", name if "/" in name else f"library/{name}"
    repository, _, tag = rest.partition(":")
    return (_HUB if head in ("docker.io", "index.docker.io") else head), repository, digest or tag or "latest"


def _manifest(registry: str, repository: str, reference: str) -> dict[str, Any]:
    # As Docker does: plain HTTP on this machine alone.
    here = registry.partition(":")[0] in ("localhost", "127.0.0.1")
    url = f"http{'' if here else 's'}://{registry}/v2/{repository}/manifests/{reference}"
    try:
        return _json(url, {"Accept": _KINDS})
    except urllib.error.HTTPError as error:
        with error:
            challenge = error.headers.get("WWW-Authenticate", "")
        if error.code != 401 or not challenge.lower().startswith("bearer "):
            raise
    asked = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
    query = urllib.parse.urlencode({key: asked[key] for key in ("service", "scope") if key in asked})
    if urllib.parse.urlsplit(asked["realm"]).scheme != "https" and not here:
        raise OSError("a token that is sent unencrypted")
    told = _json(f"{asked['realm']}?{query}", {})
    token = told.get("token") or told["access_token"]
    return _json(url, {"Accept": _KINDS, "Authorization": f"Bearer {token}"})


def _json(url: str, headers: dict[str, str]) -> dict[str, Any]:
    """What a registry answers. Raises OSError or ValueError."""
    asked = urllib.request.Request(url, headers=headers)  # noqa: S310 - the registry that the user named
    with urllib.request.urlopen(asked, timeout=SECONDS) as answer:  # noqa: S310
        told: dict[str, Any] = json.loads(answer.read(MOST))
    return told
