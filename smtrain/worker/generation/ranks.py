"""Generate with a model divided over the processes of this machine, from any weights that
smtrain reads.

This process is rank 0. It runs transformers' generation, whose model asks all ranks for the logits
after new tokens; the other ranks, processes of `python -m smtrain.worker.generation.ranks`, wait
for its orders. Each rank reads only its part of the weights, and keeps the keys and values of its
own heads and layers.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from transformers.modeling_outputs import CausalLMOutputWithPast

from smtrain.core.errors import CheckpointError, ConfigError, SmtrainError
from smtrain.core.machine import cores_here
from smtrain.core.model import hf_tokenizer
from smtrain.core.model.footprint import Precision
from smtrain.core.model.hf_config import normalise
from smtrain.core.model.layout import Layout
from smtrain.core.model.shape import ModelShape
from smtrain.worker.checkpoint.dtypes import BY_PRECISION
from smtrain.worker.checkpoint.open import open_weights
from smtrain.worker.checkpoint.sources import WeightSource, precisions_of
from smtrain.worker.engine.base import ParallelOptions
from smtrain.worker.engine.native import comm
from smtrain.worker.engine.native.comm import ProcessMesh
from smtrain.worker.engine.native.kv_cache import CachedStage, KVCache
from smtrain.worker.engine.native.stage import Stage
from smtrain.worker.generation.load import (
    NO_MODEL,
    LoadedModel,
    named_ends,
    not_loaded,
    only_ids,
    refuse_no_tokenizer,
)

CACHE = next(
    f.name for f in fields(CausalLMOutputWithPast) if f.name in ("cache", "past_key_values")
)
"""transformers' name of the cache, which release 5.24 changed."""
_STOP, _STEP, _PICK = range(3)
_WAIT = timedelta(days=365)
"""RankProcesses wait for the next question as long as a conversation lasts."""
_ROOM = 0.8
"""Share of a device's memory to fill with weights, keys and values; the rest is for a pass over a
long prompt.
"""
_MEMORY_REMEDY = "take fewer processes, or a machine with more memory"
_LAST_WORD = 5.0
"""Seconds for a rank to end by itself."""


@dataclass(frozen=True)
class Division:
    """A model's weights and the ranks that hold them."""

    path: str
    """A folder that `open_weights` reads."""
    config: dict[str, Any] | None
    """Its config.json, if the folder has none."""
    tp: int
    pp: int
    meeting: str
    """The file by which the ranks find one another."""

    @property
    def ranks(self) -> int:
        return self.tp * self.pp


