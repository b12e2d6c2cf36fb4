"""Experts next to the MLP of a block, with a router that scales its input (Gemma 4)."""

from __future__ import annotations

from typing import Any

import torch

from smtrain.worker.engine.native.experts import Mixture


class ExpertsNextToMlp(Mixture):
    """`Mixture` in place of a block's experts, which transformers calls with a router's choices.

    The router's module keeps its parameters and only passes its input on, in the place of the
    weights: experts choose on whole rows, which sequence parallelism cuts outside.
    """

    def __init__(self, *args: Any, block: Any) -> None:
        super().__init__(*args)
        # In a tuple, as a module in two places would have its parameters twice.
        self._scaled = (block.router,)
        block.router.forward = lambda hidden_states: (None, hidden_states, None)
        self._batch = 1
        block.register_forward_pre_hook(self._see_batch)

    @property
    def router_names(self) -> list[str]:
        return []  # the router's module has them

    def _see_batch(self, _: Any, args: tuple[Any, ...]) -> None:
        """Count the rows, which the block joins before it calls router and experts."""
        self._batch = len(args[0])

    def forward(
        self,
        hidden_states: torch.Tensor,
        top_k_index: None = None,
        top_k_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The experts' outputs for [B S, H]; `top_k_weights` is the router's input."""
        assert top_k_weights is not None
        shape = self._batch, -1, hidden_states.shape[-1]
        x, router_input = (self._enter(part.view(shape)) for part in (hidden_states, top_k_weights))
        out: torch.Tensor = self._run(x, router_input)
        return out

    def _route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        router: Any = self._scaled[0]
        logits = router.proj(router.norm(x) * router.scale * router.scalar_root_size)
        weights, expert_ids, probabilities = self._choose(logits)
        return weights * router.per_expert_scale[expert_ids], expert_ids, probabilities
