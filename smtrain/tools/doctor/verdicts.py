"""Findings about what `smtrain doctor --train` measured: each compares with a stated tolerance."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from typing import Any

from smtrain.client.findings import Finding
from smtrain.client.planner.machines import GIB, Mesh, Work
from smtrain.tools.doctor.devices import TorchView
from smtrain.tools.doctor.sizes import Prediction, peak_bytes, predicted
from smtrain.tools.doctor.task import SAVED, STEPS
from smtrain.tools.doctor.training import ALL, CPU, MINUTES, Outcome, Trials

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
_AGAIN = "run it again with more --minutes: what the device's compiler has made is kept"
_OPTIONAL = {
    "compile": "set train.compile: false",
    "plain_speed": "nothing: only the comparison is missing",
    "settings": "nothing: only the speed of other settings is unknown",
}
"""Parts whose failure prevents no training, with the remedy."""
_SAID = {"failed": "failed", "ended": "ended early", "hung": "hung"}
_NAMES = {
    "transformers": "parity",
    "fp32": "parity",
    "export": "checkpoint",
    "speed": "throughput",
    "plain_speed": "throughput",
}


def findings(trained: Trials, view: TorchView) -> list[Finding]:
    """All findings, in the order of the parts; a part without a result has its reason."""
    return [
        *_undone(trained),
        *_parity(trained),
        *_resumed(trained),
        *_half(trained),
        *_compiled(trained),
        *_exported(trained),
        *_speed(trained, view),
        *_settings(trained),
        *_operators(trained),
    ]


def _undone(trained: Trials) -> Iterator[Finding]:
    for one in trained.outcomes:
        name, place = _NAMES.get(one.part, one.part), _place(one)
        part = one.part.replace("_", " ")
        if one.state == "skipped":
            yield Finding(
                name, "warning", f"{part} was skipped ({place}): {one.reason}", _instead(one)
            )
        elif one.state != "done":
            text = f"{part} {_SAID[one.state]} ({place}): {one.reason}"
            if one.part in _OPTIONAL:
                yield Finding(name, "warning", text, _OPTIONAL[one.part])
            elif one.state == "hung":
                yield Finding(name, "fault", text, f"{_AGAIN}; if it hangs again, {_REPORT}")
            else:
                yield Finding(name, "fault", text, _REPORT)


def _instead(one: Outcome) -> str:
    """The remedy of a part that was skipped."""
    if "--minutes" in one.reason:
        return f"run it again with --minutes {2 * MINUTES:.0f}"
    if one.part == "compile":
        return "install the missing program, such as the package g++, if you want train.compile"
    return "mend the fault that ended that part"


def _place(one: Outcome) -> str:
    return f"{one.device}, {one.processes} process{'es' * (one.processes > 1)}"


def apart(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], key: str = "loss") -> float:
    """Largest relative difference of two runs, update by update; steps that fp16 skipped are left
    out.
    """
    by_update = {row["updates"]: row[key] for row in theirs if not row.get("skipped")}
    pairs = [
        (row[key], by_update[row["updates"]])
        for row in ours
        if not row.get("skipped") and row["updates"] in by_update
    ]
    if not pairs or not all(isfinite(a) and isfinite(b) for a, b in pairs):
        return float("inf")
    return float(max(abs(a - b) / max(abs(b), 1e-12) for a, b in pairs))


def _run(trained: Trials, group: str) -> dict[str, Any] | None:
    done = trained.done(group, "fp32")
    run: dict[str, Any] | None = done["runs"][0] if done else None
    return run


def _parity(trained: Trials) -> Iterator[Finding]:
    cpu, plain = _run(trained, CPU), trained.done(CPU, "transformers")
    if cpu and plain:
        yield _compared(
            "the native engine on the CPU", cpu["steps"], "transformers with AdamW", plain["steps"]
        )
    if cpu is None:
        return
    for group in (trained.first, ALL):
        done = trained.done(group, "fp32") if group != CPU else None
        for run in done["runs"] if done else ():
            mesh = f"tp {run['tp']} x dp {run['dp']}" if group == ALL else "1 process"
            yield _compared(
                f"the native engine on {trained.kind}, {mesh},",
                run["steps"],
                "the CPU",
                cpu["steps"],
            )


def _compared(
    name: str, ours: list[dict[str, Any]], other: str, theirs: list[dict[str, Any]]
) -> Finding:
    loss, norm = apart(ours, theirs), apart(ours, theirs, "grad_norm")
    text = (
        f"{name} against {other}: {len(ours)} steps in fp32, losses within {loss:.1g}, gradient"
        f" norms within {norm:.1g}"
    )
    if loss <= LOSS and norm <= NORM:
        return Finding("parity", "ok", text)
    return Finding("parity", "fault", f"{text}; allowed are {LOSS:.0e} and {NORM:.0e}", _REPORT)


def _resumed(trained: Trials) -> Iterator[Finding]:
    for group in dict.fromkeys((trained.first, ALL)):
        run, again = _run(trained, group), trained.done(group, "resume")
        if run is None or again is None:
            continue
        place = "1 process" if group != ALL else f"{trained.count} processes"
        rest = run["steps"][SAVED:]
        wrong = [
            k
            for k, (a, b) in enumerate(zip(rest, again["steps"], strict=True), SAVED + 1)
            if a != b
        ]
        text = f"{place}: saved at step {SAVED}, killed, loaded: "
        if not wrong and run["weights"] == again["weights"]:
            yield Finding(
                "resume",
                "ok",
                f"{text}steps {SAVED + 1} to {STEPS} and the weights have the same bits",
            )
        else:
            first = f"step {wrong[0]} differs" if wrong else "the weights differ"
            yield Finding(
                "resume", "fault", f"{text}{first} from the run without interruption", _REPORT
            )


def _half(trained: Trials) -> Iterator[Finding]:
    run = _run(trained, trained.first)
    for precision in ("bf16", "fp16"):
        done = trained.done(trained.first, precision)
        if done is None or run is None:
            continue
        difference, skipped = (
            apart(done["steps"], run["steps"]),
            sum(bool(row.get("skipped")) for row in done["steps"]),
        )
        text = f"{len(done['steps'])} steps, losses within {difference:.1g} of fp32's"
        text += f", {skipped} skipped while the loss scale was found" if skipped else ""
        if done["finite"] and difference <= HALF:
            yield Finding(precision, "ok", text)
        else:
            ended = "" if done["finite"] else "; weights are not finite"
            yield Finding(
                precision,
                "fault",
                f"{text}; allowed is {HALF:g}{ended}",
                f"train in fp32 here; {_REPORT}",
            )


def _compiled(trained: Trials) -> Iterator[Finding]:
    run, done = _run(trained, trained.first), trained.done(trained.first, "compile")
    if run is None or done is None:
        return
    difference, times = apart(done["steps"], run["steps"]), done["step_s"] / run["step_s"]
    text = f"first step {done['first_step_s']:.0f} s, then {times:.2f} times the time without it"
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


def _exported(trained: Trials) -> Iterator[Finding]:
    done = trained.done(trained.first, "export")
    if done is None:
        return
    share = done["difference"] / max(done["largest"], 1e-12)
    text = f"exported to Hugging Face form and loaded by transformers: logits within {share:.1g}"
    if share <= LOGITS:
        yield Finding("checkpoint", "ok", text)
    else:
        yield Finding("checkpoint", "fault", f"{text}; allowed is {LOGITS:.0e}", _REPORT)


def mfu(
    trained: Trials, done: dict[str, Any], prediction: Prediction, processes: int
) -> float | None:
    """Model FLOPs utilization by the data sheet's peak; None if there is no such number."""
    if prediction.peak_flops is None:
        return None
    flops = done["tokens_per_s"] * trained.large.shape.flops_per_token(trained.large.length)
    share: float = flops / (prediction.peak_flops * processes)
    return share