def choose_mesh(shape: ModelShape, processes: int) -> tuple[int, int]:
    """(tp, pp) for a number of processes, with as much tp as the model's heads allow.

    Raises `ConfigError`.
    """
    for tp in (n for n in range(processes, 0, -1) if processes % n == 0):
        if not shape.mesh_faults(tp, processes // tp):
            return tp, processes // tp
    fitting = [n for n in range(1, processes) if any(_fits(shape, tp, n) for tp in range(1, n + 1))]
    raise ConfigError(
        f"processes: {processes} cannot share this model ({shape.heads} attention heads,"
        f" {shape.kv_heads} of keys and values, {shape.layers} layers); {fitting[-1]} can",
        code="config.combination",
    )


def _fits(shape: ModelShape, tp: int, processes: int) -> bool:
    return processes % tp == 0 and not shape.mesh_faults(tp, processes // tp)


class _Remote(KVCache):
    """Rank 0's memory, which every other rank keeps in step with."""

    def __init__(self, pick: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._tell = pick

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._tell(beam_idx)
        self.pick(beam_idx)


class Orders:
    """Rank 0's words to the other ranks."""

    def __init__(
        self, control: dist.ProcessGroup | None, fault: Callable[[], str | None] = lambda: None
    ) -> None:
        """`fault` is the reason that a rank has ended, None if all run."""
        self.control, self.fault = control, fault
        self.broken = False
        """The other ranks may wait in the middle of a pass, and hear nothing."""

    def say(self, *words: int) -> None:
        dist.broadcast(torch.tensor([*words, *[0] * (5 - len(words))]), 0, group=self.control)

    def stop(self) -> bool:
        """Tell the ranks to end; False if they may not hear it."""
        if self.broken:
            return False
        with suppress(RuntimeError):  # a rank that has ended already
            self.say(_STOP)
            return True
        return False


class DividedModel:
    """Rank 0's view of the divided model: transformers' `generate` over all ranks."""

    def __init__(self, remembering: CachedStage, orders: Orders) -> None:
        self._remembering, self._orders = remembering, orders
        self._model: Any = remembering.stage.model
        self._model.forward = self._forward
        self.generation_config = self._model.generation_config
        self.config, self.device = self._model.config, remembering.mesh.device

    @property
    def generation_config(self) -> Any:
        return self._model.generation_config

    @generation_config.setter
    def generation_config(self, config: Any) -> None:
        config.cache_implementation = None  # the cache is ours
        self._model.generation_config = config

    def generate(self, **options: Any) -> Any:
        """transformers' `generate`. Raises `CheckpointError` if a rank has ended."""
        if self._orders.broken:
            raise CheckpointError(
                "the model's processes were interrupted in the middle of a text; load it again"
            )
        try:
            return self._model.generate(**{CACHE: _Remote(self._pick)}, **options)
        except BaseException as error:
            self._orders.broken = True
            fault = self._orders.fault() if isinstance(error, RuntimeError) else None
            if fault:
                raise CheckpointError(
                    f"{fault}; load the model again, with fewer processes or more memory"
                ) from error
            raise

    def _forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cache: KVCache | None = None,
        past_key_values: KVCache | None = None,
        position_ids: torch.Tensor | None = None,
        use_cache: bool = True,
        logits_to_keep: int = 1,
        **_: Any,
    ) -> CausalLMOutputWithPast:
        """transformers calls this for the logits after `input_ids`, the new tokens, which follow
        the cache's.
        """
        memory = cache if cache is not None else past_key_values
        if memory is None:  # Phi-3 drops it when a text grows beyond its short factors
            memory = _Remote(self._pick)
        if attention_mask is None:
            attention_mask = torch.ones(
                len(input_ids), memory.seen + input_ids.shape[1], dtype=torch.long
            )
        ids_and_mask = torch.cat([input_ids.cpu(), attention_mask.cpu().long()], 1)
        self._orders.say(
            _STEP,
            len(ids_and_mask),
            input_ids.shape[1],
            attention_mask.shape[1],
            int(memory.seen == 0),
        )
        dist.broadcast(ids_and_mask, 0, group=self._orders.control)
        ids, mask = (part.to(self.device) for part in (input_ids, attention_mask))
        logits = self._remembering.logits(ids, mask, memory)
        assert logits is not None
        output_class: Any = CausalLMOutputWithPast
        out: CausalLMOutputWithPast = output_class(logits=logits[:, None], **{CACHE: memory})
        return out

    def _pick(self, rows: torch.Tensor) -> None:
        self._orders.say(_PICK, len(rows))
        dist.broadcast(rows.cpu().long(), 0, group=self._orders.control)


def serve(remembering: CachedStage, control: dist.ProcessGroup | None) -> None:
    """Follow rank 0's orders until it ends."""
    memory, device = KVCache(), remembering.mesh.device
    while True:
        words = torch.zeros(5, dtype=torch.long)
        dist.broadcast(words, 0, group=control)
        order, texts, new, total, begins = words.tolist()
        if order == _STOP:
            return
        if order == _PICK:
            rows = torch.zeros(texts, dtype=torch.long)
            dist.broadcast(rows, 0, group=control)
            memory.pick(rows)
            continue
        ids_and_mask = torch.zeros(texts, new + total, dtype=torch.long)
        dist.broadcast(ids_and_mask, 0, group=control)
        if begins:
            memory = KVCache()
        ids_and_mask = ids_and_mask.to(device)
        remembering.logits(ids_and_mask[:, :new], ids_and_mask[:, new:], memory)


def build_rank_stage(source: WeightSource, tp: int, pp: int, device: torch.device) -> CachedStage:
    """This rank's part of a model, with its weights.

    Raises `CheckpointError` on every rank if they do not fit.
    """
    dtypes = precisions_of(source)
    precision: Precision = next(
        (name for name, dtype in BY_PRECISION.items() if dtypes == {dtype}), "fp32"
    )
    options = ParallelOptions(tp, pp, precision=precision)
    mesh = ProcessMesh(options, device)
    stage = Stage(
        source.config, Layout(ModelShape.from_config(source.config), tp, pp), mesh, options
    )
    stage.requires_grad_(False)
    fault = None
    try:
        stage.load(source, lambda name, values: None)
    except CheckpointError as error:
        fault = str(error)
    mesh.agree(fault, "the weights cannot be loaded")
    return CachedStage(stage)


def _join(rank: int, division: Division) -> tuple[torch.device, dist.ProcessGroup | None]:
    """Meet the other ranks, of which all run; returns this one's device, and the group for orders
    (None: the job's).
    """
    kind = accelerator() or "cpu"
    dist.init_process_group(
        comm.BACKENDS[kind],
        init_method=f"file://{division.meeting}",
        rank=rank,
        world_size=division.ranks,
        timeout=_WAIT,
    )
    torch.set_num_threads(max(1, cores_here() // division.ranks))
    device = comm.init_distributed(kind)
    return device, None if kind == "cpu" else dist.new_group(backend="gloo", timeout=_WAIT)


def accelerator() -> str | None:
    """The kind of this machine's devices that have a backend for collectives; None: ranks run on
    the CPU.
    """
    device = torch.accelerator.current_accelerator(check_available=True)
    return device.type if device is not None and device.type in comm.BACKENDS else None


class RankProcesses:
    """The other ranks' processes."""

    def __init__(self, division: Division) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="smtrain-ranks-")
        self._said = [Path(self._folder.name) / f"rank{rank}" for rank in range(1, division.ranks)]
        words = json.dumps(vars(division))
        self._processes: list[subprocess.Popen[bytes]] = []
        for rank, error_log in enumerate(self._said, start=1):
            with error_log.open("wb") as errors:
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", __name__, words],
                        env=_environment(rank, division.ranks),
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=errors,
                    )
                )

    def fault(self) -> str | None:
        """The reason that a rank has ended; None if all run."""
        for rank, process in enumerate(self._processes, start=1):
            if (status := process.poll()) is not None:
                ending = (
                    f"was ended by signal {-status}"
                    if status < 0
                    else f"ended with status {status}"
                )
                words = self._said[rank - 1].read_text("utf-8", "replace").strip().splitlines()
                return (
                    f"process {rank} of the model"
                    f" {ending}{f' ({words[-1][:200]})' if words else ''}"
                )
        return None

    def reason(self) -> str | None:
        """`fault` after an error of a collective, which is raised a moment before the process has
        ended.
        """
        deadline = time.monotonic() + _LAST_WORD
        while (fault := self.fault()) is None and time.monotonic() < deadline:
            time.sleep(0.05)
        return fault

    def wait(self, division: Division) -> None:
        """Wait until all processes are about to meet.

        Raises `CheckpointError` if one ends before.
        """
        while len([*Path(division.meeting).parent.glob("rank*")]) < len(self._processes):
            if fault := self.fault():
                raise CheckpointError(f"{fault}; {_MEMORY_REMEDY}")
            time.sleep(0.05)

    def close(self, graceful: bool) -> None:
        """Wait for the processes, if they were told to end, or end them."""
        for process in self._processes:
            if graceful:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_LAST_WORD)
            process.kill()
            process.wait()
        self._folder.cleanup()


