"""Save and load adapters in our own format (worker/engine/saving.py), not the library's.

It is small, independent of the mesh, and the same for both engines. ZeRO-1 deals the rows of each
factor to the data-parallel ranks; the hosts put them together first.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from neuronx_distributed.parallel_layers import parallel_state

from smtrain.core.model.lora import AdapterShape, lora_settings
from smtrain.worker.checkpoint.manifest import Manifest
from smtrain.worker.checkpoint.native.files import model_file, optimizer_file
from smtrain.worker.checkpoint.native.reader import StateReader
from smtrain.worker.checkpoint.nxd.names import factor_of
from smtrain.worker.engine.host_copies import Files
from smtrain.worker.engine.saving import fill_from, write_native

if TYPE_CHECKING:
    from smtrain.worker.engine.nxd.engine import NxdEngine

_MOMENTS = ("exp_avg", "exp_avg_sq")


class AdapterState:
    """The factors of an engine's model and their optimizer state; create it after the optimizer."""

    def __init__(self, engine: NxdEngine) -> None:
        assert engine.adapters is not None
        assert isinstance(engine.adapters.shape, AdapterShape)
        self._engine, self._layout, self._lora = engine, engine.adapters, engine.adapters.shape.lora
        self._stages = range(engine.pp_rank, self._layout.pp, engine.options.pp)
        self._group = self._gathering() if engine.options.zero1 and engine.dp_size > 1 else None

    @property
    def are_copies(self) -> bool:
        return True

    def finite(self) -> bool:
        return self._engine.adamw.all_finite()

    def files(self) -> Files:
        engine, out = self._engine, Files()
        factors = {name: p.detach().to("cpu", copy=True) for name, p, _ in self._parts()}
        moments = {kind: self._moments(kind) for kind in _MOMENTS}
        for stage in self._stages:
            table = self._layout.flat_table(stage)
            part_size = -(-table.size // engine.dp_size)
            state = {}
            for kind, values in moments.items():
                # The native engine's equal parts of a flat table, not ZeRO-1's rows.
                flat = torch.zeros(part_size * engine.dp_size)
                for name, at, size in table.entries:
                    flat[at : at + size] = values[name].reshape(-1)
                state[kind] = flat[
                    engine.dp_rank * part_size : (engine.dp_rank + 1) * part_size
                ].clone()
            out[optimizer_file(engine.dp_rank, engine.tp_rank, stage)] = state
            if engine.dp_rank == 0:
                out[model_file(engine.tp_rank, stage)] = {
                    name: factors[name] for name, _, _ in table.entries
                }
        return out

    def manifest(self, step: int, state: dict[str, Any], root: str) -> Manifest:
        engine, layout = self._engine, self._layout
        tables = [layout.flat_table(stage) for stage in range(layout.pp)]
        cut: dict[str, Any] = {}
        if layout.kv_multiplier > 1 and layout.kv_order != "grouped":
            cut["kv_order"] = layout.kv_order
        if engine.options.pipeline_cuts:
            cut["pipeline_cuts"] = list(engine.options.pipeline_cuts)
        return Manifest(
            step=step,
            optimizer_steps=engine.optimizer_steps,
            topology={"tp": layout.tp, "pp": layout.pp, "dp": engine.dp_size},
            precision="fp32",
            config=engine.config,
            flat=[[list(entry) for entry in t.entries] for t in tables],
            shard=[-(-t.size // engine.dp_size) for t in tables],
            files={},
            state=state,
            shapes={s.name: list(s.shape) for s in layout.shape.specs},
            root=root,
            adapter=lora_settings(self._lora),
            cut=cut or None,
        )

    def write(
        self, path: Path, manifest: Manifest, files: Files, read_back: bool
    ) -> dict[str, dict[str, Any]]:
        return write_native(path, manifest, files, read_back)

    @torch.no_grad()
    def load(self, checkpoint: Path) -> dict[str, Any]:
        """See `Engine.load`."""
        engine = self._engine
        manifest = fill_from(checkpoint, engine.everyone, engine.shape, self._lora, self._fill)
        engine.optimizer_steps = manifest.optimizer_steps
        engine.adamw.finite = None  # the weights are no longer those of a step
        return manifest.state

    def _fill(self, reader: StateReader) -> None:
        for name, parameter, master in self._parts():
            factor = reader.read("master", name, self._layout, self._engine.tp_rank)
            parameter.copy_(factor.to(parameter.device))
            master.copy_(self._part(factor).to(master.device))
            state = self._engine.adamw.state_of(master)
            state["step"].fill_(reader.manifest.optimizer_steps)
            for kind in _MOMENTS:
                moment = reader.read(kind, name, self._layout, self._engine.tp_rank)  # type: ignore[arg-type]
                state[kind].copy_(self._part(moment).to(master.device))

    def _parts(self) -> Iterator[tuple[str, torch.nn.Parameter, torch.nn.Parameter]]:
        """Yield each factor's name, the model's parameter, and the optimizer's: the same, or
        ZeRO-1's part.
        """
        names = {id(p): factor_of(name) for name, p in self._engine.named_parameters()}
        for group, master_group in zip(
            self._engine.optimizer.param_groups, self._engine.adamw.param_groups, strict=True
        ):
            for parameter, part in zip(group["params"], master_group["params"], strict=True):
                name = names[id(parameter)]
                assert name is not None
                yield name, parameter, part

    def _part(self, factor: torch.Tensor) -> torch.Tensor:
        """ZeRO-1's part of a factor: its rows, padded to a multiple of the data-parallel ranks,
        dealt evenly.
        """
        if not self._engine.options.zero1:
            return factor
        rows_per_rank = -(-factor.shape[0] // self._engine.dp_size)
        own_rows = factor[
            self._engine.dp_rank * rows_per_rank : (self._engine.dp_rank + 1) * rows_per_rank
        ]
        return torch.cat(
            [own_rows, own_rows.new_zeros(rows_per_rank - own_rows.shape[0], *own_rows.shape[1:])]
        )

    def _moments(self, kind: str) -> dict[str, torch.Tensor]:
        """Whole moments on the host, by factor."""
        state = self._engine.adamw.state
        own_moments = [
            (name, p, state[master][kind].cpu() if state.get(master) else torch.zeros(master.shape))
            for name, p, master in self._parts()
        ]
        if self._group is None:
            # ZeRO-1 pads the rows of a factor at their end.
            return {name: moment[: p.shape[0]] for name, p, moment in own_moments}
        flat = torch.cat([moment.reshape(-1) for _, _, moment in own_moments])
        rank_parts = [torch.empty_like(flat) for _ in range(self._engine.dp_size)]
        dist.all_gather(rank_parts, flat, group=self._group)
        out, at = {}, 0
        for name, p, moment in own_moments:
            size = moment.numel()
            out[name] = torch.cat([part[at : at + size].view(moment.shape) for part in rank_parts])[
                : p.shape[0]
            ]
            at += size
        return out

    def _gathering(self) -> Any:
        """A gloo group of this rank's data-parallel ranks."""
        # torch requires that every rank makes every group.
        groups = [(ranks, dist.new_group(list(ranks), backend="gloo")) for ranks in _replicas()]
        return next(group for ranks, group in groups if self._engine.rank in ranks)


def _replicas() -> list[list[int]]:
    groups: list[list[int]] = parallel_state.get_data_parallel_replica_groups()
    return groups
