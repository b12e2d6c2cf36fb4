"""The user's own prefixes that a job reads, as they were when it was launched.

A job's name depends on the URIs that it reads, not on their content. So each launch keeps a digest
of their listings next to the stage's config: a later call notices that a finished job has read
other files, and a preparation does not continue one of other text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from smtrain.client.backends.base import Backend
from smtrain.client.config.checks import texts_in
from smtrain.core.config import JobConfig
from smtrain.core.errors import JobError
from smtrain.core.files import parse_json
from smtrain.core.protocol.container import listings_name
from smtrain.core.protocol.uris import object_store


def listings_of(place: Backend, config: JobConfig, inputs: Mapping[str, str]) -> dict[str, str]:
    """A digest of keys, sizes and ETags below each URI that a config names and a stage reads, by
    URI.

    URIs that the caller may not list are left out, and so are all of a Slurm cluster, whose jobs
    list them.
    """
    if place.record.chains:  # its jobs list them
        return {}
    store = object_store(place.name)
    config_uris = {
        uri.rstrip("/")
        for _, uri in texts_in(config.model_dump(mode="json"))
        if uri.startswith(store)
    }
    return {
        uri: digest
        for uri in sorted({*inputs.values()})
        if uri.rstrip("/") in config_uris and (digest := _digest(place, uri))
    }


def record(listings: Mapping[str, str]) -> bytes:
    """The content of a job's record."""
    return (json.dumps(listings, indent=1) + "\n").encode()


def changed_input(
    place: Backend, config_uri: str, job: str, listings: Mapping[str, str]
) -> str | None:
    """A URI whose files differ from those that a job has read; None if all are the same or the
    job has no record.

    Args:
        place: The backend of the job.
        config_uri: The prefix of the stage's config.
        job: Its name.
        listings: The digests of now.
    """
    if not listings:
        return None
    try:
        recorded_digests = parse_json(place.read(f"{config_uri}{listings_name(job)}"))
    except (JobError, ValueError):  # of an earlier release
        return None
    if not isinstance(recorded_digests, dict):
        return None
    return next(
        (uri for uri, digest in listings.items() if recorded_digests.get(uri, digest) != digest),
        None,
    )


def _digest(place: Backend, uri: str) -> str | None:
    try:
        rows = [
            [item["Key"], item["Size"], str(item["ETag"]).strip('"')] for item in place.listing(uri)
        ]
    except JobError:
        return None
    return hashlib.sha256(json.dumps(sorted(rows)).encode()).hexdigest()
