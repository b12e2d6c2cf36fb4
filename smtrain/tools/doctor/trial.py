"""A process of `smtrain doctor --train`: it trains on a device, and writes a line when a part begins and ends."""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

from smtrain.core.model.families import ModelShape
from smtrain.core.model.footprint import Precision
from smtrain.core.model.transformers_build import transformers_config
from smtrain.tools.doctor.task import SAVED, STEPS, SizedModel, Task
from smtrain.worker.checkpoint.convert import convert
from smtrain.worker.checkpoint.dtypes import BY_PRECISION
from smtrain.worker.checkpoint.targets import HuggingFace
from smtrain.worker.engine.base import OptimizerOptions, ParallelOptions, StepResult
from smtrain.worker.engine.initial import RandomWeights
from smtrain.worker.engine.native import NativeEngine, init_distributed
from smtrain.worker.train import probe
from smtrain.worker.train.operators import HeldBytes, Operators, fallbacks

SEED = 20
LR = 1e-3
_ADAMW = OptimizerOptions()
_STRIDE = 7  # each token of the text follows from the one before it, so that there is something to learn
_WARM, _LEAST = 2, 4  # steps before a measurement, and one more than in it
_THREADS = 4  # of a process that trains the small model: more would only wait for each other


class TrialProcess:
    """The parts of a task, as one of its processes."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.device = init_distributed(task.device)
        self.rank = int(os.environ.get("RANK", "0"))
        self._threads = torch.get_num_threads()
        torch.set_num_threads(min(_THREADS, self._threads))

    # Parts

    def fp32(self) -> dict[str, Any]:
        """Train in fp32; save in the middle; count the operators of the second step."""
        runs = [self._trained(mesh, saves=mesh == self.task.meshes[0]) for mesh in self.task.meshes]
        return {"runs": runs, "fell_back": fallbacks()}

    def resume(self) -> dict[str, Any]:
        """Load what `fp32` saved, and take the remaining steps again."""
        engine = self._engine(self.task.small, "fp32", self.task.meshes[0])
        state = engine.load(self._checkpoints() / f"step_{SAVED:08d}")
        return {"from": state["step"], "steps": self._steps(engine, SAVED, STEPS), "weights": _weights(engine)}

    def bf16(self) -> dict[str, Any]:
        return self._in_half("bf16")

    def fp16(self) -> dict[str, Any]:
        return self._in_half("fp16")

    def transformers(self) -> dict[str, Any]:
        """The same steps by transformers' model and torch's AdamW."""
        model = self.task.small
        loop = _PlainLoop(model, "fp32", self.device)
        return {"steps": [{**loop.step(*_text(model, k, model.batch)), "updates": k} for k in range(STEPS)]}

    def compile(self) -> dict[str, Any]:
        """torch.compile of each layer: the same losses, the time of the first step and of a later one."""
        from smtrain.worker.engine.native.layers import compiler_fault

        if fault := compiler_fault(self.device.type):
            return {"skipped": fault}
        engine = self._engine(self.task.small, "fp32", (1, 1), compiled=True)
        began = time.perf_counter()
        steps = self._steps(engine, 0, 1)
        first = time.perf_counter() - began
        began = time.perf_counter()
        steps += self._steps(engine, 1, STEPS)
        return {"steps": steps, "first_step_s": first, "step_s": (time.perf_counter() - began) / (STEPS - 1)}

    def export(self) -> dict[str, Any]:
        """The checkpoint of `fp32` in Hugging Face form: transformers' logits against the engine's own."""
        from transformers import AutoModelForCausalLM

        folder = Path(self.task.folder) / f"{self.task.group}-exported"
        convert(self._checkpoints() / f"step_{SAVED:08d}", folder, to=HuggingFace(), overwrite=True, say=lambda _: None)
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        ours = torch.load(self._checkpoints() / "logits.pt")
        model = self.task.small
        with torch.no_grad():
            theirs = loaded.to(self.device).eval()(_text(model, 0, 1)[0].to(self.device)).logits.float().cpu()
        return {"difference": float((ours - theirs).abs().max()), "largest": float(ours.abs().max())}

    def speed(self) -> dict[str, Any]:
        """Peak memory and speed of the large model, and this device's rates of multiplication and all-reduce."""
        task, model = self.task, self.task.large
        torch.set_num_threads(self._threads)
        number: probe.Number = "fp32" if task.precision == "fp32" else "bf16"
        multiplied = probe.multiplied(self.device, number, _wait, min(1.0, task.seconds))
        moved = probe.moved(self.device, task.processes, _wait) if task.processes > 1 else None
        count = model.batch // task.processes
        held, base = HeldBytes(self.device.type), _allocated(self.device)
        with held:
            engine = self._engine(model, task.precision, (1, task.processes))
            first = _seconds(lambda: engine.step(*self._part(engine, model, 0), LR))
            held.top = held.now
            _reset_peak(self.device)
            engine.step(*self._part(engine, model, 1), LR)
        allocated = _peak(self.device, base)
        texts = [self._part(engine, model, k) for k in range(4)]
        for ids, labels in texts[:_WARM]:
            engine.step(ids, labels, LR)
        rate, times = _rate(lambda k: engine.begin_step(*texts[k % 4], LR), engine, task.seconds)
        return {
            "tokens_per_s": rate * model.batch * model.length, "steps": times, "first_step_s": first,
            "peak_bytes": max(self._gathered(engine, allocated if allocated is not None else held.top)),
            "peak_from": "counted tensors" if allocated is None else "the allocator",
            "multiplied_tflops": min(self._gathered(engine, multiplied)) / 1e12, "samples": count,
            "moved_gbs": None if moved is None else min(self._gathered(engine, moved)) / 1e9,
        }  # fmt: skip

    def plain_speed(self) -> dict[str, Any]:
        """Speed and peak memory of transformers' model with torch's AdamW, on the same batches."""
        task, model = self.task, self.task.large
        torch.set_num_threads(self._threads)
        held, base = HeldBytes(self.device.type), _allocated(self.device)
        texts = [_text(model, k, model.batch) for k in range(4)]
        with held:
            loop = _PlainLoop(model, task.precision, self.device)
            loop.step(*texts[0])
            held.top = held.now
            _reset_peak(self.device)
            loop.step(*texts[1])
        allocated = _peak(self.device, base)
        for text in texts[:_WARM]:
            loop.step(*text)
        ends = [time.perf_counter()]
        while len(ends) < _LEAST or ends[-1] - ends[0] < task.seconds:
            loop.step(*texts[len(ends) % 4])
            ends.append(time.perf_counter())
        rate, times = 1 / _middle(ends), len(ends) - 1
        peak = held.top if allocated is None else allocated
        return {"tokens_per_s": rate * model.batch * model.length, "steps": times, "peak_bytes": peak}

    # Their pieces

    def train_until_killed(self) -> None:
        """Take steps for a minute at most; a process that starts with the saved checkpoint kills this one before."""
        engine = self._engine(self.task.small, "fp32", self.task.meshes[0])
        began = time.monotonic()
        while time.monotonic() - began < 60:
            self._steps(engine, 0, 2)

    def _engine(self, model: SizedModel, precision: str, mesh: tuple[int, int], compiled: bool = False) -> NativeEngine:
        tp, dp = mesh
        micro = model.micro_batch if model.batch // dp % model.micro_batch == 0 else 1
        kind: Precision = precision  # type: ignore[assignment]
        options = ParallelOptions(tp=tp, dp=dp, micro_batch_size=micro, precision=kind, compile=compiled)
        return NativeEngine(model.config, options, _ADAMW, None, SEED)

    def _trained(self, mesh: tuple[int, int], saves: bool) -> dict[str, Any]:
        engine = self._engine(self.task.small, "fp32", mesh)
        steps = self._steps(engine, 0, 1)
        with Operators() as counted:
            steps += self._steps(engine, 1, 2)
        steps += self._steps(engine, 2, SAVED)
        if saves:
            engine.save(self._checkpoints(), SAVED, {"step": SAVED})
            logits = engine.logits(_text(self.task.small, 0, 1)[0])
            if self.rank == 0:
                torch.save(logits, self._checkpoints() / "logits.pt")
        began = time.perf_counter()
        steps += self._steps(engine, SAVED, STEPS)
        took = time.perf_counter() - began
        rows = [[*call, times] for call, times in sorted(counted.calls.items())]
        return {
            "tp": mesh[0], "dp": mesh[1], "steps": steps, "weights": _weights(engine), "operators": rows,
            "step_s": took / (STEPS - SAVED),
        }  # fmt: skip

    def _in_half(self, precision: Precision) -> dict[str, Any]:
        engine = self._engine(self.task.small, precision, (1, 1))
        return {"steps": self._steps(engine, 0, STEPS), "finite": bool(torch.isfinite(engine.optimizer.master).all())}

    def _steps(self, engine: NativeEngine, first: int, last: int) -> list[dict[str, Any]]:
        """Steps by the number of updates before each: a step that fp16 skips meets the same text again."""
        rows, model, updates = [], self.task.small, first
        for _ in range(first, last):
            done = engine.step(*self._part(engine, model, updates), LR)
            rows.append({**_numbers(done), "updates": updates})
            updates += not done.skipped
        return rows

    def _part(self, engine: NativeEngine, model: SizedModel, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """This process's samples of batch k."""
        size = model.batch // engine.dp_size
        ids, labels = _text(model, k, model.batch)
        mine = slice(engine.dp_rank * size, (engine.dp_rank + 1) * size)
        return ids[mine], labels[mine]

    def _checkpoints(self) -> Path:
        return Path(self.task.folder) / self.task.checkpoints

    def _gathered(self, engine: NativeEngine, value: float) -> list[float]:
        return engine.mesh.gather(value)


class _PlainLoop:
    """A training loop as most people write it: transformers' model, cross entropy, clipping, torch's AdamW."""

    def __init__(self, model: SizedModel, precision: str, device: torch.device) -> None:
        from transformers import AutoModelForCausalLM

        self._device = device
        torch.use_deterministic_algorithms(False)  # as such loops are; the engine switches it on again
        dtype: torch.dtype = getattr(torch, BY_PRECISION[precision].name)  # type: ignore[index]
        made: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            transformers_config(model.config), attn_implementation="sdpa", dtype=dtype
        )
        shape = ModelShape.from_config(model.config)
        weights = RandomWeights(model.config, shape, SEED)
        with torch.no_grad():
            for name, parameter in made.named_parameters():
                parameter.copy_(weights.read(shape.file_name(name)))
        self._model = made.to(device).eval()  # without dropout
        parameters = list(self._model.parameters())
        groups = [
            {"params": [p for p in parameters if (p.dim() > 1) == matrices], "weight_decay": decay}
            for matrices, decay in ((True, _ADAMW.weight_decay), (False, 0.0))
        ]
        fused = device.type in ("cpu", "cuda")
        self._adamw = torch.optim.AdamW(groups, lr=LR, betas=_ADAMW.betas, eps=_ADAMW.eps, fused=fused)

    def step(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        ids, labels = ids.to(self._device), labels.to(self._device)
        logits = self._model(ids).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), _ADAMW.grad_clip)
        self._adamw.step()
        self._adamw.zero_grad()
        return {"loss": float(loss), "grad_norm": float(norm)}