def _environment(rank: int, ranks: int) -> Mapping[str, str]:
    root = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    return {**os.environ, "PYTHONPATH": path, **{key: str(value) for key, value in places.items()}}


class Started(NamedTuple):
    """A loaded model over ranks."""

    driver: DividedModel
    division: Division
    close: Callable[[], object]
    """End the other ranks; done at the latest when Python ends."""


def start(path: str, config: dict[str, Any] | None, processes: int) -> Started:
    """Start a model over `processes` ranks, of which this process is one.

    Raises `CheckpointError` if the weights do not fit the model, or if a rank ends, and
    `ConfigError` if so many processes cannot share it.
    """
    source = open_weights(path, config)
    tp, pp = choose_mesh(ModelShape.from_config(source.config), processes)
    if dist.is_initialized():
        raise ConfigError(
            "processes: this process holds a part of another model; let that one go first"
            " (`close()`)",
            code="config.combination",
        )
    folder = tempfile.TemporaryDirectory(prefix="smtrain-meeting-")
    division = Division(path, config, tp, pp, f"{folder.name}/meeting")
    threads, ranks = torch.get_num_threads(), RankProcesses(division)
    orders = Orders(None, ranks.reason)
    orders.broken = True  # until all have met

    def close() -> None:
        ranks.close(orders.stop())
        if dist.is_initialized():
            dist.destroy_process_group()
        torch.set_num_threads(threads)
        folder.cleanup()

    try:
        ranks.wait(division)
        device, orders.control = _join(0, division)
        driver = DividedModel(build_rank_stage(source, tp, pp, device), orders)
    except BaseException as error:
        fault = ranks.reason() if isinstance(error, RuntimeError) else None
        close()
        if fault:
            raise CheckpointError(f"{fault}; {_MEMORY_REMEDY}") from error
        raise
    orders.broken = False
    return Started(driver, division, weakref.finalize(driver, close))


