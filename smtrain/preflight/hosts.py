"""Several hosts: whether machines of this type can train together at all."""

from __future__ import annotations

from collections.abc import Iterator

from smtrain.facts import instance
from smtrain.preflight.context import Context
from smtrain.preflight.findings import Finding


def hosts(context: Context) -> Iterator[Finding]:
    """Neuron's collectives between hosts go over EFA, which the smallest types lack (aws-neuron-sdk#742)."""
    compute = context.config.compute
    row = instance(compute.instance_type)
    if "train" not in context.stages or not context.on_aws or compute.instance_count == 1 or row is None:
        return
    if not row["efa"]:
        yield Finding(
            "hosts", "fault", f"{compute.instance_type} has no EFA, over which hosts talk: {compute.instance_count} of "
            "them cannot train together", "set compute.instance_count: 1, or choose ml.trn1.32xlarge or larger",
        )  # fmt: skip
