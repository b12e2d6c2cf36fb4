"""Run the train stage in another region: order the regions by dollars, copy the inputs, clean up.

SageMaker reads and writes buckets of the job's own region, so a job elsewhere gets copies of its
inputs in SageMaker's default bucket there. The stages after it follow it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from smtrain.client.backends.choose import sagemaker
from smtrain.client.backends.sagemaker.backend import SageMakerBackend
from smtrain.client.backends.sagemaker.s3 import list_prefix, owner
from smtrain.client.launch.stages import Chain, StagePlan
from smtrain.client.prices import Prices, option_of, own_prices
from smtrain.core.config import JobConfig, Stage
from smtrain.core.config.units import spell_bytes
from smtrain.core.errors import JobError, SmtrainError
from smtrain.core.facts.sagemaker import TRAINING
from smtrain.core.protocol.requests import groups_of
from smtrain.core.protocol.uris import JUMPSTART_BUCKET, split_uri
from smtrain.core.text import Say
from smtrain.stages import stages_of
from smtrain.stages.base import run_uri

COPIES = "copies"
"""Folder of the copies in a region's default bucket, below smtrain/."""


def chain_in(chain: Chain, region: str) -> Chain:
    """The stages of a config in a region; in another one they read what the finished stages before
    train wrote at home.
    """
    home = chain.home or chain
    if region == _region(home):
        return home
    compute = home.given.compute.model_copy(update={"region": region, "fallback_regions": ()})
    target = SageMakerBackend(home.target.name, region, is_fallback=True)
    away = Chain(home.given.model_copy(update={"compute": compute}), target, look=home.look)
    away.home, away.lent = home, dict(home.lent)
    for stage in stages_of(home.config):
        if stage == "train":
            break
        if output := home.output(stage):
            away.lent[stage] = output
    return away


def chains(chain: Chain) -> list[Chain]:
    """The chain in each region of its config, its own first."""
    return [chain, *(chain_in(chain, region) for region in chain.config.compute.fallback_regions)]


def locate(chain: Chain, stage: Stage) -> Chain:
    """The chain of the region in which a stage runs: from train on, that of the train stage's job.

    It is compute.region as long as no job trains or has trained.
    """
    stages = stages_of(chain.config)
    is_fixed = not chain.config.compute.fallback_regions or not chain.look
    if is_fixed or "train" not in stages or stages.index(stage) < stages.index("train"):
        return chain
    return next((way for way in chains(chain) if way.has_job("train")), chain)


@dataclass
class Way:
    """A stage in one region, its request redirected to the copies of its inputs."""

    chain: Chain
    plan: StagePlan
    copies: Copies
    earlier_keys: set[tuple[str, str]] | None = None
    """Objects that were there before the launch wrote any; None until it does."""

    @classmethod
    def of(cls, chain: Chain, plan: StagePlan) -> Way:
        copies = Copies.of(chain, plan)
        return cls(chain, copies.redirect(plan), copies)

    @property
    def region(self) -> str:
        return _region(self.chain)

    def leave(self, reason: str, say: Say) -> None:
        """Delete what this launch wrote in a region that did not take the job."""
        removed_count = (
            self.copies.remove(self.earlier_keys)
            if self.chain.home and self.earlier_keys is not None
            else 0
        )
        self.earlier_keys = None
        say(
            f"{self.region}: {reason}"
            + (f"; {removed_count} objects were removed again" if removed_count else "")
        )


def ways_by_dollars(chain: Chain, stage: Stage, say: Say) -> list[Way]:
    """The stage in each region, cheapest first, if no region has checkpoints of the run; else in
    that region only. Says the order and its prices.
    """
    ways = [Way.of(way, way.plan(stage)) for way in chains(chain)]
    if resumable := [way for way in ways if _has_checkpoints(way.chain)]:
        say(f"the run has checkpoints in {resumable[0].region}, so it resumes there")
        return resumable[:1]
    hours = _hours(chain.given)
    # Python's sort is stable: of equal ones the config's order counts.
    ways.sort(key=lambda way: _dollars(way.chain, hours) + way.copies.dollars)
    for number, way in enumerate(ways, 1):
        say(f"{number}. {_describe(way, hours)}")
    return ways


def quota_fault(chain: Chain, plan: StagePlan) -> str | None:
    """A sentence if the quota of a region is too small for the job; None also if it cannot be
    read.
    """
    from botocore.exceptions import BotoCoreError, ClientError

    (type_, count), *_ = groups_of(plan.request)
    target = sagemaker(chain.target)
    name = TRAINING.format(type=type_)
    try:
        pages = target.client("service-quotas").get_paginator("list_service_quotas")
        values = (
            quota["Value"]
            for page in pages.paginate(ServiceCode="sagemaker")
            for quota in page["Quotas"]
            if quota["QuotaName"] == name
        )
        value = next(values, None)
    except (BotoCoreError, ClientError):  # the request itself tells
        return None
    if value is None or value >= count:
        return None
    return f"the quota {name!r} is {value:g}, and the run takes {count}"


