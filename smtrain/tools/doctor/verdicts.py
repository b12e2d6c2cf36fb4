"""Findings about what `smtrain doctor --train` measured: each compares with a stated tolerance."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from typing import Any

from smtrain.client.findings import Finding
from smtrain.client.planner.machines import GIB, Mesh, Work
from smtrain.tools.doctor.devices import TorchView
from smtrain.tools.doctor.sizes import Prediction, peak_bytes, predict_speed
from smtrain.tools.doctor.task import SAVE_STEP, STEPS
from smtrain.tools.doctor.training import ALL_DEVICES, CPU, MINUTES, Outcome, Trials

LOSS, NORM = 1e-4, 1e-3
"""Largest relative differences of losses and gradient norms in fp32 over 20 steps."""
HALF = 0.02
"""Largest relative difference of the losses of bf16 and fp16 from those of fp32."""
LOGITS = 1e-4
"""Largest difference of the exported model's logits, relative to the largest logit."""
SLOWER = 0.9
"""Least speed relative to the plain loop."""
MEMORY = 0.15
"""Largest relative difference of the measured peak of memory from the planner's."""
_REPORT = "send this report, with --json, to the maintainers"
_RUN_LONGER = "run it again with more --minutes: what the device's compiler has made is kept"
_OPTIONAL = {
    "compile": "set train.compile: false",
    "plain_speed": "nothing: only the comparison is missing",
    "settings": "nothing: only the speed of other settings is unknown",
}
"""Parts whose failure prevents no training, with the remedy."""
_STATE_WORDS = {"failed": "failed", "ended": "ended early", "hung": "hung"}
_NAMES = {
    "transformers": "parity",
    "fp32": "parity",
    "export": "checkpoint",
    "speed": "throughput",
    "plain_speed": "throughput",
}


def findings(trials: Trials, view: TorchView) -> list[Finding]:
    """All findings, in the order of the parts; a part without a result has its reason."""
    return [
        *_unfinished_parts(trials),
        *_parity(trials),
        *_check_resume(trials),
        *_check_half_precision(trials),
        *_check_compile(trials),
        *_check_export(trials),
        *_speed(trials, view),
        *_settings(trials),
        *_operators(trials),
    ]


def _unfinished_parts(trials: Trials) -> Iterator[Finding]:
    for outcome in trials.outcomes:
        name, place = _NAMES.get(outcome.part, outcome.part), _place(outcome)
        part = outcome.part.replace("_", " ")
        if outcome.state == "skipped":
            yield Finding(
                name,
                "warning",
                f"{part} was skipped ({place}): {outcome.reason}",
                _remedy_of_skip(outcome),
            )
        elif outcome.state != "done":
            text = f"{part} {_STATE_WORDS[outcome.state]} ({place}): {outcome.reason}"
            if outcome.part in _OPTIONAL:
                yield Finding(name, "warning", text, _OPTIONAL[outcome.part])
            elif outcome.state == "hung":
                yield Finding(name, "fault", text, f"{_RUN_LONGER}; if it hangs again, {_REPORT}")
            else:
                yield Finding(name, "fault", text, _REPORT)


def _remedy_of_skip(outcome: Outcome) -> str:
    """The remedy of a part that was skipped."""
    if "--minutes" in outcome.reason:
        return f"run it again with --minutes {2 * MINUTES:.0f}"
    if outcome.part == "compile":
        return "install the missing program, such as the package g++, if you want train.compile"
    return "mend the fault that ended that part"


def _place(outcome: Outcome) -> str:
    return f"{outcome.device}, {outcome.processes} process{'es' * (outcome.processes > 1)}"


def largest_difference(
    our_steps: list[dict[str, Any]], reference_steps: list[dict[str, Any]], key: str = "loss"
) -> float:
    """Largest relative difference of two runs, update by update; steps that fp16 skipped are left
    out.
    """
    by_update = {row["updates"]: row[key] for row in reference_steps if not row.get("skipped")}
    pairs = [
        (row[key], by_update[row["updates"]])
        for row in our_steps
        if not row.get("skipped") and row["updates"] in by_update
    ]
    if not pairs or not all(isfinite(a) and isfinite(b) for a, b in pairs):
        return float("inf")
    return float(max(abs(a - b) / max(abs(b), 1e-12) for a, b in pairs))


def _run(trials: Trials, group: str) -> dict[str, Any] | None:
    result = trials.result_of(group, "fp32")
    run: dict[str, Any] | None = result["runs"][0] if result else None
    return run


