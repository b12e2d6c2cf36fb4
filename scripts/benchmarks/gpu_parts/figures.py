"""MFU, the planner's predictions, ratios to the best peer, and the printed table.

Imports no torch.
"""

from __future__ import annotations

from functools import cache
from math import exp
from typing import Any

from scripts.benchmarks.gpu_parts.shapes import model_config

Line = dict[str, Any]


def operations(work: Line, toy: bool) -> float:
    """Floating-point operations of a token of training, the same formula for every row.

    6 N + 6 L H Q T: N the weights that multiply (a token's own experts only), L layers, H heads, Q
    head size, and T the length of the row, or the mean over the tokens of their document's length.
    It is PaLM's count (Chowdhery et al. 2022, arXiv 2204.02311, appendix B) with half of its
    attention, since a causal kernel computes only half. Recomputation does not count. With LoRA 4
    N, because frozen weights have no gradient.
    """
    from smtrain.core.model.shape import ModelShape

    shape = ModelShape.from_config(model_config(work["model"], toy, work.get("layers")))
    products = shape.flops_per_token(0)
    attended_tokens = float(work.get("attended") or work["S"])
    spans = (shape.flops_per_token(1) - products) * attended_tokens
    return products * (4 / 6 if work.get("lora") else 1) + spans / 2


def sheet_peak(name: str) -> float | None:
    """The data sheet's dense bf16 peak of a card in operations a second; None for a card that no
    table has.
    """
    from smtrain.core.facts.gpus import instance_with

    row = instance_with(name)
    return None if row is None else float(row["core_tflops"]) * 1e12


@cache
def _machine(name: str, gib: float, tflops: float) -> Any:
    """The planner's machine of one such card: the table's, else one with the measured rate."""
    from smtrain.client.planner.machines import Machine
    from smtrain.core.config.compute import MachineEntry
    from smtrain.core.facts.gpus import instance_with

    row = instance_with(name)
    if row is not None:
        return Machine.of(row["type"], 1, 1)
    kind: Any = "cpu" if name == "CPU" else "gpu"
    entry = MachineEntry(
        kind=kind,
        devices=1,
        memory_gib=max(gib, 1.0),
        tflops=max(tflops, 1e-3),
        link_gbs=None,
        host_memory_gib=128.0,
    )
    return Machine.from_entry("this card", 1, entry)


def plan_figures(work: Line, device: Line, toy: bool) -> Line:
    """The planner's tokens per second with their 90 % interval, and its peak of tensors in GiB."""
    from smtrain.client.planner.calibration import half_width, nearest, spread_of
    from smtrain.client.planner.kernels import kernels_of
    from smtrain.client.planner.machines import GIB, Mesh, Work
    from smtrain.client.planner.measured import nearest_measured, width_on_gpus
    from smtrain.client.planner.memory import core_memory
    from smtrain.client.planner.throughput import step_time
    from smtrain.core.model.lora import ALL_LINEAR, Lora, targets_of
    from smtrain.core.model.shape import ModelShape

    shape = ModelShape.from_config(model_config(work["model"], toy, work.get("layers")))
    targets = targets_of(shape, (ALL_LINEAR,))
    lora = Lora(16, 32.0, 0.0, targets, quantize=work.get("quantize")) if work.get("lora") else None
    task = Work(
        shape,
        work["S"],
        work["B"],
        "bf16",
        separates_documents=bool(work.get("apart")),
        varlen=True,
        lora=lora,
        is_compiled=bool(work.get("compiled")),
        deterministic=bool(work.get("deterministic")),
        document=work.get("attended"),
    )
    mesh = Mesh(1, 1, 1, work["mb"], work.get("recompute", "none"))
    machine = _machine(device["device"], device["gib"], device["tflops"]["8192^3"])
    rate = task.global_batch * task.seq_len / step_time(task, machine, mesh).total
    if kernels_of(machine):
        wide = width_on_gpus(task, machine, nearest_measured(task, mesh)[1])
    else:
        wide = half_width(
            spread_of(machine, experts=shape.experts is not None), nearest(task, machine, mesh)
        )
    memory = core_memory(task, machine, mesh, 0)
    gib = (memory.total - memory.runtime) / GIB  # an allocator does not count the runtime
    return {
        "tokens_per_s": round(rate),
        "low": round(rate * exp(-wide)),
        "high": round(rate * exp(wide)),
        "gib": round(gib, 2),
    }


def add_figures(line: Line, device: Line | None, toy: bool) -> Line:
    """A line of a part with MFU and, for this engine, the plan; `device` is the line of that
    part.
    """
    if "tokens_per_s" not in line or device is None:
        return line
    flops = line["tokens_per_s"] * operations(line, toy)
    added_figures: Line = {
        "mfu_of_measured": round(flops / (device["tflops"]["8192^3"] * 1e12 or 1), 4)
    }
    peak = sheet_peak(device["device"])
    if peak is not None:
        added_figures["mfu"] = round(flops / peak, 4)
    if "compiled" in line:
        try:
            plan = plan_figures(line, device, toy)
        except ImportError as error:
            return {**line, **added_figures, "plan": f"not installed: {error.name}"}
        added_figures |= {
            "plan": plan,
            "of_plan": round(line["tokens_per_s"] / plan["tokens_per_s"], 3),
            "within_plan": plan["low"] <= line["tokens_per_s"] <= plan["high"],
        }
        if line.get("peak_gib"):
            added_figures["gib_of_plan"] = round(line["peak_gib"] / plan["gib"], 4)
    return {**line, **added_figures}


