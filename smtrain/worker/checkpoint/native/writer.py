"""Write native checkpoints: one in another cut, or the weights of a model before its first step."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from smtrain.core.errors import CheckpointError
from smtrain.core.model.blocks import keeps_fp32
from smtrain.core.model.footprint import Precision
from smtrain.core.model.layout import Layout
from smtrain.core.model.shape import ModelShape
from smtrain.worker.checkpoint import manifest as manifests
from smtrain.worker.checkpoint.conversion_plan import other_files_error
from smtrain.worker.checkpoint.dtypes import BY_PRECISION, FP32, Bits, cast
from smtrain.worker.checkpoint.huggingface.companions import NO_COMPANIONS, CompanionFiles
from smtrain.worker.checkpoint.manifest import Manifest
from smtrain.worker.checkpoint.native.files import (
    EXPERTS,
    model_file,
    optimizer_file,
    topology_of,
    write_stream,
)
from smtrain.worker.checkpoint.sources import WeightSource, precisions_of
from smtrain.worker.checkpoint.staging import (
    Staging,
    is_unfinished,
    not_written,
    present,
    staging_folder,
)
from smtrain.worker.checkpoint.storage import is_uri, refuse_changed
from smtrain.worker.checkpoint.targets import Native
from smtrain.worker.checkpoint.tensor_files import Tensor, blocks_of
from smtrain.worker.checkpoint.training_state import KINDS, TrainingState
from smtrain.worker.checksum import crc32

_PRECISIONS = {dtype: precision for precision, dtype in BY_PRECISION.items()}


def write_native(
    source: WeightSource,
    target: Path | str,
    to: Native,
    state: TrainingState | None = None,
    overwrite: bool = True,
    companion_files: CompanionFiles = NO_COMPANIONS,
) -> None:
    """Write `target/step_00000000` in the cut of (tp, pp, ep), a few rows in memory at a time.

    With `state` it is the state's own step, and training can resume from it; without, a model to
    start from. If the state's run had another precision than `source`, the weights are its master
    weights, rounded once. Raises CheckpointError if the weights do not all have one of the types of
    `train.precision`, or the target is not a folder of this machine.
    """
    if is_uri(target):
        raise CheckpointError(
            f"{target}: native checkpoints are written to a folder; copy it there afterwards."
        )
    dtypes = precisions_of(source)
    if len(dtypes) > 1 or not dtypes <= set(_PRECISIONS):
        precisions = ", all ".join(_PRECISIONS.values())
        raise CheckpointError(
            f"a native checkpoint is all {precisions}; the source is not: convert with --dtype."
        )
    writer = _NativeWriter(
        source,
        Layout(ModelShape.from_config(source.config), to.tp, to.pp, ep=to.ep),
        state,
        _PRECISIONS[dtypes.pop()],
    )
    checkpoint = manifests.step_folder(Path(target), 0 if state is None else state.step)
    companions = {file: crc32(data) for file, data in companion_files.files.items()}
    # The optimizer's state is read from the same place, so this stamp covers it too.
    read = source.location.stamp()
    cut = [to.tp, to.pp, *([to.ep] if to.ep > 1 else [])]
    work = json.dumps(
        [manifests.FORMAT, *cut, state is None, source.config, source.stamp(), companions],
        default=str,
    )
    try:
        if (
            not overwrite
            and not is_unfinished(checkpoint, manifests.NAME)
            and (old := sorted(present(checkpoint)))
        ):
            raise other_files_error(checkpoint, old)
        with staging_folder(
            checkpoint, hashlib.sha256(work.encode()).hexdigest(), manifests.NAME
        ) as stage:
            if not stage.complete:
                writer.write(stage)
                refuse_changed(source.location, read, [stage.folder, stage.target])
                for file, data in companion_files.files.items():
                    path = stage.folder / file
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(data)
            stage.publish(("model/*.safetensors", "optim/*.safetensors"))
    except OSError as error:
        raise CheckpointError(not_written(target, error)) from None


class _NativeWriter:
    def __init__(
        self,
        source: WeightSource,
        layout: Layout,
        state: TrainingState | None,
        precision: Precision,
    ) -> None:
        self._source, self._layout, self._state, self._precision = source, layout, state, precision

    def write(self, stage: Staging) -> None:
        source, layout, state = self._source, self._layout, self._state
        if state is None:
            for name in source.names():
                # Before the first byte: unlike other writers, this one does not compare while it
                # copies.
                source.check(name)
        else:
            state.check()
        files: dict[str, dict[str, Any]] = {}
        for p in range(layout.pp):
            for t in range(layout.tp):
                files |= self._rank(stage.folder, p, t)
        tables = [layout.flat_table(p) for p in range(layout.pp)]
        manifest = Manifest(
            step=0 if state is None else state.step,
            optimizer_steps=0 if state is None else state.optimizer_steps,
            # The fewest ranks that divide the experts by ep; any dp can resume from it.
            topology=topology_of((layout.tp, layout.pp, layout.ep), layout.ep),
            precision=self._precision,
            config=source.config,
            flat=[[list(entry) for entry in table.entries] for table in tables],
            shard=[self._part_size(table.size) for table in tables],
            files=files,
            state={} if state is None else state.loop,
            shapes={spec.name: list(spec.shape) for spec in layout.shape.specs},
            loss_scale=None if state is None else state.loss_scale,
        )
        manifests.write_manifest(stage.folder, manifest)

    def _rank(self, folder: Path, p: int, t: int) -> dict[str, dict[str, Any]]:
        """Write one rank's files; returns their entries for the manifest."""
        files: dict[str, dict[str, Any]] = {}
        for file, names, e in self._model_files(p, t):
            tensors = {
                name: Tensor(
                    FP32 if keeps_fp32(name) else self._source.dtype(name),
                    self._layout.local_shape(name, t),
                )
                for name in names
            }
            files[file] = write_stream(
                folder / file, tensors, partial(self._part, tp_rank=t, ep_rank=e)
            )
        for d in range(self._layout.ep) if self._state is not None else ():
            file = optimizer_file(d, t, p)
            files[file] = write_stream(
                folder / file,
                self._optimizer_tensors(p, d),
                partial(self._flat, pp_rank=p, tp_rank=t, rank=d),
            )
        return files

    def _model_files(self, p: int, t: int) -> Iterator[tuple[str, list[str], int]]:
        """The files of one rank's weights: name, parameters, and the expert-parallel rank."""
        layout, names = self._layout, self._layout.names(p)
        if layout.ep == 1:
            yield model_file(t, p), names, 0
            return
        of_experts = {name for name in names if layout.spec(name).of_experts}
        yield model_file(t, p), [name for name in names if name not in of_experts], 0
        for e in range(layout.ep) if of_experts else ():
            own_names = (n for n in names if n in of_experts and e in layout.expert_ranks(n))
            yield model_file(t, p, e), [*own_names], e

    def _part_size(self, size: int) -> int:
        """A rank's part of a flat buffer of `size` numbers, as the engine pads it."""
        return max(1, -(-size // self._layout.ep))

    def _optimizer_tensors(self, p: int, d: int) -> dict[str, Tensor]:
        """The tensors of a data-parallel rank's optimizer file; d is its expert-parallel rank."""
        layout = self._layout
        # In fp32, the weights are the master.
        kinds = KINDS[1:] if self._precision == "fp32" else KINDS
        dense = Tensor(FP32, (self._part_size(layout.flat_table(p).size),))
        if layout.ep == 1:
            return dict.fromkeys(kinds, dense)
        experts = Tensor(FP32, (max(1, layout.flat_table(p, d).size),))
        return dict.fromkeys(kinds, dense) | {f"{EXPERTS}{kind}": experts for kind in kinds}

    def _flat(self, kind: str, pp_rank: int, tp_rank: int, rank: int) -> Iterator[Bits]:
        """A rank's part of a flat buffer, in the table's order, and its padding."""
        assert self._state is not None
        of_experts = kind.startswith(EXPERTS)
        state_kind: Any = kind.removeprefix(EXPERTS)
        table = self._layout.flat_table(pp_rank, rank if of_experts else None)
        size = max(1, table.size) if of_experts else self._part_size(table.size)
        start = 0 if of_experts else rank * size
        for name, at, count in table.entries:
            low, high = max(at, start), min(at + count, start + size)
            if low < high:
                numbers = self._state.local(state_kind, name, self._layout, tp_rank, rank)
                yield numbers.reshape(-1)[low - at : high - at]
        yield np.zeros(size - max(0, min(table.size - start, size)), FP32.bits)

    def _part(self, name: str, tp_rank: int, ep_rank: int) -> Iterable[Bits]:
        """One rank's part of a parameter, in order."""
        if keeps_fp32(name):
            weight_bits = self._source.bits(name, [(0, n) for n in self._source.shape(name)])
            return [cast(weight_bits, self._source.dtype(name), FP32)]
        if self._state is not None and self._precision != self._state.precision:
            master = self._state.local("master", name, self._layout, tp_rank, ep_rank)
            return [cast(master, FP32, BY_PRECISION[self._precision])]
        experts = self._layout.experts(ep_rank) if self._layout.spec(name).is_stacked else None
        return blocks_of(self._source, name, self._layout.shard(name, tp_rank), experts)
