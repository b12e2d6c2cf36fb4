"""Images in a registry: size, pull and push, with a login at Amazon ECR by the caller's own
credentials.
"""

from __future__ import annotations

import base64
import http.client
import json
import re
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from smtrain.core.config.units import spell_bytes
from smtrain.core.errors import LocalError
from smtrain.core.facts.images import ecr_image
from smtrain.core.text import Say
from smtrain.plane.docker import architecture, explain_docker_errors, free_bytes, program, sentence

SECONDS = 20
ANSWER_LIMIT = 4 << 20
"""Bytes of an answer that are read: manifests are kilobytes."""
_KINDS = ", ".join(
    f"application/vnd.{kind}+json"
    for kind in (
        "docker.distribution.manifest.v2",
        "docker.distribution.manifest.list.v2",
        "oci.image.manifest.v1",
        "oci.image.index.v1",
    )
)
_HUB = "registry-1.docker.io"
UNPACK_RATIO = 2.5
"""Bytes on a disk for one byte of compressed layers, about, of AWS's training images."""


def ecr_of(name: str) -> Any:
    """A client of the registry in an image's name; None if it is not Amazon ECR."""
    image = ecr_image(name)
    if image is None:
        return None
    from smtrain.client.backends.sagemaker.backend import SageMakerBackend

    return SageMakerBackend("aws", region=image.region).client("ecr")


def size_of(client: Any, ecr: Any, name: str) -> int | None:
    """Bytes of an image's compressed layers in its registry; None if the registry does not say.

    Raises `LocalError` if Amazon ECR does not have it.
    """
    image = ecr_image(name)
    if image is None or ecr is None:
        return layers_size(name, architecture(client))
    query = image.query
    manifest = _in_ecr(ecr, query, name)
    for entry in manifest.get("manifests", []):
        if entry.get("platform", {}).get("architecture") == architecture(client):
            manifest = _in_ecr(ecr, {**query, "imageIds": [{"imageDigest": entry["digest"]}]}, name)
            break
    return sum(layer["size"] for layer in manifest.get("layers", [])) or None


def _in_ecr(ecr: Any, query: dict[str, Any], name: str) -> dict[str, Any]:
    """A manifest. Raises `LocalError` if it does not exist."""
    answer = ecr.batch_get_image(**query)
    if answer.get("failures") or not answer.get("images"):
        code = (answer.get("failures") or [{}])[0].get("failureCode", "ImageNotFound")
        raise LocalError(
            f"{name} is not in its registry ({code}); `smtrain images` lists those of AWS"
        )
    manifest: dict[str, Any] = json.loads(answer["images"][0]["imageManifest"])
    return manifest


def login(ecr: Any, name: str) -> dict[str, str] | None:
    """Credentials for Amazon ECR, valid for twelve hours; they go to Docker with the call and are
    not stored.
    """
    image = ecr_image(name)
    if image is None or ecr is None:
        return None
    answer = ecr.get_authorization_token(registryIds=[image.account])
    user, _, password = (
        base64.b64decode(answer["authorizationData"][0]["authorizationToken"])
        .decode()
        .partition(":")
    )
    return {"username": user, "password": password}


def pull(client: Any, ecr: Any, name: str, say: Say) -> None:
    """Pull an image. Raises `LocalError` if there is no room, no permission or no such image."""
    size, free = size_of(client, ecr, name), free_bytes(client)
    if size and free is not None and size * (1 + UNPACK_RATIO) > free:
        raise LocalError(
            f"{name} is {spell_bytes(size)}, some {spell_bytes(size * UNPACK_RATIO)} unpacked, and"
            f" Docker's disk has {spell_bytes(free)} free; free some with `{program().lower()}"
            " system prune`",
            code="disk.full",
        )
    repository, tag = _split(name)
    with explain_docker_errors(f"pulling {name}"):
        _progress(
            client.api.pull(
                repository, tag, stream=True, decode=True, auth_config=login(ecr, name)
            ),
            name,
            say,
        )


