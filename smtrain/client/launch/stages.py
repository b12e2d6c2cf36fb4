"""How stages hang together: what each reads, what it is called, and whether it has been done already."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from smtrain.client.backends.base import JobPlace
from smtrain.client.jobs.job import Job
from smtrain.client.jobs.listing import attempts_at, jobs_of, list_jobs
from smtrain.client.launch import graphs
from smtrain.client.launch.bundle import build_bundle
from smtrain.client.launch.environment import environment
from smtrain.client.launch.inputs import Resolved, Upload, resolve
from smtrain.client.launch.request import checkpoint_uri, create_training_job, image_of, output_uri
from smtrain.core.config import STAGES, JobConfig, Stage
from smtrain.core.config.schema import VALIDATION_CHANNEL, digest, text_channels
from smtrain.core.errors import ConfigError, JobError
from smtrain.core.facts import table
from smtrain.core.facts.sagemaker import TargetName
from smtrain.core.near import hint
from smtrain.core.protocol.uris import HUBS


@dataclass(frozen=True)
class StagePlan:
    """One stage, ready to be submitted: its identity, its request and what must be uploaded first."""

    stage: Stage
    base_name: str
    """Job name of the first attempt; later ones add -2, -3..."""
    request: dict[str, Any]
    uploads: tuple[Upload, ...]
    earlier: tuple[Job, ...] = ()
    """Attempts at this very stage that the target knows, newest first."""
    writer: Job | None = None
    """With stage train: a job of the run that writes its checkpoints now, whatever its settings."""

    @property
    def done(self) -> Job | None:
        return next((job for job in self.earlier if job.known_done), None)

    @property
    def running(self) -> Job | None:
        return next((job for job in self.earlier if job.known_running), None)


def stages_of(config: JobConfig, target: TargetName | None = None) -> list[Stage]:
    """The stages a run of this config has: a model that is no hub's, prepared text and a random start skip one each.

    Graphs are compiled ahead where `compute.compile_ahead` asks for it, and not on this machine, which has no compiler.
    """
    skipped: set[str] = set()
    if not config.model.path.startswith(HUBS):
        skipped.add("fetch")
    if config.data.prepared:
        skipped.add("prepare")
    if config.model.init == "scratch":
        skipped.add("convert")
    if not config.compute.compile_ahead or (target or config.target) == "local":
        skipped.add("compile")
    if not config.evaluate.tasks:
        skipped.add("evaluate")
    return [stage for stage in STAGES if stage not in skipped]


class Chain:
    """The stages of one config on one target."""

    def __init__(self, config: JobConfig, target: JobPlace, *, look: bool = True) -> None:
        """`look=False` (dry run) asks the target nothing and takes every stage for its first attempt."""
        self.given, self.target, self.look = config, target, look
        self.promised: dict[Stage, str] = {}
        """Jobs that are on their way to do a stage, where a stage may be planned before they have ended."""
        self.lent: dict[Stage, str] = {}
        """s3:// prefixes of what another run's stages have left, which this one reads in place of its own."""
        self.resolved: Resolved = resolve(config, target)
        self.config = self.resolved.config
        if not (self.config.data.all_sources or self.config.data.prepared):
            raise ConfigError(["data.path: is missing; give text to prepare, or data.prepared"])

    def base_name(self, stage: Stage) -> str:
        """Name of the stage's first job: it changes with whatever changes what the stage does."""
        return f"{self.config.name}-{stage}-{self._key(stage)[:8]}"

    def _key(self, stage: Stage) -> str:
        if stage == "compile":
            return digest(self.graphs)
        before: dict[Stage, list[Stage]] = {
            "train": ["prepare"], "export": ["train"], "generate": ["export"], "evaluate": ["export"],
        }  # fmt: skip
        upstream = [self._key(s) for s in before.get(stage, []) if s in stages_of(self.config)]
        return digest([self.config.for_stage(stage), self.config.data.prepared, checkpoint_uri(self.config), upstream])

    def plan(self, stage: Stage) -> StagePlan:
        """Everything needed to submit the stage.

        Raises `JobError` where a stage that it reads from has not been done.
        """
        if stage not in STAGES:
            raise ConfigError([f"stage: got {stage!r}; {hint(stage, STAGES, table('word_names')['values'])}"])
        inputs = self._inputs(stage)
        base = self.base_name(stage)
        # One call answers both questions about a train stage: done already, and does another one write.
        siblings = self._known("train") if stage == "train" else self._attempts(base)
        earlier = attempts_at(base, siblings)
        if stage == "compile" and self.look:
            earlier += self._compiled(earlier)
        name = base if not earlier else f"{base}-{len(earlier) + 1}"
        bundle = build_bundle()
        root = self.config.output.s3_uri
        code_uri = f"{root}/code/{bundle.sha256[:16]}/"
        shown = self.config.for_stage(stage)
        text = (json.dumps(shown, indent=2, sort_keys=True) + "\n").encode()
        config_uri = f"{root}/configs/{digest(shown)[:16]}/"
        needed = [upload for upload in self.resolved.uploads if upload.uri in inputs.values()]
        return StagePlan(
            stage,
            base,
            create_training_job(self.config, stage, name, inputs, code_uri, config_uri, self.resolved.described),
            (
                *needed,
                Upload(code_uri, (("bundle.tar.gz", bundle.data),)),
                Upload(config_uri, (("config.json", text),)),
            ),
            tuple(earlier),
            next((job for job in siblings if job.known_running), None) if stage == "train" else None,
        )

    def output(self, stage: Stage) -> str | None:
        """Where the stage's finished job left its result; None where it has not been done."""
        if stage in self.lent:
            return self.lent[stage]
        base = self.base_name(stage)
        if not self.look or stage in self.promised:
            return output_uri(self.config, self.promised.get(stage, base))
        done = next((job for job in self._attempts(base) if job.known_done), None)
        return output_uri(self.config, done.name) if done else None

    def known(self, stage: Stage) -> bool:
        """Whether a job of the stage runs or has done it."""
        return any(job.known_done or job.known_running for job in self._attempts(self.base_name(stage)))

    def begun(self, stage: Stage) -> bool:
        """Whether any job was ever started for the stage."""
        return bool(self._attempts(self.base_name(stage)))

    @cached_property
    def graphs(self) -> str:
        """s3:// URI of the cache that stage compile fills; raises `ConfigError` where it has nothing to do."""
        made = environment(self.config, "compile", image_of(self.config), self.resolved.described)
        return graphs.compilable(self.config, made)

    @property
    def checkpoints(self) -> str:
        """s3:// prefix of the run's checkpoints."""
        return checkpoint_uri(self.config)

    def _inputs(self, stage: Stage) -> dict[str, str]:
        if stage == "fetch":
            if not self.config.model.path.startswith(HUBS):
                raise ConfigError([f"model.path: {self.config.model.path} is not on a hub; there is nothing to fetch"])
            return {}
        found = self.config.model.path
        found = self._needs(stage, "fetch") if found.startswith(HUBS) else found
        # A folder's prefix ends in "/", or a sibling whose name begins alike would come along.
        model = f"{found.rstrip('/')}/"
        named = self.config.model.weights
        weights = {"weights": f"{named.rstrip('/')}/"} if named else {}
        if stage == "prepare":
            sources = self.config.data.all_sources
            if not sources:
                raise ConfigError(["data.path: is missing; the prepare stage needs text"])
            channels = {name: source.path for name, source in zip(text_channels(self.config), sources, strict=True)}
            if self.config.train.validation and self.config.train.validation.path:
                channels[VALIDATION_CHANNEL] = self.config.train.validation.path
            return {"model": model} | {name: path for name, path in channels.items() if not path.startswith("hf://")}
        if stage == "convert":
            return {"model": model} | weights
        if stage in ("compile", "train"):
            prepared = self.config.data.prepared
            data = f"{prepared.rstrip('/')}/" if prepared else self._needs(stage, "prepare")
            if stage == "compile":
                return {"data": data, "model": model}
            shards = self.output("convert") if "convert" in stages_of(self.config) else None
            return {"data": data, "model": model} | ({"shards": shards} if shards else weights)
        if stage == "export":
            merged = weights if self.config.train.adapter else {}
            return {"checkpoint": checkpoint_uri(self.config), "model": model} | merged
        if stage == "evaluate":
            return self._evaluated(model)
        exported = {"model": self._needs("generate", "export")}
        adapter = self.config.train.adapter and not self.config.export.merge
        return exported | ({"base": model} if adapter else {})

    def _evaluated(self, base: str) -> dict[str, str]:
        """The exported model, and as far as they are asked for the model before it and the tasks' data."""
        asked = self.config.evaluate
        if not asked.tasks:
            raise ConfigError(["evaluate.tasks: names no task; give some, such as [mmlu], for the stage evaluate"])
        channels = {"model": self._needs("evaluate", "export")}
        adapter = self.config.train.adapter and not self.config.export.merge
        if (asked.base or adapter) and self.config.model.init == "weights":
            channels["base"] = base
        if asked.data:
            channels["tasks"] = f"{asked.data.rstrip('/')}/"
        return channels

    def _needs(self, stage: Stage, other: Stage) -> str:
        found = self.output(other)
        if found is None:
            raise JobError(
                f"stage {stage} reads what {other} writes, and no finished {self.base_name(other)} was found; "
                f"launch stage {other} first, or `smtrain run` the whole chain"
            )
        return found

    def _compiled(self, known: list[Job]) -> list[Job]:
        """The job of another run that filled this very cache, if one did."""
        told = graphs.held(self.target, self.graphs)
        if told is None or told["job"] in [job.name for job in known]:
            return []
        job = Job(told["job"], self.target)
        job.known_status = "Completed"
        return [job]

    def _attempts(self, base: str) -> list[Job]:
        return attempts_at(base, list_jobs(self.target, name_contains=base, limit=1000)) if self.look else []

    def _known(self, stage: Stage) -> list[Job]:
        return jobs_of(self.target, self.config.name, stage) if self.look else []
