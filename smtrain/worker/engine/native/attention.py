"""Positions, rotary embeddings and masks of a batch for the layers of a stage.

We make masks here, because transformers' functions for them change with each release, and read a
number of each micro-batch's positions first, which would make the device wait. A row of one sample
needs no mask (SDPA is causal then), except in layers with a shorter window. On CUDA packed rows,
windows and sinks have `DocumentBounds` in place of a mask, so that time and memory are those of the
documents. Elsewhere packed rows have block-diagonal masks, so that samples do not see each other.

With context parallelism a rank has a part of every row, whose positions are those in the whole row;
`ContextParallelRows` stands in the place of a mask.

Positions and the numbers of samples are computed on the host, which has the segments anyway, and
arrive in 32 bits: Neuron has no kernel for a running maximum, and computes 64 bits by way of the
CPU. Only the comparison of [S, S] pairs is left to the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from smtrain.core.facts.trainium2 import flash_lack
from smtrain.worker.engine.native.attention_flash import flash_fault
from smtrain.worker.engine.native.comm import ProcessMesh, to_device
from smtrain.worker.engine.native.context_parallel import ContextParallelRows
from smtrain.worker.engine.native.gated_delta import RowDocuments
from smtrain.worker.engine.native.varlen import DocumentBounds, find_bounds
from smtrain.worker.engine.saving import local_rank

log = logging.getLogger(__name__)
Turn = Callable[[torch.Tensor, torch.Tensor], Any]
AttentionWindow = int | Literal["state"] | None
"""A layer's view of a row: a window of tokens, all of it (None), or a state that runs along it."""