@dataclass(frozen=True)
class Copies:
    """The inputs of a job that lie in another region, and their places in its own."""

    source: SageMakerBackend
    target: SageMakerBackend
    places: Mapping[str, str]
    """Prefix here by prefix there."""
    sizes: Mapping[str, int]
    """Bytes by prefix there."""
    written_uris: tuple[str, ...] = ()
    """Prefixes that a launch in this region writes."""

    @classmethod
    def of(cls, chain: Chain, plan: StagePlan) -> Copies:
        """The copies that a stage needs; none at home."""
        target = sagemaker(chain.target)
        if chain.home is None:
            return cls(target, target, {}, {})
        source, root = sagemaker(chain.home.target), str(chain.config.output.s3_uri)
        bucket = split_uri(root)[0]
        uris = [
            uri
            for uri in _channels(plan.request)
            if split_uri(uri)[0] != bucket
            # JumpStart has the same models in every region.
            and not split_uri(uri)[0].startswith(JUMPSTART_BUCKET)
        ]
        places = {uri: f"{root}/{COPIES}/{uri.removeprefix('s3://')}" for uri in uris}
        sizes = {uri: sum(item["Size"] for item in list_prefix(source, uri)) for uri in uris}
        uploads = [upload.uri for upload in plan.uploads]
        return cls(
            source, target, places, sizes, (*places.values(), *uploads, run_uri(chain.config))
        )

    @property
    def dollars(self) -> float:
        """The price of the transfer between the regions."""
        rate = Prices(own_prices()).assumptions["region_copy_dollars_per_gb"]
        return sum(self.sizes.values()) / 1e9 * rate

    def redirect(self, plan: StagePlan) -> StagePlan:
        """The plan with the copies as its inputs."""
        channels = [_with_uri(channel, self.places) for channel in plan.request["InputDataConfig"]]
        return replace(plan, request={**plan.request, "InputDataConfig": channels})

    def make(self, say: Say) -> None:
        """Copy what is not there yet, after saying its size and price.

        Raises `JobError` if an object may not be copied.
        """
        from botocore.exceptions import ClientError

        if not self.places:
            return
        say(
            f"copying {spell_bytes(sum(self.sizes.values()))} from {self.source.region_name()} to"
            f" {self.target.region_name()}, about ${self.dollars:,.2f} for the transfer"
        )
        for uri, place in self.places.items():
            known_sizes = {item["Key"]: item["Size"] for item in self._listing(place)}
            bucket, prefix = split_uri(uri)
            own_bucket, own_prefix = split_uri(place)
            for item in list_prefix(self.source, uri):
                key = own_prefix + item["Key"].removeprefix(prefix)
                if known_sizes.get(key) == item["Size"]:
                    continue
                try:
                    self.target.s3.copy(
                        {"Bucket": bucket, "Key": item["Key"]},
                        own_bucket,
                        key,
                        SourceClient=self.source.s3,
                    )
                except ClientError as error:
                    raise JobError(
                        f"s3://{bucket}/{item['Key']} cannot be copied to {self.target.region_name()}"
                        f" ({error.response['Error'].get('Code')}); allow yourself s3:GetObject on"
                        " it and s3:PutObject on its copy, or leave the region out of"
                        " compute.fallback_regions",
                        code="aws.refused",
                    ) from None

    def keys(self) -> set[tuple[str, str]]:
        """(bucket, key) of every object below the prefixes that a launch writes."""
        return {
            (split_uri(uri)[0], item["Key"])
            for uri in self.written_uris
            for item in self._listing(uri)
        }

    def remove(self, earlier_keys: set[tuple[str, str]]) -> int:
        """Delete the objects that were not there before (`earlier_keys`); returns their number."""
        new = sorted(self.keys() - earlier_keys)
        for bucket, key in new:
            self.target.s3.delete_object(Bucket=bucket, Key=key, **owner(self.target, bucket))
        return len(new)

    def _listing(self, uri: str) -> list[dict[str, Any]]:
        """The objects under a prefix; none if its bucket does not exist yet."""
        from botocore.exceptions import ClientError

        try:
            return list_prefix(self.target, uri)
        except ClientError as error:
            if error.response["Error"].get("Code") in ("404", "NoSuchBucket"):
                return []
            raise


def _channels(request: Mapping[str, Any]) -> Iterator[str]:
    """The s3:// prefixes that a request reads."""
    for channel in request["InputDataConfig"]:
        if source := channel["DataSource"].get("S3DataSource"):
            yield source["S3Uri"]


def _with_uri(channel: dict[str, Any], places: Mapping[str, str]) -> dict[str, Any]:
    source = channel["DataSource"].get("S3DataSource")
    if not source or source["S3Uri"] not in places:
        return channel
    moved_source = {**source, "S3Uri": places[source["S3Uri"]]}
    return {**channel, "DataSource": {"S3DataSource": moved_source}}


def _has_checkpoints(chain: Chain) -> bool:
    from smtrain.client.jobs.checkpoints import saved_steps

    try:
        return bool(saved_steps(chain.target, chain.checkpoints))
    except JobError:  # there is no bucket yet, or it may not be listed
        return False


def _hours(config: JobConfig) -> float | None:
    """Hours of the train stage by the planner; None if it does not know them."""
    from smtrain.client.planner.plan import plan

    try:
        return plan(config, target="aws").hours
    except SmtrainError:
        return None


def _hourly(chain: Chain) -> float | None:
    """The price of one machine an hour; None if none is known for any region."""
    compute, region = chain.config.compute, _region(chain)
    price = Prices(own_prices()).find(compute.instance_type, option_of(compute), region)
    return price.dollars_per_hour if price else None


def _dollars(chain: Chain, hours: float | None) -> float:
    hourly = _hourly(chain) or 0.0
    return hourly * chain.config.compute.instance_count * (hours or 1.0)


def _describe(way: Way, hours: float | None) -> str:
    hourly = _hourly(way.chain)
    machines = "no price is known" if hourly is None else f"{hourly:.2f} $/h a machine"
    training = (
        f", ${_dollars(way.chain, hours):,.2f} for training"
        if hourly is not None and hours is not None
        else ""
    )
    transfer = (
        f", ${way.copies.dollars:,.2f} to copy {spell_bytes(sum(way.copies.sizes.values()))} there"
        if way.copies.places
        else ""
    )
    return f"{way.region}: {machines}{training}{transfer}"


def _region(chain: Chain) -> str:
    return sagemaker(chain.target).region_name()
