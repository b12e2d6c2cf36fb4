"""A process of `smtrain doctor --train`: it trains on a device, and writes a line when a part
begins and ends.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
import zlib
from pathlib import Path
from typing import Any

import torch

from smtrain.core.model.footprint import Precision
from smtrain.core.model.shape import ModelShape
from smtrain.tools.doctor import clocks
from smtrain.tools.doctor.plain_loop import ADAMW, LR, SEED, DrawnWeights, PlainLoop
from smtrain.tools.doctor.task import SAVE_STEP, STEPS, SizedModel, Task
from smtrain.worker.checkpoint.convert import convert
from smtrain.worker.checkpoint.targets import HuggingFace
from smtrain.worker.engine.base import ParallelOptions, StepResult
from smtrain.worker.engine.initial_weights import RandomWeights
from smtrain.worker.engine.native import NativeEngine, init_distributed
from smtrain.worker.engine.native.zero1 import OptimizerShard
from smtrain.worker.train import probe
from smtrain.worker.train.operators import HeldBytes, Operators, fallbacks

_STRIDE = (
    7  # each token of the text follows from the one before it, so that there is something to learn
)
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
        runs = [
            self._train_on_mesh(mesh, saves=mesh == self.task.meshes[0])
            for mesh in self.task.meshes
        ]
        return {"runs": runs, "fell_back": fallbacks()}

    def resume(self) -> dict[str, Any]:
        """Load what `fp32` saved, and take the remaining steps again."""
        engine = self._engine(self.task.small, "fp32", self.task.meshes[0])
        state = engine.load(self._checkpoints() / f"step_{SAVE_STEP:08d}")
        return {
            "from": state["step"],
            "steps": self._steps(engine, SAVE_STEP, STEPS),
            "weights": _weights(engine),
        }

    def bf16(self) -> dict[str, Any]:
        return self._in_half("bf16")

    def fp16(self) -> dict[str, Any]:
        return self._in_half("fp16")

    def transformers(self) -> dict[str, Any]:
        """The same steps by transformers' model and torch's AdamW."""
        model = self.task.small
        loop = PlainLoop(model, "fp32", self.device, RandomWeights(model.config, model.shape, SEED))
        return {
            "steps": [
                {**loop.step(*_text(model, k, model.batch)), "updates": k} for k in range(STEPS)
            ]
        }

    def compile(self) -> dict[str, Any]:
        """torch.compile of each layer: the same losses, the time of the first step and of a later
        one.
        """
        from smtrain.worker.engine.native.layers import compiler_fault

        if fault := compiler_fault(self.device.type):
            return {"skipped": fault}
        engine = self._engine(self.task.small, "fp32", (1, 1), compile_step=True)
        began = time.perf_counter()
        steps = self._steps(engine, 0, 1)
        first = time.perf_counter() - began
        began = time.perf_counter()
        steps += self._steps(engine, 1, STEPS)
        return {
            "steps": steps,
            "first_step_s": first,
            "step_s": (time.perf_counter() - began) / (STEPS - 1),
        }

    def export(self) -> dict[str, Any]:
        """The checkpoint of `fp32` in Hugging Face form: transformers' logits against the engine's
        own.
        """
        from transformers import AutoModelForCausalLM

        folder = Path(self.task.folder) / f"{self.task.group}-exported"
        convert(
            self._checkpoints() / f"step_{SAVE_STEP:08d}",
            folder,
            to=HuggingFace(),
            overwrite=True,
            say=lambda _: None,
        )
        hf_model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        our_logits = torch.load(self._checkpoints() / "logits.pt")
        model = self.task.small
        with torch.no_grad():
            hf_logits = (
                hf_model.to(self.device)
                .eval()(_text(model, 0, 1)[0].to(self.device))
                .logits.float()
                .cpu()
            )
        return {
            "difference": float((our_logits - hf_logits).abs().max()),
            "largest": float(our_logits.abs().max()),
        }

    def speed(self) -> dict[str, Any]:
        """Peak memory and speed of the large model, and this device's rates of multiplication and
        all-reduce.
        """
        task, model = self.task, self.task.large
        torch.set_num_threads(self._threads)
        number: probe.Number = "fp32" if task.precision == "fp32" else "bf16"
        matmul_flops = probe.matmul_rate(self.device, number, clocks.wait, min(1.0, task.seconds))
        link_rate = (
            probe.all_reduce_rate(self.device, task.processes, clocks.wait)
            if task.processes > 1
            else None
        )
        count = model.batch // task.processes
        tensor_bytes, base = HeldBytes(self.device.type), clocks.allocated_bytes(self.device)
        with tensor_bytes:
            engine = self._engine(
                model, task.precision, (1, task.processes), weights=DrawnWeights(model, self.device)
            )
            first = clocks.seconds_of(lambda: engine.step(*self._part(engine, model, 0), LR))
            tensor_bytes.top = tensor_bytes.now
            clocks.reset_peak(self.device)
            engine.step(*self._part(engine, model, 1), LR)
        allocator_peak = clocks.peak_bytes(self.device, base)
        texts = [self._part(engine, model, k) for k in range(4)]
        for ids, labels in texts[: clocks.WARM]:
            engine.step(ids, labels, LR)
        rate, times = clocks.step_rate(
            lambda k: engine.begin_step(*texts[k % 4], LR), engine, task.seconds
        )
        return {
            "tokens_per_s": rate * model.batch * model.length,
            "steps": times,
            "first_step_s": first,
            "peak_bytes": max(
                self._gather_values(
                    engine, allocator_peak if allocator_peak is not None else tensor_bytes.top
                )
            ),
            "peak_from": "counted tensors" if allocator_peak is None else "the allocator",
            "multiplied_tflops": min(self._gather_values(engine, matmul_flops)) / 1e12,
            "samples": count,
            "moved_gbs": None
            if link_rate is None
            else min(self._gather_values(engine, link_rate)) / 1e9,
        }

    def plain_speed(self) -> dict[str, Any]:
        """Speed and peak memory of transformers' model with torch's AdamW, on the same batches.

        Its weights are fp32 and its products bf16 by autocast, as most such loops do, on a GPU.
        """
        task, model = self.task, self.task.large
        torch.set_num_threads(self._threads)
        tensor_bytes, base = HeldBytes(self.device.type), clocks.allocated_bytes(self.device)
        texts = [_text(model, k, model.batch) for k in range(4)]
        with tensor_bytes:
            loop = PlainLoop(model, task.precision, self.device, None)
            loop.step(*texts[0])
            tensor_bytes.top = tensor_bytes.now
            clocks.reset_peak(self.device)
            loop.step(*texts[1])
        allocator_peak = clocks.peak_bytes(self.device, base)
        for text in texts[: clocks.WARM]:
            loop.step(*text)
        ends = [time.perf_counter()]
        while len(ends) < clocks.LEAST_STEPS or ends[-1] - ends[0] < task.seconds:
            loop.step(*texts[len(ends) % 4])
            ends.append(time.perf_counter())
        rate, times = 1 / clocks.middle_step(ends), len(ends) - 1
        peak = tensor_bytes.top if allocator_peak is None else allocator_peak
        return {
            "tokens_per_s": rate * model.batch * model.length,
            "steps": times,
            "peak_bytes": peak,
        }

    def settings(self) -> dict[str, Any]:
        """Speed of the large model under each pair of `train.compile` and `train.deterministic`."""
        from smtrain.worker.engine.native.layers import compiler_fault

        fault = compiler_fault(self.device.type)
        torch.set_num_threads(self._threads)
        rows = []
        for compile_step in (False, True)[: 1 if fault else 2]:
            for deterministic in (True, False):
                rows.append(self._speed_with(compile_step, deterministic))
                clocks.free_memory(self.task.device)
        return {"rows": rows, "uncompiled": fault}

    # Their pieces

    def _speed_with(self, compile_step: bool, deterministic: bool) -> dict[str, Any]:
        """The speed of the large model under two settings."""
        model, weights = self.task.large, DrawnWeights(self.task.large, self.device)
        engine = self._engine(
            model, self.task.precision, (1, 1), compile_step, deterministic, weights
        )
        texts = [self._part(engine, model, k) for k in range(4)]
        first = clocks.seconds_of(lambda: engine.step(*texts[0], LR))
        for ids, labels in texts[: clocks.WARM]:
            engine.step(ids, labels, LR)
        rate, _ = clocks.step_rate(
            lambda k: engine.begin_step(*texts[k % 4], LR), engine, self.task.seconds / 2
        )
        return {
            "compile": compile_step,
            "deterministic": deterministic,
            "first_step_s": first,
            "tokens_per_s": rate * model.batch * model.length,
        }

    def train_until_killed(self) -> None:
        """Take steps for a minute at most; a process that starts with the saved checkpoint kills
        this one before.
        """
        engine = self._engine(self.task.small, "fp32", self.task.meshes[0])
        began = time.monotonic()
        while time.monotonic() - began < 60:
            self._steps(engine, 0, 2)

    def _engine(
        self,
        model: SizedModel,
        precision: str,
        mesh: tuple[int, int],
        compile_step: bool = False,
        deterministic: bool = True,
        weights: RandomWeights | None = None,
    ) -> NativeEngine:
        tp, dp = mesh
        micro = model.micro_batch if model.batch // dp % model.micro_batch == 0 else 1
        kind: Precision = precision  # type: ignore[assignment]
        options = ParallelOptions(
            tp=tp,
            dp=dp,
            micro_batch_size=micro,
            precision=kind,
            compile=compile_step,
            deterministic=deterministic,
        )
        return NativeEngine(model.config, options, ADAMW, weights, SEED)

    def _train_on_mesh(self, mesh: tuple[int, int], saves: bool) -> dict[str, Any]:
        engine = self._engine(self.task.small, "fp32", mesh)
        steps = self._steps(engine, 0, 1)
        with Operators() as operators:
            steps += self._steps(engine, 1, 2)
        steps += self._steps(engine, 2, SAVE_STEP)
        if saves:
            engine.save(self._checkpoints(), SAVE_STEP, {"step": SAVE_STEP})
            logits = engine.logits(_text(self.task.small, 0, 1)[0])
            if self.rank == 0:
                torch.save(logits, self._checkpoints() / "logits.pt")
        began = time.perf_counter()
        steps += self._steps(engine, SAVE_STEP, STEPS)
        took = time.perf_counter() - began
        rows = [[*call, times] for call, times in sorted(operators.calls.items())]
        return {
            "tp": mesh[0],
            "dp": mesh[1],
            "steps": steps,
            "weights": _weights(engine),
            "operators": rows,
            "step_s": took / (STEPS - SAVE_STEP),
        }

    def _in_half(self, precision: Precision) -> dict[str, Any]:
        engine = self._engine(self.task.small, precision, (1, 1))
        return {
            "steps": self._steps(engine, 0, STEPS),
            "finite": engine.optimizer.is_finite(),
        }

    def _steps(self, engine: NativeEngine, first: int, last: int) -> list[dict[str, Any]]:
        """Steps by the number of updates before each: a step that fp16 skips meets the same text
        again.
        """
        rows, model, updates = [], self.task.small, first
        for _ in range(first, last):
            result = engine.step(*self._part(engine, model, updates), LR)
            rows.append({**_numbers(result), "updates": updates})
            updates += not result.is_skipped
        return rows

    def _part(
        self, engine: NativeEngine, model: SizedModel, k: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """This process's samples of batch k."""
        size = model.batch // engine.dp_size
        ids, labels = _text(model, k, model.batch)
        own_rows = slice(engine.dp_rank * size, (engine.dp_rank + 1) * size)
        return ids[own_rows], labels[own_rows]

    def _checkpoints(self) -> Path:
        return Path(self.task.folder) / self.task.checkpoints

    def _gather_values(self, engine: NativeEngine, value: float) -> list[float]:
        return engine.mesh.gather(value)


