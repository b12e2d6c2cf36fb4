"""Choose the training image by region, engine and machine, from the dated rows of
core/facts/images.toml.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import date, datetime, timezone
from typing import Any

from smtrain.core.errors import ConfigError
from smtrain.core.facts import table
from smtrain.core.facts.engines import is_gpu, is_neuron
from smtrain.core.facts.gpus import chip_of, cuda_needed, has_kernels, is_arm

_SDK = re.compile(r"sdk(\d+)\.(\d+)\.(\d+|\*)")
_PYTHON = re.compile(r"-py(\d)(\d+)(?:-|$)")
_TORCH = re.compile(r":(\d+\.\d+(?:\.\d+)?)-neuronx-")
_BARE_TAG = re.compile(r"\d+(\.\d+)+-neuronx-[^:/]+")
_ECR = re.compile(r"(\d{12})\.dkr\.ecr\.([a-z0-9-]+)\.[a-z0-9.-]+/([^:@]+)(?:[:@](.+))?$")


@dataclass(frozen=True)
class EcrImage:
    """An image in Amazon ECR, parsed from its URI."""

    account: str
    region: str
    repository: str
    tag: str | None
    """A tag, or a digest (`sha256:...`)."""

    @property
    def query(self) -> dict[str, Any]:
        """Parameters of ECR's BatchGetImage."""
        kind = "imageDigest" if self.tag and self.tag.startswith("sha256:") else "imageTag"
        return {
            "registryId": self.account,
            "repositoryName": self.repository,
            "imageIds": [{kind: self.tag or "latest"}],
        }


def ecr_image(uri: str) -> EcrImage | None:
    """Parse an image URI; None if it is not in Amazon ECR."""
    match = _ECR.match(uri)
    return EcrImage(*match.groups()) if match else None


def of_aws(uri: str) -> bool:
    """Whether an image is in a registry of AWS's training images."""
    image, images = ecr_image(uri), table("images")
    return image is not None and image.account in {
        images["default_account"],
        *images["accounts"].values(),
    }


def image_uri(region: str, engine: str = "native") -> str:
    """URI of the newest training image with what `engine` needs, else of the newest image, in the
    registry of `region`.

    Raises `ConfigError` for a region whose registry is unknown.
    """
    images = table("images")
    return f"{_registry(region)}/{known_image(engine) or images['repository'] + ':' + images['default_tag']}"


def known_image(engine: str) -> str | None:
    """Repository and tag of the newest known image with what an engine needs on Neuron cores; None
    if none is known.
    """
    images = table("images")
    if images["engines"][engine].get("seen"):
        return guessed_image(engine)
    tag = next((row["tag"] for row in images["tags"] if serves(row["tag"], engine)), None)
    return tag and f"{images['repository']}:{tag}"


def guessed_image(engine: str) -> str:
    """Repository and tag that the image of an engine is expected to have; unverified until the row
    says `seen`.
    """
    row = table("images")["engines"][engine]
    return f"{row['repository']}:{row['tag']}"


def with_repository(image: str) -> str:
    """An image by repository and tag, if it is only a tag of AWS's Neuron training images; else as
    it is.
    """
    return f"{table('images')['repository']}:{image}" if _BARE_TAG.fullmatch(image) else image


def in_registry(image: str, region: str) -> str:
    """The URI of an image: a tag of AWS's Neuron training images, or one of AWS's repositories with
    a tag, is in the registry of the region; any other name is left as it is.
    """
    images, image = table("images"), with_repository(image)
    rows = [
        images,
        *images["gpu"],
        *(row for row in images["engines"].values() if "repository" in row),
    ]
    repositories = image.partition(":")[0] in {row["repository"] for row in rows}
    return f"{_registry(region)}/{image}" if repositories else image


def gpu_image_uri(region: str, instance_type: str | None = None) -> str:
    """URI of the newest image for GPUs, or those of a type, with all that the stages import.

    Raises `ConfigError` for an unknown region, and if no image is known for the type.
    """
    kind = instance_type or ""
    row = next((row for row in gpu_rows() if row["whole"] and has_kernels(row["cuda"], kind)), None)
    if row is None or is_arm(kind):
        requirement = "for arm64" if is_arm(kind) else f"with {cuda_needed(kind)}"
        raise ConfigError(
            f"compute.image: no image is known for {kind}, whose {chip_of(kind)} GPUs need one"
            f" {requirement}; give its URI",
            code="config.combination",
        )
    return f"{_registry(region)}/{row['repository']}:{row['tag']}"


def serving_image(region: str, instance_type: str) -> str:
    """URI of the newest image that serves models on a type.

    Raises `ConfigError` for an unknown region.
    """
    return f"{_registry(region)}/{table('images')['serving_neuron' if is_neuron(instance_type) else 'serving']}"


def gpu_rows() -> list[dict[str, Any]]:
    """The known images for GPUs; those with all that the stages import come first."""
    rows: list[dict[str, Any]] = table("images")["gpu"]
    return sorted(rows, key=lambda row: not row["whole"])


def gpu_row(uri: str) -> dict[str, Any] | None:
    """The row of a GPU image by its URI; None for other images."""
    name = uri.rpartition("/")[2]
    return next((row for row in gpu_rows() if name == f"{row['repository']}:{row['tag']}"), None)