class AttentionContext:
    """Makes the context of micro-batches; keeps that of whole rows, which have the same shape all
    the time.
    """

    def __init__(
        self,
        rotary: Mapping[bool, Turn],
        layer_windows: tuple[AttentionWindow, ...],
        dtype: torch.dtype,
        mesh: ProcessMesh,
        head_dims: Sequence[int],
        is_compiled: bool,
        sinks: bool = False,
    ) -> None:
        """`rotary` has the embedding of layers without a window (False), and that of layers with a
        window if it differs.

        `head_dims` are those of each layer.
        """
        self.varlen = mesh.device.type == "cuda"
        """Whether layers get `DocumentBounds` in place of masks.

        A test sets it on the CPU, before the first batch.
        """
        self._rotary, self._dtype, self._mesh, self._device = rotary, dtype, mesh, mesh.device
        self._windows = tuple(None if window == "state" else window for window in layer_windows)
        self._states = tuple(window == "state" for window in layer_windows)
        self._head_dim, self._is_compiled, self._has_warned = max(head_dims), is_compiled, False
        faults = [
            flash_fault(mesh.device, dtype, size) if self.varlen else None for size in head_dims
        ]
        self._sdpa = [fault is None and not sinks for fault in faults]
        """Whether torch's SDPA computes whole rows of each layer without a mask and without keeping
        scores.
        """
        slow = [
            fault
            for fault, state in zip(faults, self._states, strict=True)
            if fault is not None and not state
        ]
        if slow and local_rank() == 0:
            log.warning(
                "attention of %d of %d layers runs in chunks of plain torch, which is slower: "
                "FlashAttention cannot compute it, because %s",
                len(slow),
                len(layer_windows),
                slow[0],
            )
        self._row_inputs: tuple[tuple[int, int], Any] | None = None
        self._index = torch.empty(0, dtype=torch.int32)

    def __call__(
        self, batch: int, length: int, segments: torch.Tensor | None
    ) -> tuple[torch.Tensor, list[Any], list[Any]]:
        """Positions [B or 1, own tokens], and each layer's rotary embeddings and mask (None: causal
        over the row).

        The mask of a layer with a state is `RowDocuments`, that of another layer over cut rows
        `ContextParallelRows`, and on CUDA `DocumentBounds`. `length` counts own tokens, `segments`
        has whole rows.

        If positions are learned, the rotary embeddings are None. `segments` [B, S] on the host
        numbers the samples of a row; None makes every row one sample.
        """
        if segments is not None:
            return self._packed_inputs(segments)
        if self._row_inputs is None or self._row_inputs[0] != (batch, length):
            row_length = length * self._mesh.cp
            positions = torch.arange(row_length, device="cpu")[None]
            masks = self._masks(positions.expand(batch, -1))
            self._warn_without_flash(row_length, has_mask=any(mask is not None for mask in masks))
            self._row_inputs = (
                (batch, length),
                (*self._positions_and_rotary(batch, positions), masks),
            )
        return self._row_inputs[1]

    def _warn_without_flash(self, length: int, has_mask: bool) -> None:
        """Warn once on Neuron if attention does not run in its flash kernel."""
        if self._device.type == "neuron" and not self._has_warned:
            lack = flash_lack(
                length, self._head_dim, has_mask=has_mask, is_compiled=self._is_compiled
            )
            self._has_warned = lack is not None
            if lack is not None and local_rank() == 0:
                score_note = ", and keeps every score" if self._mesh.cp == 1 else ""
                log.warning("attention runs without its flash kernel%s: %s", score_note, lack)

    @torch.no_grad()
    def _positions_and_rotary(
        self, batch: int, positions: torch.Tensor
    ) -> tuple[torch.Tensor, list[Any]]:
        """Positions on the device, and the layers' rotary embeddings; fp32 holds every position
        below 2**24.
        """
        own_tokens = self._mesh.own_tokens
        device_positions = own_tokens(to_device(positions.int(), self._device))
        if not self._rotary:
            return device_positions, [None] * len(self._windows)
        like = torch.empty(batch, positions.shape[1], 1, dtype=self._dtype, device=self._device)
        at = to_device(positions.float(), self._device)
        embeddings = {sliding: turn(like, at) for sliding, turn in self._rotary.items()}
        if self._mesh.cp > 1:  # cut only now, because the length of the whole row may decide
            embeddings = {
                sliding: tuple(map(own_tokens, pair)) for sliding, pair in embeddings.items()
            }
        # Only families with a second rotary base for windows (Gemma 3) have the key True.
        return device_positions, [
            embeddings[window is not None and True in embeddings] for window in self._windows
        ]

    @torch.no_grad()
    def _packed_inputs(self, segments: torch.Tensor) -> tuple[torch.Tensor, list[Any], list[Any]]:
        batch, length = segments.shape
        self._warn_without_flash(length, has_mask=True)
        positions = positions_within(segments)
        number = None
        # With varlen only delta nets need numbers: attention gets the bounds of documents.
        if any(self._states) or not self.varlen:
            number = to_device((positions == 0).cumsum(-1).int(), self._device)
        masks = (
            self._documents(positions)
            if number is None or self.varlen
            else self._document_masks(positions, number)
        )
        documents = None if number is None else RowDocuments(number, self._bounds(positions))
        layers = zip(self._states, self._windows, strict=True)
        return *self._positions_and_rotary(batch, positions), [
            documents if state else masks[window] for state, window in layers
        ]

    def _documents(self, positions: torch.Tensor) -> dict[int | None, Any]:
        """`DocumentBounds`, or `ContextParallelRows` with them, for each window, by positions [B,
        S] on the host.
        """
        mesh, windows = self._mesh, {*self._windows}
        if mesh.cp > 1:
            index = self._tokens(positions.shape[1])
            return {
                window: ContextParallelRows.by_documents(
                    mesh, index, window, positions, self._is_compiled
                )
                for window in windows
            }
        rows = DocumentBounds.of(find_bounds(positions), self._device, self._is_compiled)
        longer = positions.shape[1]
        return {
            window: rows._replace(window=window if window is not None and window < longer else None)
            for window in windows
        }

    def _document_masks(
        self, positions: torch.Tensor, number: torch.Tensor
    ) -> dict[int | None, Any]:
        """The mask of each window, by positions on the host and numbers of documents on the
        device.
        """
        if self._mesh.cp > 1:
            # Neuron compiles a graph for each shape, and the keys that a chunk sees differ in each
            # batch.
            host_positions, index = (
                None if self._device.type == "neuron" else positions,
                self._tokens(positions.shape[1]),
            )
            return {
                window: ContextParallelRows.of(self._mesh, index, window, number, host_positions)
                for window in {*self._windows}
            }
        distances = self._distances(positions.shape[1])
        same_document = (number[:, None, :, None] == number[:, None, None, :]) & (distances >= 0)
        return {
            window: same_document if window is None else same_document & (distances < window)
            for window in set(self._windows)
        }

    def _bounds(self, positions: torch.Tensor) -> torch.Tensor | None:
        """`RowDocuments.bounds`, which only layers with a state use."""
        if self._device.type != "cuda" or not any(self._states):
            return None
        return to_device(find_bounds(positions)[1].long(), self._device)

    def _masks(self, positions: torch.Tensor) -> list[Any]:
        """Each layer's mask over whole rows, by their positions [B, S] on the host."""
        length = positions.shape[1]
        cuts = [
            window if window is not None and length > window else None for window in self._windows
        ]
        layers = list(zip(self._states, self._sdpa, cuts, strict=True))
        if self.varlen:
            # None makes SDPA causal over the tensors that it gets: right only if this rank has the
            # whole row, and no window ends before the row does.
            rows, is_uncut = self._documents(positions), self._mesh.cp == 1
            plain = (state or (is_uncut and sdpa and cut is None) for state, sdpa, cut in layers)
            return [
                None if is_plain else rows[window]
                for is_plain, window in zip(plain, self._windows, strict=True)
            ]
        if self._mesh.cp > 1:
            index = self._tokens(length)
            cut_rows = {cut: ContextParallelRows.of(self._mesh, index, cut) for cut in {*cuts}}
            return [None if state else cut_rows[cut] for state, _, cut in layers]
        distances = self._distances(length)
        masks = {
            cut: None if cut is None else ((distances >= 0) & (distances < cut))[None, None]
            for cut in set(cuts)
        }
        return [masks[cut] for cut in cuts]

    def _distances(self, length: int) -> torch.Tensor:
        """[S, S]: the distance of each key behind each query."""
        index = self._tokens(length)
        return index[:, None] - index

    def _tokens(self, length: int) -> torch.Tensor:
        """int32 [S]: the numbers of a row's tokens."""
        if len(self._index) != length:
            self._index = to_device(
                torch.arange(length, dtype=torch.int32, device="cpu"), self._device
            )
        return self._index


def packed_segments(segments: torch.Tensor | None) -> torch.Tensor | None:
    """The segments [B, S] on the host, or None if no row has more than one."""
    if segments is None:
        return None
    # Packed data has rows of one sample too, which take the cheaper path of whole rows.
    numbers = segments.numpy(force=True)
    return segments if (numbers[:, 1:] != numbers[:, :-1]).any() else None


def positions_within(segments: torch.Tensor) -> torch.Tensor:
    """Each position's distance from the beginning of its run of equal numbers, int64 [B, S]."""
    index = torch.arange(segments.shape[1], device=segments.device).expand_as(segments)
    begins = torch.ones_like(segments, dtype=torch.bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    # The running maximum over the beginnings is the place at which a token's sample began.
    return index - (index * begins).cummax(-1).values
