"""Check that AWS gives and connects the machines: Service Quotas of each use, and EFA between
hosts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from smtrain.client.findings import Finding
from smtrain.client.preflight.context import CheckUnavailable, Context, ResourceMissing
from smtrain.core.facts import instance, sagemaker
from smtrain.core.facts.engines import is_gpu
from smtrain.core.protocol.requests import groups_of


@dataclass(frozen=True)
class QuotaNeed:
    """The amount of a quota that a run needs."""

    name: str
    amount: int
    key: str
    """The config key to lower instead."""
    general: bool = False
    """True for a quota of the account, not of an instance type: if it is not listed, there is no
    limit.
    """
    spare: bool = False
    """True for a fallback type, which may never be requested."""
    has_other_regions: bool = False
    """True if the job may run in another region (compute.fallback_regions)."""


def quotas(context: Context) -> Iterator[Finding]:
    """One finding a quota.

    A job above its quota is refused (ResourceLimitExceeded); a pool above it is not kept.
    """
    needs = list(_needs(context))
    values = _list_quotas(context, {need.name for need in needs})
    region = context.chain.target.region_name()
    for need in needs:
        if need.name not in values:
            if not need.general:
                yield Finding(
                    "quotas",
                    "warning",
                    f"Service Quotas lists no {need.name!r} in {region}",
                    "the type may not be offered there; look at the region's list in the Service"
                    " Quotas console",
                )
            continue
        code, value = values[need.name]
        if value >= need.amount:
            yield Finding("quotas", "ok", f"{need.name!r} is {value:,.10g}, {need.amount:,} needed")
        else:
            yield Finding(
                "quotas",
                "warning" if need.spare or need.has_other_regions else "fault",
                f"{need.name!r} is {value:,.10g}, and this takes {need.amount:,}",
                f"{'leave it out of' if need.spare else 'lower'} {need.key}, or ask for more: "
                f"{sagemaker.quota_command(code, need.amount, region)}",
            )


def _needs(context: Context) -> Iterator[QuotaNeed]:
    compute = context.config.compute
    seen_requests = set()
    # Compile last: its machines of the same type are part of the train stage's.
    for stage, request in sorted(context.requests.items(), key=lambda item: item[0] == "compile"):
        resources, train = request["ResourceConfig"], stage == "train"
        (type_, count), *_ = groups_of(request)
        spot = bool(request.get("EnableManagedSpotTraining"))
        if (type_, count, spot) in seen_requests:
            continue
        seen_requests.add((type_, count, spot))
        keys = {"train": "compute.instance_count", "compile": "compute.compile_ahead to false"}
        if stage == "prepare" and count > 1:
            keys["prepare"] = "data.machines"
        key = keys.get(stage, "compute.cpu_instance_type")
        yield QuotaNeed(
            (sagemaker.SPOT if spot else sagemaker.TRAINING).format(type=type_),
            count,
            key,
            has_other_regions=train and bool(compute.fallback_regions),
        )
        if train:
            for fallback_type in compute.fallback_instance_types:
                yield QuotaNeed(
                    sagemaker.TRAINING.format(type=fallback_type),
                    count,
                    "compute.fallback_instance_types",
                    spare=True,
                )
            yield QuotaNeed(
                sagemaker.PER_SPOT_JOB if spot else sagemaker.PER_JOB, count, key, general=True
            )
            yield QuotaNeed(
                sagemaker.ALL_SPOT_JOBS if spot else sagemaker.ALL_JOBS, count, key, general=True
            )
            yield QuotaNeed(sagemaker.RUN_TIME, compute.max_run, "compute.max_run", general=True)
            yield QuotaNeed(sagemaker.VOLUME, compute.volume_gb, "compute.volume_gb", general=True)
        if resources.get("KeepAlivePeriodInSeconds"):
            yield QuotaNeed(
                sagemaker.WARM_POOL.format(type=type_), count, "compute.keep_alive to 0"
            )


def _list_quotas(context: Context, names: set[str]) -> dict[str, tuple[str, float]]:
    """Code and value by name: values applied to the account, else AWS's defaults."""
    values: dict[str, tuple[str, float]] = {}
    for operation in ("list_service_quotas", "list_aws_default_service_quotas"):
        token: dict[str, str] = {}
        while names - values.keys():
            try:
                page = context.ask(
                    "service-quotas",
                    operation,
                    absent=["NoSuchResourceException"],
                    ServiceCode="sagemaker",
                    MaxResults=100,
                    **token,
                )
            except ResourceMissing:
                raise CheckUnavailable("Service Quotas has no entry for sagemaker here") from None
            for row in page["Quotas"]:
                if row["QuotaName"] in names:
                    values.setdefault(row["QuotaName"], (row["QuotaCode"], row["Value"]))
            if not page.get("NextToken"):
                break
            token = {"NextToken": page["NextToken"]}
    return values


def hosts(context: Context) -> Iterator[Finding]:
    """Neuron's collectives go over EFA, which the smallest types lack (aws-neuron-sdk#742); NCCL
    has TCP.
    """
    compute = context.config.compute
    row = instance(compute.instance_type)
    if (
        "train" not in context.stages
        or not context.on_aws
        or compute.instance_count == 1
        or row is None
    ):
        return
    if not row["efa"] and is_gpu(compute.instance_type):
        yield Finding(
            "hosts",
            "warning",
            f"{compute.instance_type} has no EFA: {compute.instance_count} hosts exchange "
            f"gradients over TCP at {row['network_gbps']:g} Gb/s",
            "one larger host is faster if the model fits it; ml.p4d, ml.p5 and later have EFA",
        )
    elif not row["efa"]:
        yield Finding(
            "hosts",
            "fault",
            f"{compute.instance_type} has no EFA, which hosts need to talk to one another: "
            f"{compute.instance_count} of them cannot train together",
            "set compute.instance_count: 1, or choose ml.trn1.32xlarge or larger",
        )