def prediction(trained: Trials, view: TorchView, group: str) -> Prediction | None:
    """The planner's prediction of the speed that a group measured; None if it did not."""
    done = trained.done(group, "speed")
    if done is None:
        return None
    processes = trained.count if group == ALL else 1
    model = trained.large if group != ALL else trained.on_all
    return predicted(model, trained.precision, view, processes, done)  # type: ignore[arg-type]


def _speed(trained: Trials, view: TorchView) -> Iterator[Finding]:
    for group in dict.fromkeys((trained.first, ALL)):
        done, said = trained.done(group, "speed"), prediction(trained, view, group)
        if done is None or said is None:
            continue
        processes = trained.count if group == ALL else 1
        place = f"{processes} process{'es' * (processes > 1)}"
        share = mfu(trained, done, said, processes)
        used = f", MFU {share:.1%}" if share is not None else ""
        plain = trained.done(group, "plain_speed")
        text = f"{place}: {done['tokens_per_s']:,.0f} tokens/s{used}"
        if plain is not None:
            ratio = done["tokens_per_s"] / plain["tokens_per_s"]
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
        yield _planned(place, done["tokens_per_s"], said)
        yield _memory(trained, done, group, place)


def _settings(trained: Trials) -> Iterator[Finding]:
    """Name the fastest pair of `compile` and `deterministic`, and its gain over uncompiled,
    deterministic steps.
    """
    done = trained.done(trained.first, "settings")
    if done is None:
        return
    first, *_ = done["rows"]
    best = max(done["rows"], key=lambda row: float(row["tokens_per_s"]))
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
    if done["uncompiled"]:
        text += f"; nothing was compiled: {done['uncompiled']}"
    yield Finding("settings", "ok", text)


