"""Images in a registry: how large, pulled and pushed, with a login at Amazon ECR by the caller's own credentials."""

from __future__ import annotations

import base64
import json
from typing import Any

from smtrain.core.config.units import spell_bytes
from smtrain.core.errors import LocalError
from smtrain.core.facts.images import ecr_image
from smtrain.core.text import Say
from smtrain.plane.docker import architecture, plainly, program, room, sentence
from smtrain.tools.image.manifest import layers_size

UNPACKED = 2.5
"""Bytes on a disk for one byte of compressed layers, about, of AWS's training images."""


def ecr_of(name: str) -> Any:
    """A client of the registry that an image's name points at; None where it is not Amazon ECR."""
    named = ecr_image(name)
    if named is None:
        return None
    from smtrain.client.backends.sagemaker.target import Target

    return Target("aws", region=named.region).client("ecr")


def size_of(client: Any, ecr: Any, name: str) -> int | None:
    """Bytes of an image's compressed layers, as its registry has them; None where it does not say.

    Raises `LocalError` where Amazon ECR does not have it.
    """
    named = ecr_image(name)
    if named is None or ecr is None:
        return layers_size(name, architecture(client))
    asked = named.asked
    manifest = _in_ecr(ecr, asked, name)
    for entry in manifest.get("manifests", []):
        if entry.get("platform", {}).get("architecture") == architecture(client):
            manifest = _in_ecr(ecr, {**asked, "imageIds": [{"imageDigest": entry["digest"]}]}, name)
            break
    return sum(layer["size"] for layer in manifest.get("layers", [])) or None


def _in_ecr(ecr: Any, asked: dict[str, Any], name: str) -> dict[str, Any]:
    """A manifest. Raises `LocalError` where there is none."""
    told = ecr.batch_get_image(**asked)
    if told.get("failures") or not told.get("images"):
        code = (told.get("failures") or [{}])[0].get("failureCode", "ImageNotFound")
        raise LocalError(f"{name} is not in its registry ({code}); `smtrain images` lists those of AWS")
    manifest: dict[str, Any] = json.loads(told["images"][0]["imageManifest"])
    return manifest


def login(ecr: Any, name: str) -> dict[str, str] | None:
    """What Docker needs to reach Amazon ECR, for twelve hours; it is given to Docker with the call and kept nowhere."""
    named = ecr_image(name)
    if named is None or ecr is None:
        return None
    told = ecr.get_authorization_token(registryIds=[named.account])
    user, _, password = base64.b64decode(told["authorizationData"][0]["authorizationToken"]).decode().partition(":")
    return {"username": user, "password": password}


def pull(client: Any, ecr: Any, name: str, say: Say) -> None:
    """Fetch an image. Raises `LocalError`: no room, no rights, not there."""
    size, free = size_of(client, ecr, name), room(client)
    if size and free is not None and size * (1 + UNPACKED) > free:
        raise LocalError(
            f"{name} is {spell_bytes(size)}, some {spell_bytes(size * UNPACKED)} unpacked, and Docker's disk has "
            f"{spell_bytes(free)} free; free some with `{program().lower()} system prune`"
        )
    repository, tag = _split(name)
    with plainly(f"pulling {name}"):
        _told(client.api.pull(repository, tag, stream=True, decode=True, auth_config=login(ecr, name)), name, say)


def push(client: Any, ecr: Any, image: Any, name: str, say: Say) -> None:
    """Give an image a name and send it to that name's registry. Raises `LocalError`."""
    repository, tag = _split(name)
    named = ecr_image(name)
    if named and ecr is not None:
        try:
            ecr.describe_repositories(registryId=named.account, repositoryNames=[named.repository])
        except ecr.exceptions.RepositoryNotFoundException:
            raise LocalError(
                f"there is no repository {named.repository} in {named.account}, {named.region}; "
                f"`aws ecr create-repository --repository-name {named.repository} --region {named.region}` makes it"
            ) from None
    with plainly(f"pushing {name}"):
        image.tag(repository, tag)
        _told(client.api.push(repository, tag, stream=True, decode=True, auth_config=login(ecr, name)), name, say)


def _split(name: str) -> tuple[str, str]:
    """Repository and tag; a digest counts as a tag."""
    from docker.utils import parse_repository_tag

    repository, tag = parse_repository_tag(name)
    return repository, tag or "latest"


def _told(steps: Any, name: str, say: Say) -> None:
    done = 0
    for step in steps:
        if "error" in step:
            raise LocalError(sentence(RuntimeError(step["error"]), name))
        if step.get("status") in ("Pull complete", "Pushed", "Layer already exists", "Already exists"):
            done += 1
            say(f"  {done} layers")