def _parity(trials: Trials) -> Iterator[Finding]:
    cpu, plain = _run(trials, CPU), trials.result_of(CPU, "transformers")
    if cpu and plain:
        yield _compare_runs(
            "the native engine on the CPU", cpu["steps"], "transformers with AdamW", plain["steps"]
        )
    if cpu is None:
        return
    for group in (trials.first, ALL_DEVICES):
        result = trials.result_of(group, "fp32") if group != CPU else None
        for run in result["runs"] if result else ():
            mesh = f"tp {run['tp']} x dp {run['dp']}" if group == ALL_DEVICES else "1 process"
            yield _compare_runs(
                f"the native engine on {trials.kind}, {mesh},",
                run["steps"],
                "the CPU",
                cpu["steps"],
            )


def _compare_runs(
    name: str,
    our_steps: list[dict[str, Any]],
    reference_name: str,
    reference_steps: list[dict[str, Any]],
) -> Finding:
    loss, norm = (
        largest_difference(our_steps, reference_steps),
        largest_difference(our_steps, reference_steps, "grad_norm"),
    )
    text = (
        f"{name} against {reference_name}: {len(our_steps)} steps in fp32, losses within"
        f" {loss:.1g}, gradient norms within {norm:.1g}"
    )
    if loss <= LOSS and norm <= NORM:
        return Finding("parity", "ok", text)
    return Finding("parity", "fault", f"{text}; allowed are {LOSS:.0e} and {NORM:.0e}", _REPORT)


def _check_resume(trials: Trials) -> Iterator[Finding]:
    for group in dict.fromkeys((trials.first, ALL_DEVICES)):
        run, resume_result = _run(trials, group), trials.result_of(group, "resume")
        if run is None or resume_result is None:
            continue
        place = "1 process" if group != ALL_DEVICES else f"{trials.count} processes"
        later_steps = run["steps"][SAVE_STEP:]
        wrong = [
            k
            for k, (a, b) in enumerate(
                zip(later_steps, resume_result["steps"], strict=True), SAVE_STEP + 1
            )
            if a != b
        ]
        text = f"{place}: saved at step {SAVE_STEP}, killed, loaded: "
        if not wrong and run["weights"] == resume_result["weights"]:
            yield Finding(
                "resume",
                "ok",
                f"{text}steps {SAVE_STEP + 1} to {STEPS} and the weights have the same bits",
            )
        else:
            first = f"step {wrong[0]} differs" if wrong else "the weights differ"
            yield Finding(
                "resume", "fault", f"{text}{first} from the run without interruption", _REPORT
            )


def _check_half_precision(trials: Trials) -> Iterator[Finding]:
    run = _run(trials, trials.first)
    for precision in ("bf16", "fp16"):
        result = trials.result_of(trials.first, precision)
        if result is None or run is None:
            continue
        difference, skip_count = (
            largest_difference(result["steps"], run["steps"]),
            sum(bool(row.get("skipped")) for row in result["steps"]),
        )
        text = f"{len(result['steps'])} steps, losses within {difference:.1g} of fp32's"
        text += f", {skip_count} skipped while the loss scale was found" if skip_count else ""
        if result["finite"] and difference <= HALF:
            yield Finding(precision, "ok", text)
        else:
            complaint = "" if result["finite"] else "; weights are not finite"
            yield Finding(
                precision,
                "fault",
                f"{text}; allowed is {HALF:g}{complaint}",
                f"train in fp32 here; {_REPORT}",
            )


def _check_compile(trials: Trials) -> Iterator[Finding]:
    run, result = _run(trials, trials.first), trials.result_of(trials.first, "compile")
    if run is None or result is None:
        return
    difference, times = (
        largest_difference(result["steps"], run["steps"]),
        result["step_s"] / run["step_s"],
    )
    text = f"first step {result['first_step_s']:.0f} s, then {times:.2f} times the time without it"
    text += f"; losses within {difference:.1g}"
    if difference <= LOSS:
        yield Finding("compile", "ok", text)
    else:
        yield Finding(
            "compile",
            "fault",
            f"{text}; allowed is {LOSS:.0e}",
            f"set train.compile: false; {_REPORT}",
        )


def _check_export(trials: Trials) -> Iterator[Finding]:
    result = trials.result_of(trials.first, "export")
    if result is None:
        return
    share = result["difference"] / max(result["largest"], 1e-12)
    text = f"exported to Hugging Face form and loaded by transformers: logits within {share:.1g}"
    if share <= LOGITS:
        yield Finding("checkpoint", "ok", text)
    else:
        yield Finding("checkpoint", "fault", f"{text}; allowed is {LOGITS:.0e}", _REPORT)


def mfu(
    trials: Trials, result: dict[str, Any], prediction: Prediction, processes: int
) -> float | None:
    """Model FLOPs utilization by the data sheet's peak; None if there is no such number."""
    if prediction.peak_flops is None:
        return None
    flops = result["tokens_per_s"] * trials.large.shape.flops_per_token(trials.large.length)
    share: float = flops / (prediction.peak_flops * processes)
    return share


