"""Check buckets and their content: reachable, in the job's region, not empty, and suitable for
FastFile.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import islice

from smtrain.client.findings import Finding
from smtrain.client.launch.prefix_siblings import sibling_of
from smtrain.client.preflight.context import Context, ResourceMissing
from smtrain.core.config.schema import inputs_of, other_inputs
from smtrain.core.protocol.uris import objects_at, split_uri

GIB = 2**30
# FastFile lists a channel when the job starts and opens one stream per file; both cost per object,
# not per byte (SageMaker guide, "best practices for choosing data source": fewer and larger files,
# read in sequence).
MANY_OBJECTS, SMALL = 100_000, 2**20
MAX_LISTED = 200_000
"""Objects read per channel; a count above MANY is reported as "more than"."""


def buckets(context: Context) -> Iterator[Finding]:
    """Every bucket in the requests: it exists, is yours to use, and is in the job's region."""
    region = context.chain.target.region_name()
    for bucket in sorted(_buckets(context)):
        try:
            answer = context.ask("s3", "head_bucket", absent=["404", "NoSuchBucket"], Bucket=bucket)
        except ResourceMissing:
            yield Finding(
                "buckets", "fault", f"there is no bucket {bucket}", "create it, or correct the URI"
            )
            continue
        actual = answer.get("BucketRegion") or region
        if actual != region:
            yield Finding(
                "buckets",
                "fault",
                f"{bucket} is in {actual}, and the job runs in {region}",
                "SageMaker reads only buckets of the job's region: set compute.region, or copy the"
                " data",
            )
        else:
            yield Finding("buckets", "ok", f"{bucket} is there, in {region}")


def inputs(context: Context) -> Iterator[Finding]:
    """The config's own s3:// inputs: not empty, and not a very large number of tiny objects."""
    config = context.chain.given
    of_prepare = {config.data.text_key, *(key for key, *_ in other_inputs(config))}
    read = {
        "evaluate.data": "evaluate" in context.stages,
        **dict.fromkeys(of_prepare, "prepare" in context.stages),
    }
    uris = {
        "model.path": context.model_path,
        "data.prepared": context.config.data.prepared or "",
    }
    for key, path in inputs_of(config):
        uri = uris.get(key, path)
        if not uri.startswith("s3://") or not read.get(key, True):
            continue
        ask = partial(context.ask, "s3", "list_objects_v2", absent=["NoSuchBucket"])
        with suppress(ResourceMissing):
            if sibling_and_remedy := sibling_of(ask, uri):
                sibling, remedy = sibling_and_remedy
                text = f"{key}: SageMaker reads all keys that begin like {uri}, also {sibling}"
                yield Finding("inputs", "fault", text, remedy)
                continue
        sizes = list(sizes_by_name(context, uri).values())
        total = sum(sizes)
        object_note = f"{uri} holds {len(sizes):,} objects, {total / GIB:.1f} GiB"
        small = sum(size < SMALL for size in sizes)
        if not sizes or not total:
            yield Finding(
                "inputs",
                "fault",
                f"{key}: {uri} is empty",
                "correct the URI, or upload what should be there",
            )
        elif len(sizes) > MANY_OBJECTS:
            yield Finding(
                "inputs",
                "warning",
                f"{key}: {object_note}; FastFile lists them all before the job begins",
                "pack them into fewer files of 100 MiB or more",
            )
        elif small > max(1000, len(sizes) // 2):
            yield Finding(
                "inputs",
                "warning",
                f"{key}: {object_note}, {small:,} of them below 1 MiB; each costs a request to"
                " read",
                "pack them into fewer files of 100 MiB or more",
            )
        else:
            yield Finding("inputs", "ok", f"{key}: {object_note}")


def _buckets(context: Context) -> set[str]:
    uris = [request["OutputDataConfig"]["S3OutputPath"] for request in context.requests.values()]
    for request in context.requests.values():
        sources = [
            channel["DataSource"].get("S3DataSource") for channel in request["InputDataConfig"]
        ]
        uris += [source["S3Uri"] for source in sources if source]
        uris += [request["CheckpointConfig"]["S3Uri"]] if "CheckpointConfig" in request else []
    return {split_uri(uri)[0] for uri in uris}


def sizes_by_name(context: Context, uri: str) -> dict[str, int]:
    """Bytes of the objects under a prefix by their keys, up to LISTED; empty if the bucket does not
    exist.
    """
    objects = objects_at(
        partial(context.ask, "s3", "list_objects_v2", absent=["NoSuchBucket"]), uri
    )
    try:
        return {item["Key"]: item["Size"] for item in islice(objects, MAX_LISTED)}
    except ResourceMissing:
        return {}