def _text(model: SizedModel, k: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels of batch k."""
    vocabulary = ModelShape.from_config(model.config).vocab
    first = torch.randint(vocabulary, (count, 1), generator=torch.Generator().manual_seed(1000 + k))
    text = (first + _STRIDE * torch.arange(model.length + 1)) % vocabulary
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def _numbers(done: StepResult) -> dict[str, Any]:
    return {"loss": done.loss, "grad_norm": done.grad_norm, **({"skipped": True} if done.skipped else {})}


def _weights(engine: NativeEngine) -> list[int]:
    """Checksums of every process's part of the weights."""
    part = engine.optimizer.master.detach().cpu().contiguous()
    return engine.mesh.gather(zlib.crc32(part.view(torch.uint8).numpy().tobytes()))


def _rate(begin: Callable[[int], Callable[[], StepResult]], engine: NativeEngine, seconds: float) -> tuple[float, int]:
    """(steps a second, steps). As in training, a step begins before the last one's numbers are read."""
    began, waiting = time.perf_counter(), list[Callable[[], StepResult]]()
    ends = [began]
    while len(ends) < _LEAST or not engine.any(ends[-1] - began > seconds):  # all processes take as many steps
        waiting.append(begin(len(ends) - 1))
        if len(waiting) > engine.steps_ahead:
            waiting.pop(0)()
        ends.append(time.perf_counter())
    for numbers in waiting:
        numbers()
    return 1 / _middle(ends), len(ends) - 1


def _middle(ends: list[float]) -> float:
    """The median time of a step, which other programs on the machine change little."""
    return median(after - before for before, after in pairwise(ends))


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _wait() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def _reset_peak(device: torch.device) -> None:
    if device.type != "cpu":
        try:
            torch.accelerator.reset_peak_memory_stats(device)
        except (AttributeError, RuntimeError, NotImplementedError):
            pass  # a device without statistics: tensors are counted


def _allocated(device: torch.device) -> int | None:
    """Bytes of the device's allocator that earlier parts left; None if it has no statistics."""
    if device.type == "cpu":
        return None
    try:
        return int(torch.accelerator.memory_allocated(device))
    except (AttributeError, RuntimeError, NotImplementedError):
        return None


def _peak(device: torch.device, base: int | None) -> int | None:
    """Peak bytes of the device's allocator above `base`; None if it has no statistics."""
    if base is None:
        return None
    torch.accelerator.synchronize(device)
    return int(torch.accelerator.max_memory_allocated(device)) - base or None


def _forget(device: str) -> None:
    """Free the memory of the part before: its engine has cycles."""
    gc.collect()
    if device != "cpu":
        try:
            torch.accelerator.empty_cache()
        except (AttributeError, RuntimeError, NotImplementedError):
            pass


def _end_with(watched: int) -> None:
    """End this process when the one that started the trial is gone: a device would stay busy."""

    def look() -> None:
        while True:
            time.sleep(1)
            try:
                os.kill(watched, 0)
            except ProcessLookupError:
                os._exit(1)
            except OSError:
                continue

    threading.Thread(target=look, name="watch", daemon=True).start()


def main() -> None:
    """Do a task's parts: `trial TASK.json`."""
    task = Task.read(sys.argv[1])
    _end_with(task.watched)
    rank = int(os.environ.get("RANK", "0"))
    (Path(task.folder) / f"{task.group}-pid-{rank}").write_text(str(os.getpid()))

    def tell(part: str, state: str, **more: Any) -> None:
        if rank == 0 or state == "failed":
            with task.record().open("a", encoding="utf-8") as file:
                file.write(json.dumps({"part": part, "state": state, "rank": rank, **more}) + "\n")

    trial = None
    for part in task.parts:
        _forget(task.device)
        tell(part, "begun")
        began = time.perf_counter()
        try:
            if trial is None:
                trial = TrialProcess(task)
            result = getattr(trial, part)()
        except Exception as error:
            traceback.print_exc()
            tell(part, "failed", reason=f"{type(error).__name__}: {error}")
            sys.stderr.flush()
            os._exit(1)  # not through destructors that wait for other processes
        tell(part, "done", result=result, seconds=time.perf_counter() - began)
    if task.killed and trial is not None:
        trial.train_until_killed()
    os._exit(0)
