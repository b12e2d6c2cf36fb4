"""Choose the training image by region, engine and machine, from the dated rows of core/facts/images.toml."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import date, datetime, timezone
from typing import Any

from smtrain.core.errors import ConfigError
from smtrain.core.facts import table
from smtrain.core.facts.engines import is_gpu, is_neuron

_SDK = re.compile(r"sdk(\d+)\.(\d+)\.(\d+)")
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
            "registryId": self.account, "repositoryName": self.repository, "imageIds": [{kind: self.tag or "latest"}]
        }  # fmt: skip


def ecr_image(uri: str) -> EcrImage | None:
    """Parse an image URI; None if it is not in Amazon ECR."""
    match = _ECR.match(uri)
    return EcrImage(*match.groups()) if match else None


def of_aws(uri: str) -> bool:
    """Whether an image is in a registry of AWS's training images."""
    named, images = ecr_image(uri), table("images")
    return named is not None and named.account in {images["default_account"], *images["accounts"].values()}


def image_uri(region: str, engine: str = "native", tag: str | None = None) -> str:
    """URI of the newest training image with what `engine` needs, else of the newest image, in the registry of `region`.

    Raises `ConfigError` for a region whose registry is unknown.
    """
    images = table("images")
    if tag is None:
        tag = next((row["tag"] for row in images["tags"] if serves(row["tag"], engine)), images["default_tag"])
    return f"{_registry(region)}/{images['repository']}:{tag}"


def gpu_image_uri(region: str) -> str:
    """URI of the newest image for GPUs with all that the stages import. Raises `ConfigError` for an unknown region."""
    row = next(row for row in gpu_rows() if row["whole"])
    return f"{_registry(region)}/{row['repository']}:{row['tag']}"


def serving_image(region: str) -> str:
    """URI of the newest image that serves models on GPUs. Raises `ConfigError` for an unknown region."""
    return f"{_registry(region)}/{table('images')['serving']}"


def gpu_rows() -> list[dict[str, Any]]:
    """The known images for GPUs; those with all that the stages import come first."""
    rows: list[dict[str, Any]] = table("images")["gpu"]
    return sorted(rows, key=lambda row: not row["whole"])


def gpu_row(uri: str) -> dict[str, Any] | None:
    """The row of a GPU image by its URI; None for other images."""
    name = uri.rpartition("/")[2]
    return next((row for row in gpu_rows() if name == f"{row['repository']}:{row['tag']}"), None)


def unpatched(uri: str | None, today: date | None = None) -> str | None:
    """The fault, with its remedy, of an image that AWS no longer patches; None for others. `today` is in UTC."""
    row = gpu_row(uri) if uri else None
    if row is None or (today or datetime.now(timezone.utc).date()) <= date.fromisoformat(row["patched_until"]):
        return None
    newest = next(r for r in gpu_rows() if r["whole"])
    return (
        f"AWS's patches of {row['repository']}:{row['tag']} ended on {row['patched_until']}; leave compute.image out "
        f"for {newest['repository']}:{newest['tag']}, which has them until {newest['patched_until']}"
    )


def _registry(region: str) -> str:
    """The registry of AWS's training images in a region. Raises `ConfigError` if it is unknown."""
    images = table("images")
    account = images["accounts"].get(region, images["default_account"])
    if region not in images["accounts"] and region not in images["default_regions"]:
        raise ConfigError(
            f"compute.region: no registry of training images is known for {region!r}; {_near_region(region)}set "
            "compute.image",
            code="config.wrong_value",
        )
    suffix = next((s for prefix, s in images["suffixes"].items() if region.startswith(prefix)), "amazonaws.com")
    return f"{account}.dkr.ecr.{region}.{suffix}"


def _near_region(region: str) -> str:
    from smtrain.core.facts.names import region_meant

    near = region_meant(region)
    return f"did you mean {near}? else " if near else ""


def training_image(region: str, engine: str, instance_type: str) -> str:
    """URI of the newest image in which `engine` trains on instances of a type.

    Machines without accelerator also get the newest Neuron image, for its torch and transformers; GPUs always run
    engine native. Raises `ConfigError` if no image is known."""
    known = [row["tag"] for row in table("images")["tags"] if serves(row["tag"], engine)]
    if is_gpu(instance_type):
        return gpu_image_uri(region)
    if is_neuron(instance_type) and not known:
        lacking = f"with what it needs there: {_needs(engine)}"
    else:
        return image_uri(region, engine)
    raise ConfigError(
        f"compute.image: no image is known for train.engine {engine} on {instance_type}; set compute.image to one "
        f"{lacking}",
        code="config.combination",
    )


def sdk_release(uri: str) -> tuple[int, int, int] | None:
    """Release of the Neuron SDK in an image, from its tag; None if the tag has none."""
    match = _SDK.search(uri.rpartition("/")[2])
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


def serves(uri: str, engine: str) -> bool | None:
    """Whether an image has what an engine needs on Neuron cores, by its name; None if the name does not say."""
    release, bounds = sdk_release(uri), table("images")["engines"][engine].get("sdk")
    if release is None or bounds is None:
        return None
    first, *last = (tuple(int(part) for part in bound.split(".")) for bound in bounds)
    return first <= release and (not last or release <= last[0])


def unsuited(uri: str, engine: str, instance_type: str) -> str | None:
    """The fault, with its remedy, if stage train cannot run in an image on machines of a type, judging by its name."""
    if is_gpu(instance_type):
        row = gpu_row(uri)
        if sdk_release(uri):
            return (
                f"this image is for Neuron cores, and {instance_type} has GPUs; name one with CUDA, or leave it out "
                "for the newest that is known (`smtrain images`)"
            )
        if row is not None and not row["whole"]:
            whole = next(r for r in gpu_rows() if r["whole"])
            return (
                f"{row['repository']} has no transformers, which every stage imports; build one on it that has, or "
                f"leave it out for {whole['repository']}"
            )
    elif is_neuron(instance_type):
        if gpu_row(uri):
            return (
                f"this image is for GPUs, and {instance_type} has Neuron cores; leave it out for the newest that is "
                "known for them (`smtrain images`)"
            )
        if serves(uri, engine) is False:
            release = ".".join(map(str, sdk_release(uri) or ()))
            known = any(serves(row["tag"], engine) for row in table("images")["tags"])
            otherwise = ", or leave it out for the newest that is known (`smtrain images`)" if known else ""
            return (
                f"this image has Neuron {release}, and engine {engine} needs {_needs(engine)}; name one that has "
                f"that{otherwise}"
            )
    return None


def _needs(engine: str) -> str:
    needs: str = table("images")["engines"][engine]["needs"]
    return needs.partition(", whose")[0]


def image_rows() -> list[dict[str, Any]]:
    """The known tags, newest first, each with its engines."""
    images = table("images")
    return [
        {**row, "engines": [engine for engine in images["engines"] if serves(row["tag"], engine)]}
        for row in images["tags"]
    ]


def end_of_life(engine: str) -> str | None:
    """A sentence about an engine whose software gets no further release; None for others."""
    if engine != "nxd":
        return None
    last = table("images")["engines"]["nxd"]["sdk"][1]
    return f"neuronx-distributed is at its end of life: Neuron {last} is the last release whose image ships it"
