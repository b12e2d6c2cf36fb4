"""The stages on CPU machines: whether the machine that each one gets holds it, on disk and in
memory, and in time.
"""

from __future__ import annotations

from collections.abc import Iterator

from smtrain.client.findings import Finding
from smtrain.client.planner.preparing import reading_seconds
from smtrain.client.planner.stages import USABLE, host_gib, need, volume_needed
from smtrain.client.planner.workload import text_bytes
from smtrain.client.preflight.context import Context
from smtrain.client.preflight.disk import larger_volume
from smtrain.core.config.units import spell
from smtrain.core.facts import table
from smtrain.core.facts.engines import takes_volume
from smtrain.core.machine import memory_here
from smtrain.core.model.footprint import GIB
from smtrain.core.protocol.requests import groups_of

_LEFT_OUT = {
    "generate": "set generate.prompts: [] to leave the stage out",
    "evaluate": "leave evaluate.tasks out",
}
"""Stages that a run can do without, each with the remedy that leaves it out."""


def stages(context: Context) -> Iterator[Finding]:
    """Memory, disk and time of each; on this machine memory alone."""
    config, hf_config = context.chain.config, context.chain.resolved.model_config
    for stage in context.stages:
        stage_need = need(config, stage, hf_config)
        if stage_need is None:
            continue
        if not context.on_aws:
            free = memory_here()
            if free is not None and stage_need.memory > free:
                yield Finding(
                    "stages",
                    "fault",
                    f"stage {stage} takes {stage_need.memory / GIB:.1f} GiB of memory, and "
                    f"{free / GIB:.1f} GiB are free here",
                    f"run the stage on AWS, or {_LEFT_OUT.get(stage, 'take a smaller model')}",
                )
            continue
        resources = context.requests[stage]["ResourceConfig"]
        (kind, _), *_ = groups_of(context.requests[stage])
        volume = resources["VolumeSizeInGB"]
        has = host_gib(kind)
        takes = stage_need.seconds + (
            reading_seconds(config, kind, text_bytes(context.chain.given) or 0)
            if stage == "prepare"
            else 0
        )
        room, wants = (has or 0) * USABLE, stage_need.memory / GIB
        memory_note = f"stage {stage} takes about {wants:.0f} GiB of memory"
        if has is not None and wants > room:
            types = table("instances")["cpu"]
            fits = next(
                (name for name, row in types.items() if wants <= USABLE * row["host_gib"]), None
            )
            smaller_run = _LEFT_OUT.get(stage, "take a smaller model")
            remedy = (
                f"set compute.cpu_instance_type: {fits}"
                if fits
                else f"{smaller_run}, as no type known to smtrain holds this model"
            )
            yield Finding("stages", "fault", f"{memory_note}, and {kind} has {has:.0f} GiB", remedy)
        elif takes_volume(kind) and (disk := volume_needed(stage_need)) > volume:
            yield Finding(
                "stages",
                "fault",
                f"stage {stage} writes {stage_need.disk / 1e9:,.0f} GB, and its disk has {volume}"
                " GB",
                larger_volume(disk) or "prepare the text in several runs, or take a smaller model",
            )
        elif takes > config.compute.max_run:
            yield Finding(
                "stages",
                "warning",
                f"stage {stage} is expected to take {spell(takes)}, longer than "
                f"compute.max_run of {spell(config.compute.max_run)}",
                "raise compute.max_run",
            )
        else:
            yield Finding("stages", "ok", f"{memory_note} of {kind}, and about {spell(takes)}")
