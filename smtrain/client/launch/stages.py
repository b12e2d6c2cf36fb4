"""The chain of a config's stages: what each reads, its job's name, and whether it has been done
already.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from smtrain.client.backends.base import Backend
from smtrain.client.jobs.job import Job
from smtrain.client.jobs.listing import attempts_at, jobs_of, list_jobs
from smtrain.client.launch import compiled_graphs
from smtrain.client.launch.bundle import build_bundle
from smtrain.client.launch.digests import UPLOADS, upload_digests
from smtrain.client.launch.environment import environment
from smtrain.client.launch.image_pattern import resolve_image as with_whole_image
from smtrain.client.launch.inputs import ResolvedInputs, Upload, resolve
from smtrain.client.launch.listings import changed_input, listings_of, record
from smtrain.client.launch.request import create_training_job, image_of
from smtrain.client.planner.settle import for_machines
from smtrain.core.config import JobConfig, Stage
from smtrain.core.config.machine_defaults import machine_keys
from smtrain.core.digests import digest
from smtrain.core.errors import ConfigError, JobError
from smtrain.core.protocol.container import listings_name
from smtrain.core.protocol.uris import HUBS
from smtrain.stages import stage_named, stages_of
from smtrain.stages.base import checkpoint_uri, output_uri


@dataclass(frozen=True)
class StagePlan:
    """One stage, ready to be submitted: its identity, its request and what must be uploaded
    first.
    """

    stage: Stage
    base_name: str
    """Job name of the first attempt; later ones add -2, -3..."""
    request: dict[str, Any]
    uploads: tuple[Upload, ...]
    earlier: tuple[Job, ...] = ()
    """Attempts at this stage that the target knows, newest first."""
    writer: Job | None = None
    """With stage train: a job of the run that writes its checkpoints now, whatever its settings."""
    listings: Mapping[str, str] = field(default_factory=dict)
    """Digests of the user's own prefixes that the stage reads."""

    @property
    def completed_job(self) -> Job | None:
        return next((job for job in self.earlier if job.known_done), None)

    @property
    def running_job(self) -> Job | None:
        return next((job for job in self.earlier if job.known_running), None)

    def stale_note(self, job: Job) -> str:
        """A sentence, after a semicolon, if the job has read other files than its inputs have now;
        else empty.
        """
        config = next(
            channel
            for channel in self.request["InputDataConfig"]
            if channel["ChannelName"] == "config"
        )
        uri = changed_input(
            job.target, config["DataSource"]["S3DataSource"]["S3Uri"], job.name, self.listings
        )
        return (
            f"; {uri} has changed since, and --again (again=True) reads the new files"
            if uri
            else ""
        )


