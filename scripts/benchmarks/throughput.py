"""Predict each published run from all other runs: errors by model, and the share inside the stated
interval.

`--rows FILE` predicts the runs of a CSV with the columns of our collection (id, model, stack,
stack_version, instances, tp, pp, global_batch, seq_len, seq_per_s, ...) with the shipped
coefficients; rows that the fit used are skipped. `--docs` writes docs/planner-throughput.{md,svg};
`--write` refits the coefficients in core/facts/throughput.toml.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import sys
from collections import defaultdict
from math import exp
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from smtrain.client.planner.calibration import (  # noqa: E402
    LeftOutRun,
    PublishedRun,
    fit,
    half_width,
    leave_one_out,
    nearest,
    predict_speed,
    published_experts,
    published_gpu_runs,
    published_runs,
    residual,
)
from smtrain.client.planner.throughput import DENSE, EXPERTS, Coefficients  # noqa: E402
from smtrain.core.facts import table  # noqa: E402


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    parser.add_argument(
        "--chip",
        choices=sorted(table("throughput_gpu")["chips"]),
        help="runs on these GPUs instead",
    )
    parser.add_argument(
        "--experts", action="store_true", help="runs of mixtures of experts instead"
    )
    parser.add_argument("--rows", type=Path, help="CSV of further runs")
    parser.add_argument("--docs", action="store_true", help="write the table and the picture")
    parser.add_argument("--write", action="store_true", help="refit core/facts/throughput.toml")
    options = parser.parse_args()
    if options.write:
        refit(ROOT / "smtrain/core/facts/throughput.toml")
        refit_gpus(ROOT / "smtrain/core/facts/throughput_gpu.toml")
        table.cache_clear()
        refit_experts(ROOT / "smtrain/core/facts/throughput_gpu.toml")
        return
    runs = (
        published_experts()
        if options.experts
        else published_gpu_runs(options.chip)
        if options.chip
        else published_runs()
    )
    left_out_runs = from_csv(options.rows) if options.rows else leave_one_out(runs)
    if not left_out_runs:
        sys.exit("no run to predict")
    if options.docs:
        document(left_out_runs, leave_one_out(published_experts()))
    families = defaultdict(list)
    for prediction in left_out_runs:
        families[prediction.run.model].append(abs(prediction.error))
    result = {
        "runs": len(left_out_runs),
        "median_error": round(median(abs(prediction.error) for prediction in left_out_runs), 4),
        "worst_family": round(max(median(errors) for errors in families.values()), 4),
        "worst_run": round(max(abs(prediction.error) for prediction in left_out_runs), 4),
        "inside": round(
            sum(prediction.is_inside for prediction in left_out_runs) / len(left_out_runs), 4
        ),
    }
    if not options.rows:
        left_out_models = leave_one_out(runs, by="model")
        result["median_error_leaving_out_its_model"] = round(
            median(abs(prediction.error) for prediction in left_out_models), 4
        )
    if options.json:
        print(json.dumps(result))
        return
    print("\n".join(rows_of(left_out_runs)))
    for name, value in result.items():
        print(f"{name:36} {value}")


def from_csv(file: Path) -> list[LeftOutRun]:
    """Runs of a CSV that no coefficient was fitted to."""
    known_ids = {row["id"] for row in table("throughput")["runs"]}
    k, spread = Coefficients.for_machine(), table("throughput")["coefficients"]["residual"]
    out = []
    for row in csv.DictReader(file.open()):
        if row["accelerator"].startswith("Trainium1") and row["id"] not in known_ids:
            run = PublishedRun.of(as_run(row))
            distance = nearest(run.work, run.machine, run.mesh)
            out.append(LeftOutRun(run, predict_speed(run, k), half_width(spread, distance)))
    return out


def as_run(row: dict[str, str]) -> dict[str, Any]:
    """A row of the collection as in core/facts/throughput.toml; missing values come from the
    stack's scripts.
    """
    model = row["model"].lower().replace(" ", "-").replace("llama2", "llama-2")
    stack = (
        "nxd" if "distributed" in row["stack"] else "nemo" if "nemo" in row["stack"] else "megatron"
    )
    release = re.search(r"2\.(\d+)", row["stack_version"])
    selective = stack == "nxd" or model in ("gpt3-23b", "gpt3-175b")
    return {
        "id": row["id"],
        "model": model,
        "stack": stack,
        "release": int(release[1]) if release else 15,
        "instances": int(row["instances"]),
        "tp": int(row["tp"]),
        "pp": int(row["pp"]),
        "micro_batch": int(row["micro_batch"] or (2 if model.startswith("pythia") else 1)),
        "global_batch": int(row["global_batch"]),
        "seq_len": int(row["seq_len"] or (4096 if model.startswith("llama-2") else 2048)),
        "recompute": "selective" if selective else "full",
        "sequences_per_s": float(row["seq_per_s"]),
    }


def rows_of(predictions: list[LeftOutRun]) -> list[str]:
    """The table, in Markdown."""
    lines = [
        (
            "| run | model | cut | instances | batch x length | published seq/s | predicted | error"
            " | 90 % interval |"
        ),
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for prediction in predictions:
        ep = f"ep {prediction.run.mesh.ep} " if prediction.run.mesh.ep > 1 else ""
        r, low, high = (
            prediction.run,
            prediction.predicted_speed * exp(-prediction.half_width),
            prediction.predicted_speed * exp(prediction.half_width),
        )
        lines.append(
            f"| {r.id} | {r.model} | tp {r.mesh.tp} pp {r.mesh.pp} {ep}{r.mesh.recompute} |"
            f" {r.machine.count} | {r.work.global_batch} x {r.work.seq_len} | {r.sequences_per_s:g}"
            f" | {prediction.predicted_speed:.4g} | {prediction.error:+.1%} | {low:.3g} to"
            f" {high:.3g}{'' if prediction.is_inside else ' (outside)'} |"
        )
    return lines


def document(predictions: list[LeftOutRun], of_experts: list[LeftOutRun]) -> None:
    """Write docs/planner-throughput.md, and its picture of `predictions`."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "smtrain"
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 5.2))
    for model in dict.fromkeys(prediction.run.model for prediction in predictions):
        model_predictions = [
            prediction for prediction in predictions if prediction.run.model == model
        ]
        x = [prediction.run.sequences_per_s for prediction in model_predictions]
        y = [prediction.predicted_speed for prediction in model_predictions]
        spans = [
            [p - p * exp(-o.half_width) for p, o in zip(y, model_predictions, strict=True)],
            [p * exp(o.half_width) - p for p, o in zip(y, model_predictions, strict=True)],
        ]
        axes.errorbar(x, y, yerr=spans, fmt="o", ms=4, lw=0.8, capsize=2, label=model)
    ends = [5, 200]
    axes.plot(ends, ends, color="gray", lw=0.8)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="published, sequences/s",
        ylabel="predicted from the other runs",
    )
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(ROOT / "docs/planner-throughput.svg", metadata={"Date": None})
    head = (
        "# Published runs, each predicted from the others\n\nMade by"
        " `scripts/benchmarks/throughput.py --docs`.\n\n"
    )
    picture = "![predicted against published](planner-throughput.svg)\n\n"
    second = "\n\n## Mixtures of experts, on H100\n\n"
    tables = [
        "\n".join(rows_of(table_predictions)) for table_predictions in (predictions, of_experts)
    ]
    (ROOT / "docs/planner-throughput.md").write_text(head + picture + second.join(tables) + "\n")