def _text(model: SizedModel, k: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and labels of batch k."""
    vocabulary = ModelShape.from_config(model.config).vocab
    first = torch.randint(vocabulary, (count, 1), generator=torch.Generator().manual_seed(1000 + k))
    text = (first + _STRIDE * torch.arange(model.length + 1)) % vocabulary
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def _numbers(result: StepResult) -> dict[str, Any]:
    return {
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        **({"skipped": True} if result.is_skipped else {}),
    }


def _weights(engine: NativeEngine) -> list[int]:
    """Checksums of every process's part of the weights."""
    dense = engine.optimizer.dense
    assert isinstance(dense, OptimizerShard), "the trial shards only the optimizer"
    part = dense.master.detach().cpu().contiguous()
    return engine.mesh.gather(zlib.crc32(part.view(torch.uint8).numpy().tobytes()))


def _end_with(parent_pid: int) -> None:
    """End this process when the one that started the trial is gone: a device would stay busy."""

    def look() -> None:
        while True:
            time.sleep(1)
            try:
                os.kill(parent_pid, 0)
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

    def tell(part: str, state: str, **details: Any) -> None:
        if rank == 0 or state == "failed":
            with task.record().open("a", encoding="utf-8") as file:
                file.write(
                    json.dumps({"part": part, "state": state, "rank": rank, **details}) + "\n"
                )

    trial = None
    for part in task.parts:
        clocks.free_memory(task.device)
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
