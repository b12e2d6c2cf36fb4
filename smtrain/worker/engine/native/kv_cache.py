"""A stage that keeps the keys, values and states of the tokens before, so that a text grows by one
token a pass.

The layers are the stage's own, those of transformers, which fill a cache of transformers. Masks,
positions and the states of gated delta nets are made here, since those of a batch whose rows begin
at different places differ from those of training.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import DynamicCache

from smtrain.worker.engine.native import comm
from smtrain.worker.engine.native.gated_delta import NetState, with_state
from smtrain.worker.engine.native.pipeline import Pipeline
from smtrain.worker.engine.native.stage import Stage
from smtrain.worker.engine.native.varlen import DocumentBounds

_CACHES = ("cache", "past_key_values", "layer_past")
"""Names of a block's argument for the cache, in the order of transformers' releases, the newest
first.
"""


class KVCache(DynamicCache):  # type: ignore[misc]  # transformers has no types here
    """A rank's memory of some texts: keys and values of its heads in its layers, and states of
    delta nets.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0
        """Tokens of each text so far, padding included."""
        self.nets: dict[int, NetState] = {}
        """By layer."""

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen

    def pick(self, rows: torch.Tensor) -> None:
        """Keep these rows, in this order; one may come more than once."""
        for layer in self.layers:
            layer.reorder_cache(rows)
        self.nets = {
            i: NetState(*(part[rows.to(part.device)] for part in net_state))
            for i, net_state in self.nets.items()
        }


class CachedStage:
    """A stage and its neighbours as a model that takes only new tokens.

    Every method is collective.
    """

    def __init__(self, stage: Stage) -> None:
        self.stage, self.mesh = stage, stage.mesh
        self._pipeline = Pipeline(stage, stage.mesh)
        self._memory = KVCache()
        self._names = [_argument(block) for block in stage.blocks]
        layers = stage.layout.layers(stage.mesh.pp_rank)
        for i, mixer in zip(layers, stage.mixers, strict=True):
            if stage.layout.shape.by_layer[i].delta is not None:
                mixer.forward = self._net(i, mixer)

    @torch.inference_mode()
    def logits(
        self, ids: torch.Tensor, mask: torch.Tensor, kv_cache: KVCache
    ) -> torch.Tensor | None:
        """Logits after the last token, fp32 [B, vocabulary], on rank 0; None on every other rank.

        `ids` [B, new] follow the tokens in `kv_cache`; `mask` [B, all tokens] is 0 on padding,
        which begins a row.
        """
        stage, mesh = self.stage, self.mesh
        self._memory = kv_cache
        h = self._pipeline.through(ids, lambda x: self._hidden_states(x, ids.shape[1], mask))
        kv_cache.seen = mask.shape[1]
        last_logits = torch.empty(len(ids), stage.layout.shape.vocab, device=mesh.device)
        if h is not None:
            local = stage.local_logits(h[:, -1:]).float()
            all_logits = comm.all_gather(local, mesh.tp_group, dim=2) if mesh.tp > 1 else local
            last_logits = all_logits[:, 0, : stage.layout.shape.vocab].contiguous()
        if mesh.pp > 1 and mesh.tp_rank == 0:
            self._pipeline.broadcast_from_last(last_logits)
        return last_logits if mesh.rank == 0 else None

    def _hidden_states(self, x: torch.Tensor, new: int, mask: torch.Tensor) -> torch.Tensor:
        stage, hf_config = self.stage, self.stage.described
        # Padding begins a row, so positions count from the first token of the text.
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        rotary = self._rotary(positions, new)
        has_padding = bool((mask == 0).any())
        windows = set(hf_config.windows)
        if (
            stage.context.varlen and new > 1
        ):  # one new token needs no mask of its text's length squared
            masks = self._documents(mask, new, windows)
        else:
            masks = {window: _visible_mask(mask, new, window, has_padding) for window in windows}
        # -1 keeps padding out of the state of a delta net (`with_state`).
        number = torch.where(mask[:, -new:] > 0, 0, -1).int() if has_padding else None
        new_positions = positions[:, -new:]
        h = stage._embed(x) if stage.first else x
        if stage.positions is not None:
            h = h + stage.positions(new_positions)
        layers = zip(stage.layout.layers(self.mesh.pp_rank), stage.blocks, self._names, strict=True)
        for i, block, name in layers:
            net = stage.layout.shape.by_layer[i].delta is not None
            window = hf_config.windows[i]
            kwargs: dict[str, Any] = {
                "attention_mask": number if net else masks[window],
                name: self._memory,
            }
            if rotary:
                embeddings = rotary[window is not None and True in rotary]
                kwargs |= stage.position_arguments(new_positions, embeddings)
            h = stage.layers(block, h, **kwargs)
        return stage.norm(h) if stage.norm is not None else h

    def _documents(
        self, mask: torch.Tensor, new: int, windows: set[int | None]
    ) -> dict[int | None, Any]:
        """The documents of new tokens on CUDA: the padding that begins a row is one, and its text
        another.
        """
        batch, total = mask.shape
        padding = (mask == 0).sum(1).cpu()
        row = torch.arange(batch)
        first = torch.stack([row * new, row * total], 1)
        text = torch.stack(
            [row * new + (padding - total + new).clamp(min=0), row * total + padding], 1
        )
        bounds = torch.stack([first, text], 1).flatten(0, 1).T
        host = (
            torch.cat([bounds, bounds.new_tensor([[batch * new], [batch * total]])], 1)
            .int()
            .contiguous()
        )
        rows = DocumentBounds.of(host, self.mesh.device, is_compiled=False)
        return {window: rows._replace(window=window) for window in windows}

    def _rotary(self, positions: torch.Tensor, new: int) -> dict[bool, Any]:
        """Rotary embeddings of the new positions, with (True) and without a window."""
        stage = self.stage
        rope = stage.described.rope
        # longrope's factors depend on the length of the text, which `turn` takes from the row.
        needs_all_positions = rope is not None and rope.original is not None
        at = (positions if needs_all_positions else positions[:, -new:]).float()
        like = torch.empty(*at.shape, 1, dtype=stage.dtype, device=self.mesh.device)
        embeddings = {sliding: turn(like, at) for sliding, turn in stage.rotary.items()}
        return (
            {key: tuple(part[:, -new:] for part in pair) for key, pair in embeddings.items()}
            if needs_all_positions
            else embeddings
        )

    def _net(self, layer: int, net: Any) -> Any:
        def forward(
            hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **_: Any
        ) -> torch.Tensor:
            memory = self._memory
            out, memory.nets[layer] = with_state(
                net, hidden_states, attention_mask, memory.nets.get(layer)
            )
            return out

        return forward


def _argument(block: Any) -> str:
    """The name of a block's argument for the cache."""
    parameters = inspect.signature(type(block).forward).parameters
    return next((name for name in _CACHES if name in parameters), _CACHES[0])


def _visible_mask(
    mask: torch.Tensor, new: int, window: int | None, has_padding: bool
) -> torch.Tensor | None:
    """[B, 1, new, all]: the tokens that each new one sees; None if it sees all before it."""
    total = mask.shape[1]
    if not has_padding and (window is None or total <= window) and new in (1, total):
        return None
    index = torch.arange(total, device=mask.device)
    distances = index[-new:, None] - index
    is_visible = (distances >= 0) if window is None else (distances >= 0) & (distances < window)
    # Padding sees itself: a row that sees nothing has no softmax.
    return ((is_visible & (mask > 0)[:, None, :]) | (distances == 0))[:, None]