def refit(file: Path) -> None:
    """Write the best fit into the facts."""
    k = fit(published_runs())
    values = {**{n: getattr(k, n) for n in DENSE}, "residual": residual(published_runs(), k)}
    text = file.read_text("utf-8")
    for name, value in values.items():
        text = re.sub(rf"(?m)^{name} = .*$", f"{name} = {value:.4g}", text)
    file.write_text(text, "utf-8")


def refit_gpus(file: Path) -> None:
    """The same for each chip of GPUs."""
    text = file.read_text("utf-8")
    for chip in table("throughput_gpu")["chips"]:
        runs = published_gpu_runs(chip)
        k = fit(runs)
        text = replace_values(
            text,
            f"chips.{chip}",
            {**{n: getattr(k, n) for n in DENSE}, "residual": residual(runs, k)},
        )
    file.write_text(text, "utf-8")


def refit_experts(file: Path) -> None:
    """The same for mixtures of experts, with the numbers of their chip as they are."""
    runs = published_experts()
    k = fit(runs)
    values = {**{n: getattr(k, n) for n in EXPERTS}, "residual": residual(runs, k)}
    file.write_text(replace_values(file.read_text("utf-8"), "experts", values), "utf-8")


def replace_values(text: str, section: str, values: dict[str, float]) -> str:
    """A TOML text with other numbers in one of its sections."""
    for name, value in values.items():
        text = re.sub(
            rf"(\n\[{re.escape(section)}\][^\[]*?\n{name} = )[^\n]*", rf"\g<1>{value:.4g}", text
        )
    return text


if __name__ == "__main__":
    main()
