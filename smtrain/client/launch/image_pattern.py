"""Resolve a pattern in compute.image: ask its registry for the newest tag that matches."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from typing import Any

from smtrain.client.backends.base import Backend
from smtrain.client.backends.choose import sagemaker
from smtrain.core.aws_errors import why_refused
from smtrain.core.config import JobConfig
from smtrain.core.errors import ConfigError
from smtrain.core.facts.images import ecr_image, in_registry


def is_pattern(image: str | None) -> bool:
    """Whether an image is named by a pattern, which has * in its tag."""
    return "*" in (image or "")


def resolve_image(config: JobConfig, target: Backend) -> tuple[JobConfig, str | None]:
    """The config with a whole tag in compute.image, and a sentence about it if there was a pattern.

    Raises `ConfigError` if the registry cannot be asked, or has no such tag: nothing is ever
    guessed.
    """
    compute = config.compute
    if not target.record.rented or compute.image is None or not is_pattern(compute.image):
        return config, None
    uri = in_registry(compute.image, compute.region or target.region_name())
    image, matches = newest(sagemaker(target).client("ecr"), uri)
    of = "the only tag that matches" if matches == 1 else f"the newest of {matches} tags that match"
    resolved_config = config.model_copy(
        update={"compute": compute.model_copy(update={"image": image})}
    )
    return resolved_config, f"compute.image: {compute.image} is {image.rpartition(':')[2]}, {of}"


def newest(ecr: Any, uri: str) -> tuple[str, int]:
    """URI of the newest tag in Amazon ECR that matches a pattern, and the number of matches.

    Raises `ConfigError`.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    image_pattern = ecr_image(uri)
    if image_pattern is None or image_pattern.tag is None:
        raise ConfigError(
            f"compute.image: {uri} is a pattern, and only Amazon ECR is asked for tags; write a"
            " whole tag",
            code="config.wrong_value",
        )
    try:
        pages = ecr.get_paginator("list_images").paginate(
            registryId=image_pattern.account,
            repositoryName=image_pattern.repository,
            filter={"tagStatus": "TAGGED"},
        )
        tags = [
            image["imageTag"]
            for page in pages
            for image in page.get("imageIds", [])
            if "imageTag" in image
        ]
    except (BotoCoreError, ClientError) as error:
        refusal = why_refused(error, "get the right ecr:ListImages")
        raise ConfigError(
            f"compute.image: the registry of {image_pattern.repository} in {image_pattern.region}"
            f" cannot be asked for the tags that match {image_pattern.tag}: {refusal}, or write a"
            " whole tag",
            code=refusal.code,
        ) from None
    fitting = sorted((tag for tag in tags if fnmatchcase(tag, image_pattern.tag)), key=_numbers)
    if not fitting:
        raise ConfigError(
            f"compute.image: {image_pattern.repository} in {image_pattern.region} has {len(tags)}"
            f" tags, and {image_pattern.tag} matches no one of them; write another pattern, or a"
            " whole tag",
            code="config.wrong_value",
        )
    return uri.removesuffix(image_pattern.tag) + fitting[-1], len(fitting)


def _numbers(tag: str) -> tuple[list[int], str]:
    """The order of tags: by the numbers in them, from left to right; `2.14.0` is after `2.9.1`."""
    return [int(number) for number in re.findall(r"\d+", tag)], tag
