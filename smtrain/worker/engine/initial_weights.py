"""Initial weights: a parameter in a weight source, or random numbers that are the same on every
engine and mesh.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from smtrain.core.errors import CheckpointError
from smtrain.core.model.layout import Layout
from smtrain.core.model.lora import AdapterShape, B
from smtrain.core.model.shape import ModelShape
from smtrain.worker.checkpoint.sources import WeightSource


class RandomWeights:
    """Values as transformers initialises them: normal matrices, norms 1, biases 0."""

    def __init__(self, config: dict[str, Any], shape: ModelShape, seed: int) -> None:
        self._config, self._shape, self._seed = config, shape, seed
        self._specs = {spec.name: spec for spec in shape.specs}
        self._last: tuple[str, torch.Tensor] | None = None

    def names(self) -> list[str]:
        return sorted(self._specs)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._specs[name].shape

    def read(
        self, name: str, dim: int | None = None, start: int = 0, stop: int | None = None
    ) -> torch.Tensor:
        """The whole tensor, or its rows/columns `start:stop` along `dim`."""
        weight = self._cached_tensor(name)
        return (
            weight
            if dim is None
            else weight.narrow(dim, start, (stop or weight.shape[dim]) - start)
        )

    def _cached_tensor(self, name: str) -> torch.Tensor:
        if self._last is None or self._last[0] != name:
            self._last = name, self._make_tensor(name)
        return self._last[1]

    def _make_tensor(self, name: str) -> torch.Tensor:
        shape = self.shape(name)
        generator = _generator(self._seed, name)
        if name.endswith(".A_log"):  # decays of a gated delta net
            # As in `_init_weights` of transformers' Qwen3-Next.
            return torch.empty(shape).uniform_(0.01, 16, generator=generator).log_()
        if len(shape) == 1:
            net = self._shape.rules.linear is not None and f".{self._shape.rules.linear}." in name
            # Without `unit_norms` (Gemma) norms multiply by 1 + weight, so weights begin at 0.
            unit = 1.0 if self._shape.rules.unit_norms or net else 0.0
            return torch.full(shape, 0.0 if name.endswith("bias") and not net else unit)
        deviation = self._config.get("initializer_range", 0.02)
        if self._shape.family == "gpt2" and name.endswith("c_proj.weight"):
            deviation /= (
                2 * self._shape.layers
            ) ** 0.5  # GPT-2 scales residual projections by the depth
        weight = torch.empty(shape).normal_(0.0, deviation, generator=generator)
        padding = self._config.get("pad_token_id")
        if (
            name == self._shape.embed_name
            and padding is not None
            and self._shape.rules.form == "llama"
        ):
            weight[padding] = 0.0
        return weight


class Zeros(RandomWeights):
    """Zeros for weights that a checkpoint replaces at once; drawing numbers for them would take
    longer.
    """

    def _make_tensor(self, name: str) -> torch.Tensor:
        return torch.zeros(()).expand(self.shape(name))


class RandomFactors:
    """The factors of a new adapter as peft initialises them: A uniform within 1 / sqrt(in), B
    zero.
    """

    def __init__(self, shape: AdapterShape, seed: int) -> None:
        self._specs, self._seed = {spec.name: spec for spec in shape.specs}, seed

    def read(
        self, name: str, dim: int | None = None, start: int = 0, stop: int | None = None
    ) -> torch.Tensor:
        """The whole factor, or its rows/columns `start:stop` along `dim`."""
        shape = self._specs[name].shape
        factor = torch.zeros(shape)
        if not name.endswith(B):
            # kaiming_uniform_(a=sqrt(5)) of peft has the bound sqrt(6 / (1 + 5) / in).
            bound = shape[-1] ** -0.5
            factor.uniform_(-bound, bound, generator=_generator(self._seed, name))
        return factor if dim is None else factor.narrow(dim, start, (stop or shape[dim]) - start)


def name_in(
    source: WeightSource | RandomWeights, names: set[str], layout: Layout, name: str
) -> str:
    """The name of a parameter in a source that has `names`.

    Raises `CheckpointError` if it is missing or has another shape.
    """
    shape = layout.shape
    stored_name = next((n for n in (name, *shape.file_aliases(name)) if n in names), None)
    if stored_name is None:
        raise CheckpointError(
            f"the weights lack {name}, which the {shape.family} model of config.json has: take"
            " weights and config.json from the same model",
            code="checkpoint.other_model",
        )
    if source.shape(stored_name) != layout.spec(name).shape:
        raise CheckpointError(
            f"{stored_name} is {list(source.shape(stored_name))} in the weights and"
            f" {list(layout.spec(name).shape)} by config.json: take weights and config.json from"
            " the same model",
            code="checkpoint.other_model",
        )
    return stored_name


def _generator(seed: int, name: str) -> torch.Generator:
    """A separate generator for each parameter, so that the mesh does not matter."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
