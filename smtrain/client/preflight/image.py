"""Check the container image: its release, the registry of this region, and packages that a job
installs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from smtrain.client.findings import Finding
from smtrain.client.launch import wheels
from smtrain.client.preflight.context import CheckUnavailable, Context, ResourceMissing
from smtrain.core.config import Stage
from smtrain.core.errors import LocalError
from smtrain.core.facts import image_fit, table
from smtrain.core.facts.engines import is_gpu, is_neuron
from smtrain.core.facts.images import (
    contents_known,
    ecr_image,
    end_of_life,
    gpu_row,
    of_aws,
    patch_fault,
    python_of,
    sdk_release,
    serves,
)
from smtrain.core.facts.sagemaker import LOG_GROUP
from smtrain.core.protocol import log_lines
from smtrain.core.protocol.entrypoints import (
    WORDS,
    entrypoints_folder,
    package_needs,
    packages,
    stage_of,
)
from smtrain.stages import STAGES

if TYPE_CHECKING:
    from smtrain.client.launch.image_inspect import ImageContents


def image(context: Context) -> Iterator[Finding]:
    """Every image in the requests: its Neuron release, and whether it exists."""
    if not context.on_aws:
        yield from _local_image(context)
        return
    if context.chain.image_note:
        yield Finding("image", "ok", context.chain.image_note.removeprefix("compute.image: "))
    for uri in sorted(
        {r["AlgorithmSpecification"].get("TrainingImage", "") for r in context.requests.values()}
    ):
        yield from _release(context, uri)
        yield from _registry_image(context, uri)
        yield _contents(uri)
    yield from last_time(context)
    for need in package_needs(context.chain.given.model_dump(), context.requests.keys()):
        request = context.requests[stage_of(need)]
        yield from _for_need(need, request["AlgorithmSpecification"].get("TrainingImage", ""))


def _local_image(context: Context) -> Iterator[Finding]:
    """Whether Docker answers and has the image of the hosts, and what that lacks; a sandbox needs
    no image.
    """
    run_in = context.chain.given.local.run_in
    if run_in == "sandbox":
        return
    from smtrain.plane.docker import connect, require_usable

    requests = {r["AlgorithmSpecification"]["TrainingImage"]: r for r in context.requests.values()}
    for name, request in sorted(requests.items()):
        try:
            with closing(connect()) as client:
                require_usable(client, name)
        except LocalError as error:
            if run_in == "docker":
                yield Finding("image", "fault", str(error))
            else:
                yield Finding(
                    "image", "warning", f"hosts will be sandboxes, not containers: {error}"
                )
        else:
            yield Finding(
                "image", "ok", f"{name} is on this machine, and hosts are containers of it"
            )
            yield from _local_packages(context, request, name)


def _local_packages(context: Context, request: dict[str, Any], name: str) -> Iterator[Finding]:
    """Packages that the stages import and a local image lacks."""
    from smtrain.client.launch.image_inspect import of_hosts

    try:
        contents = of_hosts(request)
    except LocalError as error:
        yield Finding("image", "fault", str(error))
        return
    if contents:
        needs = package_needs(context.chain.given.model_dump(), context.stages)
        yield from libraries(contents, context.stages, needs, "image", name)
        if bundled_packages(contents, context.stages):
            yield from last_time(context)


def _release(context: Context, uri: str) -> Iterator[Finding]:
    """Whether the train stage's image has the release that the engine needs; other stages run on
    any image.
    """
    train = context.requests.get("train")
    if train is None or train["AlgorithmSpecification"].get("TrainingImage") != uri:
        return
    engine: str = context.config.train.engine
    instance_type = context.config.compute.instance_type
    facts = table("images")["engines"][engine]
    if is_gpu(instance_type):
        yield from _for_gpus(uri)
    if not is_neuron(instance_type):
        return
    is_served = serves(uri, engine)
    release = sdk_release(uri)
    name = ".".join(map(str, release)) if release else "a release that its name does not tell"
    if is_served is None:
        yield Finding(
            "image",
            "warning",
            f"whether the image ({name}) has what engine {engine} needs cannot be determined "
            "from here",
            f"it needs {facts['needs']}",
        )
    elif is_served and engine == "nxd":
        yield Finding(
            "image",
            "warning",
            f"{end_of_life(engine)}, and the image has {name}",
            "nothing needs to be done today; plan for trn2 with engine native",
        )


def _for_gpus(uri: str) -> Iterator[Finding]:
    row = gpu_row(uri)
    if row is not None:
        end_message = patch_fault(uri)
        torch_note = (
            f"the image has torch {row['torch']} with CUDA {row['cuda']}; AWS's patches of it "
        )
        if end_message is None:
            yield Finding("image", "ok", f"{torch_note}end on {row['patched_until']}")
        else:
            yield Finding(
                "image",
                "warning",
                f"{torch_note}ended on {row['patched_until']}",
                end_message.partition("; ")[2],
            )


def _contents(uri: str) -> Finding:
    """Libraries of the stages that the image may lack.

    No container installs anything from a network.
    """
    names, is_downloaded = ", ".join(wheels.names()), wheels.folder_of(uri).is_dir()
    if not contents_known(uri):
        return Finding(
            "image",
            "warning",
            "whether the image has every library of the stages cannot be determined from here",
            f"it needs torch and what entrypoints/requirements.txt names; {names} travel with the"
            " code; `smtrain image build CONFIG --push URI` makes one that has all",
        )
    source = "are on this machine" if is_downloaded else "will be downloaded here"
    return Finding(
        "image",
        "ok",
        f"the image lacks {names}, which travel with the code as wheels; they {source}",
    )


def _for_need(need: str, uri: str) -> Iterator[Finding]:
    names = ", ".join(packages(entrypoints_folder() / "requirements.txt", need))
    python, unbuilt = python_of(uri) or "", table("images")["contents"]["no_wheel"]
    if need in unbuilt.get(python, ()):
        yield Finding(
            "image",
            "fault",
            f"{need} needs {names}, which has no wheel for Python {python[0]}.{python[1:]}",
            "make tokens of it on another Python with `smtrain data prepare`, and name them in"
            " data.prepared",
        )
    elif of_aws(uri) and need in table("images")["contents"]["without"]:
        yield Finding(
            "image",
            "fault",
            f"{need} needs {names}, and no image of AWS has it",
            "`smtrain image build CONFIG --push URI` makes one that has; name that in"
            " compute.image",
        )
    else:
        yield Finding(
            "image",
            "warning",
            f"{need} needs {names}; whether the image has it cannot be determined from here",
            f"`smtrain image verify {uri} --for CONFIG` looks into it, `smtrain image build CONFIG`"
            " adds it",
        )


def _other_image(context: Context) -> str:
    """The remedy without this image: for some machines no other is known."""
    return image_fit.otherwise(context.config.train.engine, context.config.compute.instance_type)


def _registry_image(context: Context, uri: str) -> Iterator[Finding]:
    repository, other_image = ecr_image(uri), _other_image(context)
    if repository is None:
        yield Finding(
            "image",
            "fault",
            f"{uri} is not in Amazon ECR, from which SageMaker pulls",
            f"push it to a repository of your account, or {other_image}",
        )
        return
    if repository.region != context.chain.target.region_name():
        yield Finding(
            "image",
            "fault",
            f"{uri} is in {repository.region}, and the job runs in"
            f" {context.chain.target.region_name()}",
            f"name the image of the job's region, or {other_image}",
        )
        return
    try:
        # Pulling needs this right too; the registries of AWS's own images allow it, but rarely
        # DescribeImages.
        answer = context.ask(
            "ecr", "batch_get_image", absent=["RepositoryNotFoundException"], **repository.query
        )
    except ResourceMissing:
        yield Finding(
            "image",
            "fault",
            f"there is no repository {repository.repository} in the registry {repository.account}"
            f" of {repository.region}",
            "choose a region that has it (compute.region), or set compute.image to a copy in your"
            " own registry",
        )
        return
    if answer.get("failures"):
        failure = answer["failures"][0]
        if failure.get("failureCode") not in (
            "ImageNotFound",
            "ImageTagDoesNotMatchDigest",
            "InvalidImageTag",
        ):
            raise CheckUnavailable(f"ECR answered {failure.get('failureCode')} for {uri}")
        yield Finding(
            "image",
            "fault",
            f"{uri} is not there ({failure.get('failureCode')})",
            f"correct it, or {other_image}",
        )
    else:
        yield Finding("image", "ok", f"{uri} is there")


LOOKED_AT = 3
"""The number of jobs whose logs are read at most."""
FIRST_HOURS_MS = 6 * 3600_000
"""A job has started by this time after its creation; later lines are not read."""


def libraries(
    contents: ImageContents,
    stages: Sequence[Stage],
    needs: Sequence[str] = (),
    check_name: str = "libraries",
    it: str = "it",
) -> Iterator[Finding]:
    """Packages that stages import and the image lacks; `needs`: those of the data
    (core/protocol/entrypoints.py).
    """
    requirements, remedy = contents.lacking["requirements"], "`smtrain image build` adds it"
    lacks = {
        line.partition("#")[0].strip(): [s for s in stages if line in requirements[s]]
        for s in stages
        for line in requirements[s]
    }
    for line, lacking_stages in lacks.items():
        need_words = (
            "every stage needs"
            if len(lacking_stages) == len(stages)
            else f"stage {', '.join(lacking_stages)} needs"
        )
        yield Finding(check_name, "fault", f"{it} has no {line}, which {need_words}", remedy)
    for need in needs:
        for line in requirements[WORDS[need]]:
            lacks[line] = []
            yield Finding(check_name, "fault", f"{it} has no {line}, which {need} needs", remedy)
    if late_packages := bundled_packages(contents, stages):
        yield Finding(
            check_name,
            "ok",
            f"{it} lacks {', '.join(late_packages)}, which travel with the code, and every host"
            " installs them at every start; `smtrain image build` puts them in",
        )
    if not lacks and not late_packages:
        yield Finding(
            check_name,
            "ok",
            f"{it} has every library of the stages: a job installs nothing when it starts",
        )


def bundled_packages(contents: ImageContents, stages: Sequence[Stage]) -> list[str]:
    """Packages that these stages install from wheels in the bundle."""
    lines = (line for stage in stages for line in contents.lacking["wheels"][stage])
    return sorted({line.partition("==")[0] for line in lines})


def last_time(context: Context) -> Iterator[Finding]:
    """The installation time of the newest job of the run that installed something; nothing if no
    log has it.
    """
    try:
        newest = _newest(context)
    except CheckUnavailable:
        return  # this is only a figure, not a condition of the run
    if newest:
        job, packages, seconds = newest
        yield Finding(
            "image", "ok", f"{job} installed {packages} when it started, in {seconds:.1f} s"
        )


def _newest(context: Context) -> tuple[str, str, float] | None:
    name = context.config.name
    response = context.ask(
        "sagemaker",
        "list_training_jobs",
        NameContains=f"{name}-",
        SortBy="CreationTime",
        SortOrder="Descending",
        MaxResults=50,
    )
    starts = tuple(f"{name}-{stage}-" for stage in STAGES if wheels.names(stage))
    jobs = [
        job for job in response["TrainingJobSummaries"] if job["TrainingJobName"].startswith(starts)
    ]
    for job in jobs[:LOOKED_AT]:
        created_ms = int(job["CreationTime"].timestamp() * 1000)
        try:
            page = context.ask(
                "logs",
                "filter_log_events",
                absent=["ResourceNotFoundException"],
                logGroupName=LOG_GROUP,
                logStreamNamePrefix=f"{job['TrainingJobName']}/",
                filterPattern=log_lines.INSTALLED_PATTERN,
                startTime=created_ms,
                endTime=created_ms + FIRST_HOURS_MS,
            )
        except ResourceMissing:
            return None
        installations = [
            installation
            for event in page["events"]
            if (installation := log_lines.parse_install(event["message"].strip()))
        ]
        if installations:
            # The slowest host delays the run.
            return (job["TrainingJobName"], *max(installations, key=lambda timing: timing[1]))
    return None
