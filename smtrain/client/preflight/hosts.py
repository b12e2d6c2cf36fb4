"""Check that several machines of this type can train together."""

from __future__ import annotations

from collections.abc import Iterator

from smtrain.client.preflight.context import Context
from smtrain.client.preflight.findings import Finding
from smtrain.core.facts import instance
from smtrain.core.facts.engines import is_gpu


def hosts(context: Context) -> Iterator[Finding]:
    """Neuron's collectives go over EFA, which the smallest types lack (aws-neuron-sdk#742); NCCL has TCP."""
    compute = context.config.compute
    row = instance(compute.instance_type)
    if "train" not in context.stages or not context.on_aws or compute.instance_count == 1 or row is None:
        return
    if not row["efa"] and is_gpu(compute.instance_type):
        yield Finding(
            "hosts", "warning", f"{compute.instance_type} has no EFA: {compute.instance_count} hosts exchange "
            f"gradients over TCP at {row['network_gbps']:g} Gb/s",
            "one larger host is faster if the model fits it; ml.p4d, ml.p5 and later have EFA",
        )  # fmt: skip
    elif not row["efa"]:
        yield Finding(
            "hosts", "fault", f"{compute.instance_type} has no EFA, which hosts need to talk to one another: "
            f"{compute.instance_count} of them cannot train together",
            "set compute.instance_count: 1, or choose ml.trn1.32xlarge or larger",
        )  # fmt: skip