class Chain:
    """The stages of one config on one target."""

    def __init__(self, config: JobConfig, target: Backend, *, look: bool = True) -> None:
        """`look=False` (dry run) does not contact the target and plans the first attempt of every
        stage.
        """
        self.given, self.target, self.look = config, target, look
        self.promised: dict[Stage, str] = {}
        """Jobs that will do a stage, for backends on which a stage is planned before they have
        ended.
        """
        self.lent: dict[Stage, str] = {}
        """s3:// prefixes of outputs of another run's stages, which this chain reads instead of its
        own.
        """
        self.home: Chain | None = None
        """The chain of compute.region, if this one is of one of compute.fallback_regions."""
        self.resolved: ResolvedInputs = resolve(config, target)
        self.image_note: str | None = None
        """A sentence about the image, if a pattern named it; a dry run leaves the pattern as it is.
        """
        self.config = self.resolved.config
        if look:
            self.config, self.image_note = with_whole_image(self.config, target)
        if not (
            self.config.data.all_sources or self.config.data.prepared or self.config.own_command
        ):
            raise ConfigError(
                ["data.path: is missing; give text to prepare, or data.prepared"],
                code="config.missing_key",
            )

    def base_name(self, stage: Stage) -> str:
        """Name of the stage's first job: it changes if the stage would do something else."""
        return f"{self.config.name}-{stage}-{self._key(stage)[:8]}"

    def _key(self, stage: Stage) -> str:
        job_stage = stage_named(stage)
        if (identity := job_stage.identity(self)) is not None:
            return digest(identity)
        upstream = [
            self._key(upstream_stage)
            for upstream_stage in job_stage.upstream
            if self.has(upstream_stage)
        ]
        return digest(
            [
                job_stage.keys(self.config),
                self.config.data.prepared,
                checkpoint_uri(self.config),
                upstream,
            ]
        )

    def plan(self, stage: Stage) -> StagePlan:
        """Everything needed to submit the stage.

        Raises `JobError` if a stage that it reads from has not been done.
        """
        job_stage = stage_named(stage)
        inputs = job_stage.inputs(self)
        base = self.base_name(stage)
        # One call tells whether a train stage has been done, and whether another job of the run
        # writes now.
        siblings = self._list_jobs("train") if stage == "train" else self._attempts(base)
        earlier = attempts_at(base, siblings)
        if stage == "compile" and self.look:
            earlier += self._compiling_job(earlier)
        name = base if not earlier else f"{base}-{len(earlier) + 1}"
        bundle = build_bundle()
        root = self.config.output.s3_uri
        code_uri = f"{root}/code/{bundle.sha256[:16]}/"
        job_config = _job_config(self.config, stage)
        text = (json.dumps(job_config, indent=2, sort_keys=True) + "\n").encode()
        config_uri = f"{root}/configs/{digest(job_config)[:16]}/"
        listings = listings_of(self.target, self.given, inputs) if self.look else {}
        listing_files = ((listings_name(name), record(listings)),) if listings else ()
        config = Upload(config_uri, (("config.json", text), *listing_files))
        digests = upload_digests(inputs, self.resolved.uploads, config)
        needed_uploads = [
            upload for upload in self.resolved.uploads if upload.uri in inputs.values()
        ]
        arguments = (stage, name, inputs, code_uri, config_uri, self.resolved.model_config)
        request = create_training_job(self.config, *arguments)
        return StagePlan(
            stage,
            base,
            self._with_preferences(request, job_config, arguments) or request,
            (
                *needed_uploads,
                Upload(code_uri, (("bundle.tar.gz", bundle.data),)),
                replace(config, files=(*config.files, (UPLOADS, digests))),
            ),
            tuple(earlier),
            (
                next((job for job in siblings if job.known_running), None)
                if stage == "train"
                else None
            ),
            listings,
        )

    def _with_preferences(
        self, request: dict[str, Any], job_config: dict[str, Any], arguments: tuple[Any, ...]
    ) -> dict[str, Any] | None:
        """The request for all types at once, if SageMaker can choose among them; else None."""
        if arguments[0] != "train" or not self.config.compute.fallback_instance_types:
            return None
        from smtrain.client.launch.preferences import with_preferences
        from smtrain.client.planner.fallback import variants

        fallbacks = list(variants(self.config))
        if any(
            _without_type(_job_config(fallback, "train")) != _without_type(job_config)
            for fallback in fallbacks
        ):
            return None
        requests = [create_training_job(fallback, *arguments) for fallback in fallbacks]
        return with_preferences(self.config, request, requests)

    def output(self, stage: Stage) -> str | None:
        """s3:// prefix of the result of the stage's finished job; None if it has not been done."""
        if stage in self.lent:
            return self.lent[stage]
        base = self.base_name(stage)
        if not self.look or stage in self.promised:
            return output_uri(self.config, self.promised.get(stage, base))
        completed_job = next((job for job in self._attempts(base) if job.known_done), None)
        return output_uri(self.config, completed_job.name) if completed_job else None

    def has_job(self, stage: Stage) -> bool:
        """Whether a job of the stage runs or has done it."""
        return any(
            job.known_done or job.known_running for job in self._attempts(self.base_name(stage))
        )

    def has_started(self, stage: Stage) -> bool:
        """Whether any job was ever started for the stage."""
        return bool(self._attempts(self.base_name(stage)))

    @cached_property
    def graphs(self) -> str:
        """s3:// URI of the cache that stage compile fills; raises `ConfigError` if it has nothing
        to do.
        """
        variables = environment(
            self.config, "compile", image_of(self.config), self.resolved.model_config
        )
        return compiled_graphs.compile_cache_uri(self.config, variables)

    @property
    def checkpoints(self) -> str:
        """s3:// prefix of the run's checkpoints."""
        return checkpoint_uri(self.config)

    def has(self, stage: Stage) -> bool:
        """Whether a run of this config has the stage."""
        return stage in stages_of(self.config)

    def model(self, stage: Stage) -> str:
        """s3:// prefix of the model's folder.

        Raises `JobError` if stage fetch has not been done yet.
        """
        path = self.config.model.path
        path = self.need(stage, "fetch") if path.startswith(HUBS) else path
        # A folder's prefix ends in "/", or a sibling whose name begins alike would come along.
        return f"{path.rstrip('/')}/"

    def need(self, stage: Stage, upstream: Stage) -> str:
        """The output of stage `upstream`, which `stage` reads.

        Raises `JobError` if it has not been done.
        """
        output = self.output(upstream)
        if output is None:
            raise JobError(
                f"stage {stage} reads what {upstream} writes, and no finished"
                f" {self.base_name(upstream)} was found; launch stage {upstream} first, or `smtrain"
                " run` the whole chain"
            )
        return output

    def _compiling_job(self, known_jobs: list[Job]) -> list[Job]:
        """The job of another run that filled this cache, if there is one."""
        marker = compiled_graphs.read_marker(self.target, self.graphs)
        if marker is None or marker["job"] in [job.name for job in known_jobs]:
            return []
        job = Job(marker["job"], self.target)
        job.known_status = "Completed"
        return [job]

    def _attempts(self, base: str) -> list[Job]:
        return (
            attempts_at(base, list_jobs(self.target, name_contains=base, limit=1000))
            if self.look
            else []
        )

    def _list_jobs(self, stage: Stage) -> list[Job]:
        return jobs_of(self.target, self.config.name, stage) if self.look else []


def _job_config(config: JobConfig, stage: Stage) -> dict[str, Any]:
    """The keys of a config that a stage's job reads."""
    keys = stage_named(stage).keys(config)
    if stage == "train" and "train" in keys:
        # The job needs what its machines decide, its name does not.
        keys = {**keys, "train": {**keys["train"], **machine_keys(for_machines(config).train)}}
    return keys


def _without_type(job_config: dict[str, Any]) -> dict[str, Any]:
    """A job's config without the instance type, which a container reads from SageMaker."""
    compute = {k: v for k, v in job_config.get("compute", {}).items() if k != "instance_type"}
    return {**job_config, "compute": compute}
