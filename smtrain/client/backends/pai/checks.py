"""Check PAI-DLC before anything is created: the API, the storage, the types of public resources,
the inputs on OSS.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence

from smtrain.client.backends.pai.backend import PaiBackend
from smtrain.client.backends.pai.cloud import CloudError
from smtrain.client.config.checks.weights import shape_faults
from smtrain.client.findings import Finding
from smtrain.core.config import JobConfig, Stage
from smtrain.core.config.schema import inputs_of
from smtrain.core.files import parse_object
from smtrain.core.protocol.uris import OSS, split_uri
from smtrain.core.suggest import nearest
from smtrain.stages import stage_named


def run_checks(
    backend: PaiBackend,
    config: JobConfig,
    stages: Sequence[Stage],
    copied_uris: Collection[str] = (),
    *,
    probe: bool = False,
) -> Iterator[Finding]:
    """Make all checks; after a fault of the API or the credentials only that one.

    Deletes everything that they write.

    `copied_uris`: URIs that the launch writes first. `probe` has no effect, as no pod can be asked
    without a job.
    """
    try:
        next(backend.cloud.jobs(None, 1), None)
    except CloudError as error:
        yield Finding("pai-dlc", "fault", str(error))
        return
    of = f", workspace {backend.section.workspace}" if backend.section.workspace else ""
    yield Finding("pai-dlc", "ok", f"PAI-DLC answers in {backend.region_name()}{of}")
    yield from _storage(backend)
    yield from _types(backend, stages)
    yield from _inputs(config, copied_uris, backend)


def _storage(backend: PaiBackend) -> Iterator[Finding]:
    """Write and delete an object below the storage."""
    probe = f"{backend.section.base}/.smtrain-check-{os.urandom(4).hex()}"
    try:
        backend.cloud.claim(probe, b"")
        backend.cloud.remove(probe)
    except CloudError as error:
        yield Finding("storage", "fault", str(error))
    else:
        yield Finding("storage", "ok", f"{backend.section.base} may be written")


def _types(backend: PaiBackend, stages: Sequence[Stage]) -> Iterator[Finding]:
    """The types of the stages' pods, if public resources are used; a quota cannot be asked with
    this API.
    """
    section = backend.section
    if section.quota is not None:
        yield Finding(
            "resources",
            "warning",
            f"whether quota {section.quota} has room is not checked",
            "nothing needs to be done; the job waits for it",
        )
        return
    keys_by_type: dict[str, str] = {}
    for stage in stages:
        on_cpus = not stage_named(stage).on_accelerators and section.cpu_ecs_spec
        keys_by_type[str(section.cpu_ecs_spec if on_cpus else section.ecs_spec)] = (
            "cpu_ecs_spec" if on_cpus else "ecs_spec"
        )
    try:
        region_types = backend.cloud.types()
    except CloudError as error:
        yield Finding(
            "resources", "warning", f"the types of public resources were not checked ({error})"
        )
        return
    for name, key in keys_by_type.items():
        if name not in region_types:
            suggestion = nearest(name, sorted(region_types), cutoff=0.0)
            text, remedy = (
                f"{backend.region_name()} offers no {name}",
                f"set pai.{key} to one that it offers, such as {suggestion}",
            )
            yield Finding("resources", "fault", text, remedy)
        else:
            yield Finding("resources", "ok", f"{backend.region_name()} offers {name}")


def _inputs(
    config: JobConfig, copied_uris: Collection[str], backend: PaiBackend
) -> Iterator[Finding]:
    """Inputs on OSS that are not uploaded first."""
    for key, uri in inputs_of(config):
        if not uri.startswith(OSS) or uri in copied_uris:
            continue
        try:
            objects = backend.listing(uri)
        except CloudError as error:
            yield Finding("inputs", "fault", f"{key}: {error}")
            continue
        if not objects:
            yield Finding(
                "inputs",
                "fault",
                f"{key}: there is nothing at {uri}",
                "correct the path in the config",
            )
            continue
        yield Finding("inputs", "ok", f"{uri}: read in place")
        if key == "model.path":
            yield from _model(
                config, backend, uri.rstrip("/"), {str(item["Key"]) for item in objects}
            )


def _model(config: JobConfig, backend: PaiBackend, uri: str, keys: set[str]) -> Iterator[Finding]:
    """The shape of a model on OSS."""
    file = f"{uri}/config.json"
    if split_uri(file)[1] not in keys:
        yield Finding(
            "model", "fault", f"{uri} holds no config.json", "name a Hugging Face model folder"
        )
        return
    try:
        model_config = parse_object(backend.read(file))
        faults = [text for _, text in shape_faults(config, model_config)]
    except (CloudError, ValueError) as error:
        yield Finding(
            "model", "fault", f"{file} cannot be read ({error})", "copy the model there again"
        )
        return
    yield from (Finding("model", "fault", text) for text in faults)
    if not faults:
        yield Finding("model", "ok", f"{file} describes a model that smtrain trains")