def push(client: Any, ecr: Any, image: Any, name: str, say: Say) -> None:
    """Tag an image and push it to the registry in its name. Raises `LocalError`."""
    repository, tag = _split(name)
    ecr_name = ecr_image(name)
    if ecr_name and ecr is not None:
        try:
            ecr.describe_repositories(
                registryId=ecr_name.account, repositoryNames=[ecr_name.repository]
            )
        except ecr.exceptions.RepositoryNotFoundException:
            raise LocalError(
                f"there is no repository {ecr_name.repository} in {ecr_name.account},"
                f" {ecr_name.region}; `aws ecr create-repository --repository-name"
                f" {ecr_name.repository} --region {ecr_name.region}` makes it"
            ) from None
    with explain_docker_errors(f"pushing {name}"):
        image.tag(repository, tag)
        _progress(
            client.api.push(
                repository, tag, stream=True, decode=True, auth_config=login(ecr, name)
            ),
            name,
            say,
        )


def _split(name: str) -> tuple[str, str]:
    """Repository and tag; a digest counts as a tag."""
    from docker.utils import parse_repository_tag

    repository, tag = parse_repository_tag(name)
    return repository, tag or "latest"


def _progress(steps: Any, name: str, say: Say) -> None:
    layer_count = 0
    for step in steps:
        if "error" in step:
            raise LocalError(sentence(RuntimeError(step["error"]), name))
        if step.get("status") in (
            "Pull complete",
            "Pushed",
            "Layer already exists",
            "Already exists",
        ):
            layer_count += 1
            say(f"  {layer_count} layers")


def layers_size(name: str, architecture: str) -> int | None:
    """Bytes of the compressed layers of `name` for a processor (`amd64`).

    None if the registry does not say: it wants a login, does not have the image, or does not
    answer.
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
    head, _, remainder = name.partition("/")
    if not remainder or not ("." in head or ":" in head or head == "localhost"):
        head, remainder = "docker.io", name if "/" in name else f"library/{name}"
    repository, _, tag = remainder.partition(":")
    return (
        (_HUB if head in ("docker.io", "index.docker.io") else head),
        repository,
        digest or tag or "latest",
    )


def _manifest(registry: str, repository: str, reference: str) -> dict[str, Any]:
    # As Docker does: plain HTTP only on this machine.
    is_local = registry.partition(":")[0] in ("localhost", "127.0.0.1")
    url = f"http{'' if is_local else 's'}://{registry}/v2/{repository}/manifests/{reference}"
    try:
        return _json(url, {"Accept": _KINDS})
    except urllib.error.HTTPError as error:
        challenge = error.headers.get("WWW-Authenticate", "")
        if error.code != 401 or not challenge.lower().startswith("bearer "):
            raise
    challenge_fields = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
    query = urllib.parse.urlencode(
        {key: challenge_fields[key] for key in ("service", "scope") if key in challenge_fields}
    )
    if urllib.parse.urlsplit(challenge_fields["realm"]).scheme != "https" and not is_local:
        raise OSError("a token sent unencrypted")
    answer = _json(f"{challenge_fields['realm']}?{query}", {})
    token = answer.get("token") or answer["access_token"]
    return _json(url, {"Accept": _KINDS, "Authorization": f"Bearer {token}"})


def _json(url: str, headers: dict[str, str]) -> dict[str, Any]:
    """A registry's JSON answer. Raises OSError or ValueError."""
    request = urllib.request.Request(url, headers=headers)  # noqa: S310 - the registry that the user named
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as response:  # noqa: S310
            answer: dict[str, Any] = json.loads(response.read(ANSWER_LIMIT))
    except urllib.error.HTTPError as error:
        error.close()  # its headers can still be read
        raise
    except http.client.HTTPException as error:  # the server speaks no HTTP
        raise OSError(f"no HTTP answer ({type(error).__name__})") from error
    return answer
