"""Time of the jobs around train: each stage of the run by its own estimate, or the reason why it
has none.
"""

from __future__ import annotations

from dataclasses import dataclass

from smtrain.client.planner.cost import StageEstimate
from smtrain.client.planner.machines import Machine
from smtrain.client.planner.preparing import reading_seconds
from smtrain.client.planner.stages import machine_for
from smtrain.client.planner.workload import described_of, shape_of, text_bytes
from smtrain.client.prices import Prices
from smtrain.core.config import JobConfig
from smtrain.core.targets import TARGETS
from smtrain.stages import stage_named, stages_of


@dataclass(frozen=True)
class StageEstimates:
    """The stages of a run other than train."""

    estimates: tuple[StageEstimate, ...]
    unestimated_reasons: dict[str, str]
    """Stages without an estimate, and the reasons."""
    left_out: dict[str, str]
    """Work that an estimate leaves out, by stage."""

    @classmethod
    def of(cls, config: JobConfig, machine: Machine, prices: Prices) -> StageEstimates:
        """Estimate each stage that a run of this config has on its target, if it trains on this
        machine.
        """
        estimates, unestimated_reasons, left_out = [], {}, {}
        shape, hf_config = shape_of(config), described_of(config)
        for name in stages_of(config, config.target):
            if name == "train":
                continue
            stage = stage_named(name)
            need = stage.resources(config, shape, prices.assumptions)
            if need is None:
                unestimated_reasons[name] = "nothing is assumed about it"
                continue
            if not TARGETS[config.target].rented and not stage.on_accelerators:
                is_here = TARGETS[config.target].here
                unestimated_reasons[name] = (
                    "only training is planned on machines of your own"
                    if is_here
                    else "the planner knows the CPU machines of AWS only"
                )
                continue
            kind = machine.type if stage.on_accelerators else machine_for(config, name, hf_config)
            seconds, size = need.seconds, text_bytes(config) if need.reads_text else 0.0
            if size is None:
                unestimated_reasons[name] = "the size of the text is not known here"
                continue
            if need.reads_text:
                seconds += reading_seconds(config, kind, size, prices.assumptions)
            if need.left_out:
                left_out[name] = need.left_out
            estimates.append(StageEstimate(name, seconds, kind, stage.machines(config)))
        return cls(tuple(estimates), unestimated_reasons, left_out)