def speed(line: Line) -> float | None:
    """The rate by which systems are compared; None if a line has none."""
    if "tokens_per_s" in line:
        return float(line["tokens_per_s"])
    return 1 / line["ms"] if isinstance(line.get("ms"), float) and line["ms"] > 0 else None


def ratios(lines: list[Line]) -> dict[str, float]:
    """By row, our speed over that of the best peer."""
    by_row: dict[str, dict[str, list[float]]] = {}
    for line in lines:
        rate = speed(line)
        if rate is not None and "row" in line:
            by_row.setdefault(line["row"], {}).setdefault(line.get("role", ""), []).append(rate)
    return {
        row: round(max(rates["ours"]) / max(rates["peer"]), 3)
        for row, rates in by_row.items()
        if "ours" in rates and "peer" in rates
    }


def loss_difference(lines: list[Line]) -> dict[str, float]:
    """By row, the largest relative difference of a peer's losses from ours, from the same initial
    values.
    """
    differences: dict[str, float] = {}
    for our_line in (line for line in lines if line.get("role") == "ours" and line.get("losses")):
        for peer in lines:
            if (
                peer.get("row") == our_line["row"]
                and peer.get("role") == "peer"
                and peer.get("losses")
            ):
                off = max(
                    abs(a / b - 1) for a, b in zip(our_line["losses"], peer["losses"], strict=False)
                )
                differences[our_line["row"]] = max(off, differences.get(our_line["row"], 0.0))
    return {row: round(off, 6) for row, off in differences.items()}


def summary(lines: list[Line]) -> Line:
    """The object that `--json` prints: device, ratios, figures by row and system, and the parts
    without a result.
    """
    device = next((line for line in lines if "device" in line), {})
    rows: dict[str, Line] = {}
    for line in lines:
        if speed(line) is not None and "system" in line:
            names = (
                "tokens_per_s",
                "step_ms",
                "ms",
                "peak_gib",
                "extra_gib",
                "mfu",
                "mfu_of_measured",
                "of_plan",
                "gib_of_plan",
            )
            rows.setdefault(line["row"], {})[line["system"]] = {
                name: line[name] for name in names if line.get(name)
            }
        elif str(line.get("row")).startswith("attention"):
            rows[line["row"]] = line["ms"]
    profiles = {
        f"{line['profile']}, {line['system']}": {
            k: line[k] for k in ("kernels", "busy", "aten") if k in line
        }
        for line in lines
        if "profile" in line and "failed" not in line
    }
    reasons = [
        ": ".join(
            str(line[key])
            for key in ("part", "row", "system", "failed", "missing", "skipped")
            if key in line
        )
        for line in lines
        if line.keys() & {"failed", "missing", "skipped"}
    ]
    same_bits = next(
        (
            line["same_bits"]
            for line in lines
            if line.get("row") == "resume" and "same_bits" in line
        ),
        None,
    )
    return {
        "over_best_peer": ratios(lines),
        "device": {key: value for key, value in device.items() if key != "part"},
        "loss_difference": loss_difference(lines),
        "same_bits": same_bits,
        "profiles": profiles,
        "rows": rows,
        "without_result": reasons,
    }


def table_of(lines: list[Line]) -> str:
    """The result as text."""
    report = summary(lines)
    device = report["device"]
    text = [
        f"{device.get('device', 'no device line')}, {device.get('gib', '?')} GiB,"
        f" {device.get('tflops', {})} TFLOP/s"
    ]
    head = (
        f"{'row':23} {'system':41} {'tokens/s':>10} {'ms':>9} {'GiB':>7} {'MFU':>6} {'of real':>7}"
        f" {'of plan':>8}"
    )
    text.append(head)
    for row, systems in report["rows"].items():
        for system, numbers in systems.items():
            n = numbers if isinstance(numbers, dict) else {"ms": numbers}
            memory = n.get("peak_gib", n.get("extra_gib"))
            text.append(
                f"{row:23.23} {system:41.41} {_number(n.get('tokens_per_s'), ',d'):>10} "
                f"{_number(n.get('step_ms', n.get('ms')), '.1f'):>9} {_number(memory, '.1f'):>7} "
                f"{_number(n.get('mfu'), '.1%'):>6} {_number(n.get('mfu_of_measured'), '.1%'):>7} "
                f"{_number(n.get('of_plan'), '.2f'):>8}"
            )
        if row in report["over_best_peer"]:
            text.append(
                f"{row:23.23} {'ours over the best peer':41} {report['over_best_peer'][row]:>10}"
            )
    text += [
        f"losses of {row}: peers differ by {off:.1e} at most"
        for row, off in report["loss_difference"].items()
    ]
    text += [f"profile of {name}: {numbers}" for name, numbers in report["profiles"].items()]
    text.append(f"same bits after a resume: {report['same_bits']}")
    return "\n".join([*text, *(f"no result: {reason}" for reason in report["without_result"])])


def _number(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)
