"""`smtrain image build | verify | pull | tiny`: the images of jobs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from smtrain.cli import options
from smtrain.core.text import say

if TYPE_CHECKING:
    from smtrain.client.launch.image_inspect import ImageContents
    from smtrain.core.config import JobConfig, Stage

app = options.app()
ForConfig = Annotated[
    str | None,
    typer.Option("--for", metavar="CONFIG", help="The jobs that are to run in it; default: any."),
]


@app.callback()
def image() -> None:
    """The image of your jobs: build one that installs nothing, verify it, or make a tiny one for
    tests.

    $ smtrain image build run.yaml --print  # see the Dockerfile first
    """


@app.command()
def build(
    config: options.Config,
    base: Annotated[
        str | None,
        typer.Option(
            "--from",
            "--base",
            metavar="IMAGE",
            help="What to build on; default: the image of the config's jobs.",
        ),
    ] = None,
    tag: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Name of the new image; default: smtrain with the base's tag."
        ),
    ] = None,
    context: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Only write Dockerfile, lock file and wheels there."),
    ] = None,
    print_: Annotated[
        bool, typer.Option("--print", help="Only print the Dockerfile and the lock file.")
    ] = False,
    push: Annotated[
        str | None, typer.Option(metavar="URI", help="Then push it there, e.g. to Amazon ECR.")
    ] = None,
    set_: options.Set = None,
) -> None:
    """Build an image with all packages of the config's stages, pinned by hash: its jobs install
    nothing at start.

    Packages of the base image are never replaced. Without Docker, --context writes the input of any
    builder.

    $ smtrain image build run.yaml --tag my-image  # on this machine
    $ smtrain image build run.yaml --push 123456789012.dkr.ecr.us-west-2.amazonaws.com/smtrain:1
        # and then to Amazon ECR
    """
    from smtrain.core.errors import LocalError
    from smtrain.core.facts.images import sdk_release
    from smtrain.plane.docker import connect, present_image
    from smtrain.tools.image import build as builder
    from smtrain.tools.image.verify import verify as look_at

    # The config's own image may be the one that cannot be used.
    job = _load(config, [*(set_ or ()), "compute.image=null"] if base else set_)
    if push and (context or print_):
        raise typer.BadParameter(
            "--push needs the image to be built; leave --print and --context out"
        )
    base = base or _image_of(job)
    if "*" in base:
        raise LocalError(
            f"image {base} is a pattern, and an image is built on one; name a whole tag with --from"
        )
    tag = tag or f"smtrain:{base.rpartition(':')[2] if sdk_release(base) else 'latest'}"
    _say_unpatched(base)
    client = None
    try:
        client = connect("let any builder do it, by --context FOLDER")
    except LocalError:
        if not context and not print_:
            raise
    base_image = present_image(client, base) if client else None
    if base_image is None and not context and not print_:
        raise LocalError(
            f"image {base} is not on this machine; `smtrain image pull {base}` says how large it is"
        )
    stages = _stages(job)
    needs = _needs(job, stages)
    recipe = builder.recipe(
        base, stages, *_inspect_base(client, base_image, job.train.engine), needs
    )
    if not recipe.count:
        say(f"{base} lacks nothing that the stages import, so no image needs to be built on it")
        return
    if print_:
        say(f"{recipe.dockerfile}\n# {builder.LOCK}:\n{recipe.lock}", raw=True)
        return
    if context:
        if context.exists() and (
            not context.is_dir()
            or (any(context.glob("[!.]*")) and not (context / builder.LOCK).exists())
        ):
            raise LocalError(
                f"{context} is not empty, and nothing in it is from an earlier build; name another"
                " folder"
            )
        recipe.write(context, say)
        say(
            f"wrote {context}: `docker build -t {tag} {context}` makes the image; for AWS name it"
            f" like ACCOUNT.dkr.ecr.REGION.amazonaws.com/{tag}, `docker push` it, and `smtrain"
            f" config set {config} compute.image=` that name"
        )
        return
    new_image = builder.build(client, recipe, tag, say)
    report = look_at(client, new_image, stages, job.train.engine, job.compute.instance_type, needs)
    say(report)
    if not report.ok:
        raise typer.Exit(2)
    if push:
        from smtrain.tools.image.registry import ecr_of
        from smtrain.tools.image.registry import push as send

        send(client, ecr_of(push), new_image, push, say)
        say(
            f"image {push} is there; `smtrain config set {config} compute.image={push}` makes it"
            " that of the jobs"
        )
    else:
        say(
            f"image {tag} is made: here with --docker --set local.image={tag}; on AWS by"
            " compute.image, after --push"
        )


@app.command()
def verify(
    image: Annotated[
        str, typer.Argument(metavar="IMAGE", help="An image on this machine.", show_default=False)
    ],
    config: ForConfig = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    set_: options.Set = None,
) -> None:
    """Look into an image: libraries, imports, tools, user, a stage that fails.

    Exit status 2 if it is faulty.

    $ smtrain image verify my-image --for run.yaml  # for the jobs of one config
    """
    from smtrain.core.errors import LocalError
    from smtrain.plane.docker import check_image_name, connect, local_image
    from smtrain.stages import STAGES
    from smtrain.tools.image.verify import verify as look_at

    check_image_name(image)
    _say_unpatched(image)
    job = _load(config, set_) if config else None
    if job is None and set_:
        raise LocalError("--set changes a config, and none is named; give one with --for")
    client = connect("")
    stages = _stages(job) if job else STAGES
    report = look_at(
        client,
        local_image(client, image),
        stages,
        job.train.engine if job else "native",
        job.compute.instance_type if job else None,
        _needs(job, stages) if job else (),
    )
    say(json.dumps(report.to_dict(), indent=2) if as_json else report, raw=as_json)
    if not report.ok:
        raise typer.Exit(2)


@app.command()
def pull(
    image: Annotated[
        str,
        typer.Argument(
            metavar="IMAGE",
            help="An image's URI, as `smtrain images` prints it.",
            show_default=False,
        ),
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Fetch it without asking.")] = False,
) -> None:
    """Fetch an image after saying how large it is. Amazon ECR is reached with your AWS credentials.

    $ smtrain image pull public.ecr.aws/docker/library/python:3.12 --yes  # without asking
    """
    from smtrain.core.config.units import spell_bytes
    from smtrain.core.errors import ConfigError
    from smtrain.plane.docker import check_image_name, connect, present_image
    from smtrain.tools.image import registry

    check_image_name(image)
    _say_unpatched(image)
    client = connect("")
    if present_image(client, image):
        say(f"image {image} is here already")
        return
    ecr = registry.ecr_of(image)
    size = registry.size_of(client, ecr, image)
    size_text = (
        f"{spell_bytes(size)} to fetch, some {spell_bytes(size * registry.UNPACK_RATIO)} on the"
        " disk"
        if size
        else "its registry does not say how large it is"
    )
    if not yes and not sys.stdin.isatty():
        raise ConfigError(
            f"{image}: {size_text}; it was not fetched, as there is no terminal to ask on; confirm"
            " with --yes",
            code="config.missing_key",
        )
    if yes or typer.confirm(f"{image}: {size_text}. Fetch it?"):
        registry.pull(client, ecr, image, say)
        say(f"image {image} is here")


@app.command()
def tiny(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Name of the image.")
    ] = "smtrain-tiny",
    root: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="FOLDER", help="A root folder to pack, as debootstrap makes it."
        ),
    ] = None,
) -> None:
    """Make a small image for the CPU, without a registry, for tests of jobs in containers.

    It uses this machine's Python, read-only, and so works only on this machine; without --from it
    uses the programs in /usr as well, and is made in a second.

    $ smtrain image tiny  # then: smtrain run run.yaml --docker --set local.image=smtrain-tiny
    """
    from smtrain.core.errors import LocalError
    from smtrain.plane.docker import check_image_name, connect
    from smtrain.plane.server.containers.scratch_image import make

    check_image_name(name)
    if root is not None and not Path(root, "usr").is_dir():
        raise LocalError(
            f"--from {root}: is not a root folder, as it has no folder usr; `debootstrap` makes one"
        )
    make(connect(""), name, Path(root) if root else None)
    say(f"image {name} is made; use it with --docker --set local.image={name}")


def _say_unpatched(image: str) -> None:
    """Say on stderr that AWS no longer patches an image."""
    from smtrain.core.facts.images import patch_fault

    if warning := patch_fault(image):
        say(warning, error=True)


def _load(config: str, set_: list[str] | None) -> JobConfig:
    from smtrain.client.planner.resolve import load_config

    return load_config(config, set_=set_ or (), target="aws")


def _image_of(job: JobConfig) -> str:
    from smtrain.client.backends.sagemaker.backend import SageMakerBackend
    from smtrain.client.launch.request import image_of

    if job.compute.image and "/" in job.compute.image:
        return job.compute.image
    region = job.compute.region or SageMakerBackend("aws").region_name()
    return image_of(
        job.model_copy(update={"compute": job.compute.model_copy(update={"region": region})})
    )


def _stages(job: JobConfig) -> list[Stage]:
    from smtrain.stages import stages_of

    return stages_of(job, "aws")


def _needs(job: JobConfig, stages: Sequence[Stage]) -> list[str]:
    """Options that need more packages."""
    from smtrain.core.protocol.entrypoints import package_needs

    return package_needs(job.model_dump(), stages)


def _inspect_base(client: Any, image: Any, engine: str) -> tuple[ImageContents | None, str]:
    """Contents and user of a base image; None and empty if it is not on this machine."""
    if image is None:
        return None, ""
    from smtrain.client.launch.image_inspect import inspect_image

    return inspect_image(client, image, engine), str(
        image.attrs.get("Config", {}).get("User") or ""
    )
