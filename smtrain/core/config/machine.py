"""A machine of one's own, as the planner needs it: any GPU, any cluster."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from smtrain.core.config.section import Section

MachineName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9-]{0,39}$")]


class MachineEntry(Section):
    """What the planner must know of a machine that no table has; `smtrain plan --probe` measures the one at hand."""

    kind: Literal["gpu", "cpu"] = "gpu"
    """What its devices are; a device of kind cpu is a training process's share of the host."""
    devices: int = Field(ge=1, le=1024)
    """Devices of a host: one training process runs on each."""
    memory_gib: float = Field(gt=0, le=100_000)
    """Memory of one device, in GiB."""
    tflops: float = Field(gt=0, le=1_000_000)
    """Dense bf16 peak of one device, in 1e12 operations a second, without sparsity; measured is better than printed."""
    link_gbs: float | None = Field(None, gt=0, le=1_000_000)
    """From one device to the others of its host, 1e9 bytes a second in one direction; default: network_gbs."""
    network_gbs: float | None = Field(None, gt=0, le=1_000_000)
    """Between hosts, 1e9 bytes a second of a whole host; needed to plan with more than one."""
    host_memory_gib: float = Field(gt=0, le=1_000_000)
    """Memory of the host, in GiB."""
    dollars_per_hour: float | None = Field(None, ge=0, le=1_000_000)
    """What a host costs; default: it has no price."""