def patch_fault(uri: str | None, today: date | None = None) -> str | None:
    """The fault, with its remedy, of an image that AWS no longer patches; None if AWS does.

    `today` is in UTC.
    """
    row = gpu_row(uri) if uri else None
    if row is None or (today or datetime.now(timezone.utc).date()) <= date.fromisoformat(
        row["patched_until"]
    ):
        return None
    newest = next(r for r in gpu_rows() if r["whole"])
    return (
        f"AWS's patches of {row['repository']}:{row['tag']} ended on {row['patched_until']}; leave"
        f" compute.image out for {newest['repository']}:{newest['tag']}, which has them until"
        f" {newest['patched_until']}"
    )


def _registry(region: str) -> str:
    """The registry of AWS's training images in a region. Raises `ConfigError` if it is unknown."""
    images = table("images")
    account = images["accounts"].get(region, images["default_account"])
    if region not in images["accounts"] and region not in images["default_regions"]:
        raise ConfigError(
            f"compute.region: no registry of training images is known for {region!r};"
            f" {_near_region(region)}name a region such as us-west-2, or set compute.image",
            code="config.wrong_value",
        )
    suffix = next(
        (s for prefix, s in images["suffixes"].items() if region.startswith(prefix)),
        "amazonaws.com",
    )
    return f"{account}.dkr.ecr.{region}.{suffix}"


def _near_region(region: str) -> str:
    from smtrain.core.facts.name_suggestions import region_meant

    suggestion = region_meant(region)
    return f"did you mean {suggestion}? else " if suggestion else ""


def training_image(region: str, engine: str, instance_type: str) -> str:
    """URI of the newest image in which `engine` trains on instances of a type.

    Machines without accelerator also get the newest Neuron image, for its torch and transformers;
    GPUs always run engine native. Raises `ConfigError` if no image is known.
    """
    if is_gpu(instance_type):
        return gpu_image_uri(region, instance_type)
    if is_neuron(instance_type) and known_image(engine) is None:
        raise ConfigError(
            f"compute.image: no image is known for train.engine {engine} on {instance_type};"
            f" {looked_for(engine)}",
            code="config.combination",
        )
    return image_uri(region, engine)


def looked_for(engine: str) -> str:
    """The remedy while the image of an engine is unknown: the tag to look for, and both ways to an
    image.
    """
    row = table("images")["engines"][engine]
    return (
        f"look at {row['gallery']} and `smtrain config set CONFIG compute.image={row['tag']}` (a"
        " guess, unverified), or copy it with `smtrain image build CONFIG --from URI --push URI`"
    )


def sdk_release(uri: str) -> tuple[int, int, int] | None:
    """Release of the Neuron SDK in an image, from its tag; None if the tag has none.

    `sdk2.33.*` is 2.33.0.
    """
    match = _SDK.search(uri.rpartition("/")[2])
    return (int(match[1]), int(match[2]), int(match[3].replace("*", "0"))) if match else None


def python_of(uri: str) -> str | None:
    """CPython release in an image as pip writes it ("312"), from facts about the image or its tag;
    None if unknown.
    """
    if row := gpu_row(uri):
        return str(row["python"]).replace(".", "")
    match = _PYTHON.search(uri.rpartition(":")[2])
    return f"{match[1]}{match[2]}" if match else None


def torch_of(uri: str) -> str:
    """The release of torch that the tag of a Neuron image begins with; "0" if it begins with
    another thing.
    """
    match = _TORCH.search(uri.rpartition("/")[2])
    return match[1] if match else "0"


def contents_known(uri: str) -> bool:
    """Whether the table says what is in an image: a whole one for GPUs, or one of these releases of
    Neuron.
    """
    if row := gpu_row(uri):
        return bool(row["whole"])
    contents, release = table("images")["contents"], sdk_release(uri)
    first, last = (
        tuple(map(int, contents[key].split("."))) for key in ("whole_since", "whole_until")
    )
    return release is not None and first <= release <= last


def serves(uri: str, engine: str) -> bool | None:
    """Whether an image has what an engine needs on Neuron cores, by its name; None if the name does
    not say.
    """
    release, bounds = sdk_release(uri), table("images")["engines"][engine].get("sdk")
    if release is None or bounds is None:
        return None
    first, *last = (tuple(int(part) for part in bound.split(".")) for bound in bounds)
    return first <= release and (not last or release <= last[0])


def image_rows() -> list[dict[str, Any]]:
    """The known tags, newest first, each with its engines."""
    images = table("images")
    engine_rows = [
        {
            "tag": row["tag"],
            "sdk": ".".join(map(str, sdk_release(row["tag"]) or ())),
            "note": f"seen {row['seen']}",
        }
        for row in images["engines"].values()
        if row.get("seen")
    ]
    return [
        {**row, "engines": [engine for engine in images["engines"] if serves(row["tag"], engine)]}
        for row in (*engine_rows, *images["tags"])
    ]


def end_of_life(engine: str) -> str | None:
    """A sentence about an engine whose software gets no further release; None if it gets one."""
    if engine != "nxd":
        return None
    last = table("images")["engines"]["nxd"]["sdk"][1]
    return (
        f"neuronx-distributed is at its end of life: Neuron {last} is the last release whose image"
        " ships it"
    )