def _planned(place: str, rate: float, said: Prediction) -> Finding:
    text = (
        f"{place}: the planner says {said.tokens_per_s:,.0f} tokens/s, {said.low:,.0f} to"
        f" {said.high:,.0f}, for {said.machine}; measured {rate:,.0f}"
    )
    if said.low <= rate <= said.high:
        return Finding("plan", "ok", text)
    remedy = (
        "correct plans of this machine with `smtrain plan CONFIG --measured TOKENS_PER_S` of a run"
    )
    return Finding("plan", "warning", text, remedy)


def _memory(trained: Trials, done: dict[str, Any], group: str, place: str) -> Finding:
    model = trained.large if group != ALL else trained.on_all
    processes = trained.count if group == ALL else 1
    work = Work(model.shape, model.length, model.batch, trained.precision)  # type: ignore[arg-type]
    planned = peak_bytes(work, Mesh(1, 1, processes, model.micro_batch), trained.kind)
    off = done["peak_bytes"] / planned - 1
    peak = f"peak {done['peak_bytes'] / GIB:.3f} GiB of tensors ({done['peak_from']})"
    text = f"{place}: {peak}, {off:+.1%} against the planner's {planned / GIB:.3f}"
    if abs(off) <= MEMORY:
        return Finding("memory use", "ok", text)
    return Finding(
        "memory use",
        "warning",
        f"{text}; within {MEMORY:.0%} is expected",
        f"leave room for it; {_REPORT}",
    )


def _operators(trained: Trials) -> Iterator[Finding]:
    done = trained.done(trained.first, "fp32")
    if done is None:
        return
    names = {row[0] for row in done["runs"][0]["operators"]}
    text = f"{len(names)} aten operators in a step"
    if done["fell_back"]:
        fell = ", ".join(done["fell_back"])
        yield Finding(
            "operators", "warning", f"{text}; on the CPU, as the device lacks them: {fell}", _REPORT
        )
    elif done["fell_back"] is not None:
        yield Finding("operators", "ok", f"{text}; none was left to the CPU")
    else:
        yield Finding("operators", "ok", f"{text}; no library here says which run on the CPU")
