"""Names of transformers 5's state dicts, which accelerate's FSDP saves."""

from __future__ import annotations

from dataclasses import dataclass

from smtrain.core.model.blocks import Role
from smtrain.core.model.shape import ModelShape


@dataclass(frozen=True)
class ModuleTensor:
    """A tensor of a state dict: one parameter of the files, or those of all experts of a layer."""

    name: str
    parts: tuple[str, ...]
    """Parameters in files; those of experts follow one another in memory."""
    shape: tuple[int, ...]
    is_buffer: bool = False
    """Whether no optimizer updates it: the biases of routers."""

    @property
    def is_stack(self) -> bool:
        return len(self.parts) > 1

    def place(self, part: str, part_shape: tuple[int, ...]) -> tuple[int, int]:
        """The expert and the first row of a part of a stack."""
        numbers = self.parts.index(part) * part_shape[0]
        return numbers // self.shape[1], numbers % self.shape[1]


def module_tensors(shape: ModelShape) -> list[ModuleTensor]:
    """The tensors of a model, in the order of its files; a tied head is not listed."""
    names = shape.rules.experts
    renamed = {file: module for module, file in shape.rules.module_names.items()}
    parts: dict[str, list[str]] = {}
    for spec in shape.specs:
        module = renamed.get(spec.name, spec.name)
        if names is not None and spec.expert is not None:
            base, _, part = spec.name.removesuffix(".weight").rpartition(".")
            path = base.removesuffix(f"{names.path}.{spec.expert}") + names.module
            module = f"{path}.{'down_proj' if part == names.parts[2] else 'gate_up_proj'}"
        elif names is not None and names.stacked is None:
            block = names.router.removesuffix(".gate")
            module = spec.name.replace(f".{block}.", ".mlp.")
        parts.setdefault(module, []).append(spec.name)
    by_name = {spec.name: spec for spec in shape.specs}
    tensors = []
    for module, members in parts.items():
        first = by_name[members[0]]
        if first.expert is None:
            is_buffer = first.role is Role.ROUTER_BIAS
            tensors.append(ModuleTensor(module, (first.name,), first.shape, is_buffer))
            continue
        assert names is not None
        assert shape.experts is not None
        # By expert, and in one expert gate before up.
        members.sort(
            key=lambda name: (
                by_name[name].expert,
                names.parts.index(name.removesuffix(".weight").rpartition(".")[2]),
            )
        )
        rows = len(members) // shape.experts.count * first.shape[0]
        tensors.append(
            ModuleTensor(module, tuple(members), (shape.experts.count, rows, first.shape[1]))
        )
    return tensors
