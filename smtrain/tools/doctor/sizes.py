"""The large model that a device gets, and the planner's prediction for it on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp
from typing import Any

from smtrain.client.planner.calibration import Correction, nearest, width_of
from smtrain.client.planner.machines import GIB, Machine, Mesh, Work
from smtrain.client.planner.memory import core_memory
from smtrain.client.planner.throughput import step_time
from smtrain.core.config.compute import MachineEntry
from smtrain.core.facts import instance
from smtrain.core.facts.gpus import instance_with
from smtrain.core.machine import memory_here
from smtrain.core.model.footprint import Precision
from smtrain.core.model.shape import ModelShape
from smtrain.tools.doctor.devices import TorchView
from smtrain.tools.doctor.doctor_report import first_word
from smtrain.tools.doctor.task import SizedModel, ladder, with_layers

_PER_CORE = 13e6  # parameters for each processor core: a step of 512 tokens takes a second or two
_ON_NEURON = 4e8  # parameters: each kernel is compiled when it is first used
_LEAST_GIB = 8.0  # of a device that does not say how much memory it has
_OF_FREE = 0.6  # the part of the free memory that a model may take


def large_model(
    model_config: dict[str, Any] | None, view: TorchView, cores: int, processes: int
) -> tuple[SizedModel, str]:
    """The largest model of the ladder, or of the given one's layers, that suits a device, and a
    note about it.
    """
    precision: Precision = "fp32" if view.kind == "cpu" else "bf16"
    room = _room(view, processes)
    parameter_limit = {"cpu": _PER_CORE * cores, "neuron": _ON_NEURON}.get(view.kind, float("inf"))
    if model_config is None:
        choices = ladder()[::-1]
    else:
        layer_count = ModelShape.from_config(model_config).layers
        choices = [with_layers(model_config, layers) for layers in range(layer_count, 0, -1)]
    for config in choices:
        shape = ModelShape.from_config(config)
        length = 256 if view.kind == "cpu" else 2048 if shape.parameters() > 3e8 else 512
        length = min(length, shape.positions or length)
        for batch in (2,) if view.kind == "cpu" else (8, 4, 2, 1):
            need = peak_bytes(
                Work(shape, length, batch, precision), Mesh(1, 1, 1, batch), view.kind
            )
            if shape.parameters() <= parameter_limit and need <= room:
                return SizedModel(config, batch, length, batch), _note(model_config, shape)
    shape = ModelShape.from_config(choices[-1])
    length = min(128, shape.positions or 128)
    return SizedModel(choices[-1], 1, length, 1), _note(model_config, shape)


def _note(model_config: dict[str, Any] | None, shape: ModelShape) -> str:
    layer_count = 0 if model_config is None else ModelShape.from_config(model_config).layers
    return (
        f"speed and memory are of {shape.layers} of the given model's {layer_count} layers"
        if shape.layers < layer_count
        else ""
    )


def _room(view: TorchView, processes: int) -> float:
    """Bytes for the large model on each device."""
    if view.kind == "cpu":
        return _OF_FREE * (memory_here() or 2 * GIB) / processes
    free = [row["free"] for row in view.report["devices"] if "free" in row]
    machine_row = _row(view)
    return _OF_FREE * min(
        free, default=(machine_row["core_gib"] if machine_row else _LEAST_GIB) * GIB
    )


def peak_bytes(work: Work, mesh: Mesh, kind: str) -> float:
    """The planner's peak of tensor memory: without the runtime, which no allocator counts."""
    machine = Machine(kind, 1, 1, 1, 1, 1, 1, has_accelerators=kind != "cpu")
    memory = core_memory(work, machine, mesh, 0)
    return memory.total - memory.runtime


@dataclass(frozen=True)
class Prediction:
    """The planner's tokens per second with their interval, and the machine that they are of."""

    tokens_per_s: float
    low: float
    high: float
    machine: str
    peak_flops: float | None
    """The data sheet's peak of a device, for MFU; None if only its measured rate is known."""


def predict_speed(
    model: SizedModel,
    precision: Precision,
    view: TorchView,
    processes: int,
    measured_rates: dict[str, Any],
) -> Prediction:
    """Predict the speed of data-parallel processes; `measured_rates` has the rates of a device
    that no table knows.
    """
    # Not compiled, and deterministic: the defaults of ParallelOptions, which trial.py keeps.
    work = Work(model.shape, model.length, model.batch, precision, deterministic=True)
    mesh = Mesh(1, 1, processes, model.micro_batch)
    row = _row(view)
    if row is not None:
        machine = Machine.of(row["type"], 1, processes)
    else:
        kind, host = view.kind, memory_here() or GIB
        total = next(
            (device["total"] for device in view.report.get("devices", ()) if "total" in device),
            host / processes,
        )
        entry = MachineEntry(
            kind="cpu" if kind == "cpu" else "gpu",
            devices=processes,
            memory_gib=total / GIB,
            tflops=measured_rates["multiplied_tflops"],
            link_gbs=measured_rates["moved_gbs"],
            host_memory_gib=host / GIB,
        )
        machine = Machine.from_entry("this machine", 1, entry)
    rate = work.global_batch * work.seq_len / step_time(work, machine, mesh).total
    wide = width_of(work, machine, nearest(work, machine, mesh), Correction(), is_unpublished=False)
    description = (
        row["type"].removeprefix("ml.")
        if row
        else f"this machine by its measured {measured_rates['multiplied_tflops']:.3g} TFLOP/s"
    )
    return Prediction(
        rate, rate * exp(-wide), rate * exp(wide), description, machine.core_flops if row else None
    )


def _row(view: TorchView) -> dict[str, Any] | None:
    """The planner's row for this machine: by its type, else by the name of its GPU; `type` is added
    to it.
    """
    if view.kind == "cpu":
        return None
    type_ = f"ml.{first_word('sys/devices/virtual/dmi/id/product_name') or ''}"
    row = instance(type_)
    if row is not None and "core_gib" in row and ("chip" in row) == (view.kind == "cuda"):
        return {**row, "type": type_}
    name = next((str(device.get("name", "")) for device in view.report["devices"]), "")
    return instance_with(name) if view.kind == "cuda" else None