def load_divided(
    path: Path, hf_config: dict[str, Any], tokenizer_folder: Path, processes: int
) -> tuple[LoadedModel, str]:
    """Load the weights of a folder over `processes`, and the tokenizer of `tokenizer_folder`;
    returns also the mesh in words.

    Raises `CheckpointError` as `start` does, and if the tokenizer is missing.
    """
    refuse_no_tokenizer(tokenizer_folder)
    try:
        tokenizer = hf_tokenizer.load(tokenizer_folder)
        generation = named_ends(tokenizer_folder)
    except NO_MODEL as error:
        raise CheckpointError(not_loaded(tokenizer_folder, error)) from error
    gc.collect()  # ranks of a model that nothing refers to any more
    rank_group = start(str(path), hf_config, processes)
    rank_group.driver.generation_config = generation or only_ids(
        rank_group.driver.generation_config.to_dict()
    )
    mesh = rank_group.division
    words = (
        f"{mesh.ranks} processes, tp {mesh.tp} x pp {mesh.pp}" if mesh.ranks > 1 else "one process"
    )
    has_learned_positions = normalise(hf_config).rope is None
    return (
        LoadedModel(
            path,
            rank_group.driver,
            tokenizer,
            has_learned_positions=has_learned_positions,
            close=rank_group.close,
        ),
        words,
    )


def usual_processes(hf_config: dict[str, Any], need: float) -> int:
    """The least number of accelerators that hold `need` bytes together; 1 on CPUs, whose processes
    share memory.
    """
    if accelerator() is None:
        return 1
    shape, device_total = ModelShape.from_config(hf_config), torch.accelerator.device_count()
    fitting = [
        n for n in range(1, device_total + 1) if any(_fits(shape, tp, n) for tp in range(1, n + 1))
    ]
    if not torch.cuda.is_available():
        return fitting[-1]  # of other devices the memory is not known
    device_memory = torch.cuda.get_device_properties(0).total_memory
    return next((n for n in fitting if need <= n * _ROOM * device_memory), fitting[-1])


def _main(words: str) -> None:
    """One of the other ranks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 decides what an interrupt ends
    division = Division(**json.loads(words))
    rank = int(os.environ["RANK"])
    Path(division.meeting).with_name(f"rank{rank}").touch()
    try:
        device, control = _join(rank, division)
        serve(
            build_rank_stage(
                open_weights(division.path, division.config), division.tp, division.pp, device
            ),
            control,
        )
        dist.destroy_process_group()
    except SmtrainError as error:  # rank 0 says it too
        sys.exit(str(error))
    except RuntimeError as error:
        sys.exit(str(error).splitlines()[0])  # rank 0 has ended, or this one has no memory


if __name__ == "__main__":
    _main(sys.argv[1])