def prediction(trials: Trials, view: TorchView, group: str) -> Prediction | None:
    """The planner's prediction of the speed that a group measured; None if it did not."""
    result = trials.result_of(group, "speed")
    if result is None:
        return None
    processes = trials.count if group == ALL_DEVICES else 1
    model = trials.large if group != ALL_DEVICES else trials.on_all
    return predict_speed(model, trials.precision, view, processes, result)  # type: ignore[arg-type]


def _speed(trials: Trials, view: TorchView) -> Iterator[Finding]:
    for group in dict.fromkeys((trials.first, ALL_DEVICES)):
        result, forecast = trials.result_of(group, "speed"), prediction(trials, view, group)
        if result is None or forecast is None:
            continue
        processes = trials.count if group == ALL_DEVICES else 1
        place = f"{processes} process{'es' * (processes > 1)}"
        share = mfu(trials, result, forecast, processes)
        utilization = f", MFU {share:.1%}" if share is not None else ""
        plain = trials.result_of(group, "plain_speed")
        text = f"{place}: {result['tokens_per_s']:,.0f} tokens/s{utilization}"
        if plain is not None:
            ratio = result["tokens_per_s"] / plain["tokens_per_s"]
            text += f", {ratio:.2f} times a plain transformers loop"
            if ratio < SLOWER:
                yield Finding(
                    "throughput",
                    "warning",
                    text,
                    f"compare on a machine that does nothing else; then {_REPORT}",
                )
            else:
                yield Finding("throughput", "ok", text)
        else:
            yield Finding("throughput", "ok", text)
        yield _compare_with_plan(place, result["tokens_per_s"], forecast)
        yield _memory(trials, result, group, place)


def _settings(trials: Trials) -> Iterator[Finding]:
    """Name the fastest pair of `compile` and `deterministic`, and its gain over uncompiled,
    deterministic steps.
    """
    result = trials.result_of(trials.first, "settings")
    if result is None:
        return
    first, *_ = result["rows"]
    best = max(result["rows"], key=lambda row: float(row["tokens_per_s"]))
    names = (
        f"train.compile: {str(best['compile']).lower()}, train.deterministic:"
        f" {str(best['deterministic']).lower()}"
    )
    gain = best["tokens_per_s"] / first["tokens_per_s"]
    text = (
        f"the fastest is {names}: {best['tokens_per_s']:,.0f} tokens/s, {gain:.2f} times the "
        f"{first['tokens_per_s']:,.0f} of uncompiled and deterministic steps"
    )
    if best["compile"]:
        text += f"; its first step takes {best['first_step_s']:.0f} s"
    if result["uncompiled"]:
        text += f"; nothing was compiled: {result['uncompiled']}"
    yield Finding("settings", "ok", text)


def _compare_with_plan(place: str, rate: float, forecast: Prediction) -> Finding:
    text = (
        f"{place}: the planner says {forecast.tokens_per_s:,.0f} tokens/s, {forecast.low:,.0f} to"
        f" {forecast.high:,.0f}, for {forecast.machine}; measured {rate:,.0f}"
    )
    if forecast.low <= rate <= forecast.high:
        return Finding("plan", "ok", text)
    remedy = (
        "correct plans of this machine with `smtrain plan CONFIG --measured TOKENS_PER_S` of a run"
    )
    return Finding("plan", "warning", text, remedy)


def _memory(trials: Trials, result: dict[str, Any], group: str, place: str) -> Finding:
    model = trials.large if group != ALL_DEVICES else trials.on_all
    processes = trials.count if group == ALL_DEVICES else 1
    work = Work(model.shape, model.length, model.batch, trials.precision)  # type: ignore[arg-type]
    planned_bytes = peak_bytes(work, Mesh(1, 1, processes, model.micro_batch), trials.kind)
    off = result["peak_bytes"] / planned_bytes - 1
    peak = f"peak {result['peak_bytes'] / GIB:.3f} GiB of tensors ({result['peak_from']})"
    text = f"{place}: {peak}, {off:+.1%} against the planner's {planned_bytes / GIB:.3f}"
    if abs(off) <= MEMORY:
        return Finding("memory use", "ok", text)
    return Finding(
        "memory use",
        "warning",
        f"{text}; within {MEMORY:.0%} is expected",
        f"leave room for it; {_REPORT}",
    )


def _operators(trials: Trials) -> Iterator[Finding]:
    result = trials.result_of(trials.first, "fp32")
    if result is None:
        return
    names = {row[0] for row in result["runs"][0]["operators"]}
    text = f"{len(names)} aten operators in a step"
    if result["fell_back"]:
        fell = ", ".join(result["fell_back"])
        yield Finding(
            "operators", "warning", f"{text}; on the CPU, as the device lacks them: {fell}", _REPORT
        )
    elif result["fell_back"] is not None:
        yield Finding("operators", "ok", f"{text}; none was left to the CPU")
    else:
        yield Finding("operators", "ok", f"{text}; no library here says which run on the CPU")
