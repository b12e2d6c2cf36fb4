"""Map each Hugging Face parameter to its slices on (tp, pp) ranks; pure data, no torch.

Engines, checkpoints, converters and the planner all use it. The slices agree with those of
neuronx-distributed: rows by vocabulary, heads and intermediate units in contiguous blocks;
contiguous pipeline blocks whose remainder goes to the last stages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate, pairwise
from math import prod
from typing import Literal, Protocol

from smtrain.core.errors import ConfigError
from smtrain.core.model.blocks import Role, Spec
from smtrain.core.model.shape import LAYER, ModelShape
from smtrain.core.model.sizes import DeltaSizes

KvOrder = Literal["grouped", "tiled"]
_DEGREE = re.compile(r"\b(tp|pp|ep) = \d+ (?=does not divide|is more than)")


def with_values(
    faults: Iterable[str], shape: ModelShape, faults_of: Callable[[int, int, int], Sequence[str]]
) -> list[str]:
    """Add to each fault of a mesh the values of its degree that divide the model, by `faults_of(tp,
    pp, ep)`.
    """
    fitting = {
        "tp": [n for n in range(1, shape.heads + 1) if not faults_of(n, 1, 1)],
        "pp": [n for n in range(1, shape.layers + 1) if not faults_of(1, n, 1)],
        "ep": [
            n
            for n in range(1, (shape.experts.count if shape.experts else 1) + 1)
            if not faults_of(1, 1, n)
        ],
    }

    def add_values(fault: str) -> str:
        match = _DEGREE.search(fault)
        if match is None:
            return fault
        *leading_values, last = map(str, fitting[match[1]])
        values = (
            f"1 to {last}"
            if match[1] == "pp"
            else f"{', '.join(leading_values)} or {last}"
            if leading_values
            else last
        )
        return f"{fault}; {match[1]} = {values} would do"

    return [add_values(fault) for fault in faults]


@dataclass(frozen=True)
class Shard:
    """One tensor-parallel rank's part of one parameter.

    `dim` None means the whole tensor. Else the part is the concatenation of `ranges` (start, stop)
    along `dim`, in this order, padded with zeros to `size`.
    """

    dim: int | None = None
    ranges: tuple[tuple[int, int], ...] = ()
    size: int = 0
    copies: int = 1
    """Number of copies of each element in the tensor-parallel group."""
    partial: bool = False
    """Whole on each rank, whose gradient is only its share: that of its heads, or of its part of a
    linear. The engine must sum these.
    """


@dataclass(frozen=True)
class FlatTable:
    """Offsets of the parameters in the flat buffer of a (tp, pp) rank; the same on all tp ranks of
    a stage.
    """

    entries: tuple[tuple[str, int, int], ...]
    """(name, start, numel); parameters with weight decay come first."""
    decay_end: int
    """End of the parameters with weight decay: those of two or more dimensions."""
    size: int


class Sharding(Protocol):
    """The part of a layout that writers need."""

    def shard(self, name: str, tp_rank: int) -> Shard: ...


class Layout:
    """The layout of one model over `tp` tensor-parallel and `pp` pipeline ranks.

    KV heads are held `kv_multiplier` times (default: as often as tp needs, once if tp divides
    them). Slot j of the resulting heads x multiplier slots is head `j // m` with order `grouped`
    (K0 K0 K1 K1; queries stay in natural order; the native engine, and NxD on trn2), and head `j %
    heads` with `tiled` (K0 K1 K0 K1; queries follow their key; NxD on trn1). `cuts` name the last
    layer of every stage but the last one, as NxD's pipeline_cuts do.

    Each of `ep` expert-parallel ranks has a block of experts of every layer, and all other
    parameters; `tp` cuts each expert too.

    Raises `ConfigError` with all reasons why the model cannot be divided so.
    """

    def __init__(
        self,
        shape: ModelShape,
        tp: int = 1,
        pp: int = 1,
        kv_order: KvOrder = "grouped",
        cuts: Sequence[int] | None = None,
        kv_multiplier: int | None = None,
        ep: int = 1,
    ) -> None:
        if faults := with_values(shape.mesh_faults(tp, pp, ep), shape, shape.mesh_faults):
            raise ConfigError(faults, code="config.combination")
        self.shape, self.tp, self.pp, self.ep, self.kv_order = shape, tp, pp, ep, kv_order
        self._multiplier = kv_multiplier
        for kv_heads in dict.fromkeys(kind.kv_heads for kind in shape.kinds):
            group, times = shape.heads // kv_heads, self.copies(kv_heads)
            if kv_heads * times % tp or group % times:
                raise ConfigError(
                    f"kv_multiplier = {times} does not fit: {kv_heads} key/value heads times it"
                    f" must be a multiple of tp = {tp}, and it must divide the {group} queries of a"
                    " head",
                    code="config.combination",
                )
        self._starts = _stage_starts(shape.layers, pp, cuts)
        self.uneven = uneven(shape.layers, pp, cuts)
        """`cuts` if they are not those of a layout without them."""

    def spec(self, name: str) -> Spec:
        return self._specs[name]

    def stages(self, name: str) -> tuple[int, ...]:
        """The pipeline ranks that hold parameter `name`; first and last for a tied embedding, else
        one.
        """
        if m := LAYER.search(name):
            layer = int(m[1])
            return (next(p for p in range(self.pp) if layer in self.layers(p)),)
        if name == self.shape.embed_name:
            return (0, self.pp - 1) if self.shape.tied and self.pp > 1 else (0,)
        if name == self.shape.positions_name:
            return (0,)
        return (self.pp - 1,)

    def layers(self, pp_rank: int) -> range:
        """Indices of the decoder layers of a stage."""
        return range(self._starts[pp_rank], self._starts[pp_rank + 1])

    def names(self, pp_rank: int) -> list[str]:
        """The parameters that a stage holds, those of all experts included, in the model's
        order.
        """
        return [s.name for s in self.shape.specs if pp_rank in self.stages(s.name)]

    def experts(self, ep_rank: int) -> range:
        """The experts of each layer that an expert-parallel rank holds."""
        count = 0 if self.shape.experts is None else self.shape.experts.count // self.ep
        return range(ep_rank * count, (ep_rank + 1) * count)

    def expert_ranks(self, name: str) -> range:
        """The expert-parallel ranks that hold a part of `name`."""
        expert = self.spec(name).expert
        if expert is None:
            return range(self.ep)
        owner = expert // len(self.experts(0))
        return range(owner, owner + 1)

    @property
    def kv_multiplier(self) -> int:
        """Copies of each key/value head, if all layers have as many heads."""
        return self.copies(self.shape.kv_heads)

    def copies(self, kv_heads: int) -> int:
        """Copies of each key/value head of a layer that has `kv_heads`."""
        return self._multiplier or max(1, self.tp // kv_heads)

    def kv_slots(self, tp_rank: int, kv_heads: int | None = None) -> tuple[tuple[int, int], ...]:
        """The (key/value head, copy) pairs that a rank holds, in its local order; `kv_heads` if
        layers differ.
        """
        kv = kv_heads or self.shape.kv_heads
        m = self.copies(kv)
        per = kv * m // self.tp
        slots = range(tp_rank * per, (tp_rank + 1) * per)
        return tuple(
            (j // m, j % m) if self.kv_order == "grouped" else (j % kv, j // kv) for j in slots
        )

    def query_heads(self, tp_rank: int, kv_heads: int | None = None) -> tuple[int, ...]:
        """The query heads of a rank, in its local order: those of each of its key/value slots."""
        kv = kv_heads or self.shape.kv_heads
        group = self.shape.heads // kv
        part = group // self.copies(kv)
        return tuple(
            h * group + c * part + i for h, c in self.kv_slots(tp_rank, kv) for i in range(part)
        )

    def kv_groups(self, kv_heads: int | None = None) -> tuple[tuple[int, ...], ...]:
        """Sets of tensor-parallel ranks that hold copies of the same key/value heads; singletons
        without copies.
        """
        ranks_by_heads: dict[frozenset[int], list[int]] = {}
        for t in range(self.tp):
            ranks_by_heads.setdefault(
                frozenset(h for h, _ in self.kv_slots(t, kv_heads)), []
            ).append(t)
        return tuple(tuple(ranks) for ranks in ranks_by_heads.values())

    def kind(self, name: str) -> ModelShape:
        """The shape of the layer that has parameter `name`; of the whole model if none has."""
        m = LAYER.search(name)
        return self.shape.by_layer[int(m[1])] if m else self.shape

    def shard(self, name: str, tp_rank: int) -> Shard:
        """The part of `name` on a tensor-parallel rank, the same on each of its stages."""
        spec = self.spec(name)
        shard = self._shard(spec.role, tp_rank, self.kind(name))
        return (
            replace(shard, dim=1 - shard.dim)
            if spec.is_transposed and shard.dim is not None
            else shard
        )

    def local_shape(self, name: str, tp_rank: int) -> tuple[int, ...]:
        shard = self.shard(name, tp_rank)
        spec = self.spec(name)
        full_shape = (spec.shape[0] // self.ep, *spec.shape[1:]) if spec.is_stacked else spec.shape
        return tuple(shard.size if i == shard.dim else n for i, n in enumerate(full_shape))

    def flat_table(
        self,
        pp_rank: int,
        ep_rank: int | None = None,
        excluded_names: Collection[str] = frozenset(),
    ) -> FlatTable:
        """The flat buffer of a rank of a stage: matrices first, as only they have weight decay.

        With `ep` above 1 there are two: that of everything but experts, the same for all
        expert-parallel ranks, and with `ep_rank` that of this rank's experts. It leaves out the
        parameters `excluded_names`, and the biases of routers.
        """
        specs = (
            spec
            for name in self.names(pp_rank)
            if name not in excluded_names and (spec := self.spec(name)).role is not Role.ROUTER_BIAS
        )
        if self.ep > 1:
            specs = (
                s
                for s in specs
                if s.of_experts == (ep_rank is not None)
                and (ep_rank or 0) in self.expert_ranks(s.name)
            )
        entries, at, decay_end = [], 0, 0
        for spec in sorted(specs, key=lambda s: not s.is_matrix):
            size = prod(self.local_shape(spec.name, 0))
            entries.append((spec.name, at, size))
            at += size
            decay_end = at if spec.is_matrix else decay_end
        return FlatTable(tuple(entries), decay_end, at)

    @cached_property
    def _specs(self) -> dict[str, Spec]:
        return {s.name: s for s in self.shape.specs}

    @cache  # noqa: B019 - a layout is small, and lives as long as its engine
    def _shard(self, role: Role, t: int, s: ModelShape) -> Shard:
        if role in (Role.WHOLE, Role.CONSTANT, Role.ROUTER_BIAS):
            return Shard(copies=self.tp)
        if role in (Role.HEAD_NORM, Role.FACTOR, Role.EXPERTS_SUM, Role.LATENT):
            return Shard(copies=self.tp, partial=self.tp > 1)
        if role is Role.VOCAB:
            size = -(-s.vocab // self.tp)
            start, stop = min(t * size, s.vocab), min((t + 1) * size, s.vocab)
            return Shard(0, ((start, stop),), size)
        if role is Role.COLUMN or role is Role.ROW:
            return _units(0 if role is Role.COLUMN else 1, [t], s.intermediate // self.tp)
        if s.experts is not None and role in _EXPERTS:
            dim, multiplier = _EXPERTS[role]
            return _units(dim, [t], multiplier * s.experts.width // self.tp)
        if s.experts is not None and role in (Role.SHARED_COLUMN, Role.SHARED_ROW):
            dim = 0 if role is Role.SHARED_COLUMN else 1
            return _units(dim, [t], s.experts.shared // self.tp)
        if s.experts is not None and role is Role.EXPERTS_GATE_UP:
            return _units(1, [t, self.tp + t], s.experts.width // self.tp)
        if role is Role.GATE_UP:
            return _units(0, [t, self.tp + t], s.intermediate // self.tp)
        if role is Role.QKV_BLOCKS:
            kv = [h for h, _ in self.kv_slots(t, s.kv_heads)]
            head_blocks = (
                self.query_heads(t, s.kv_heads),
                (s.heads + h for h in kv),
                (s.heads + s.kv_heads + h for h in kv),
            )
            return _units(0, [head for block in head_blocks for head in block], s.head_dim)
        if role is Role.QKV:
            return _units(0, [t], s.heads // self.tp * 3 * s.head_dim)
        if role is Role.THIRDS:
            heads = s.heads // self.tp
            return _units(0, [i * self.tp + t for i in range(3)], heads * s.head_dim)
        if s.delta is not None and role in _DELTA:
            return self._delta_shard(role, t, s.delta)
        if role is Role.Q_GATE:
            return _units(0, self.query_heads(t), 2 * s.head_dim)
        if role is Role.SINK:
            return _units(0, self.query_heads(t, s.kv_heads), 1)
        if role in (Role.KV, Role.K_NORM):
            return _units(
                0, [h for h, _ in self.kv_slots(t, s.kv_heads)], s.head_dim, self.copies(s.kv_heads)
            )
        if role is Role.LATENT_KV and s.latent is not None:
            return _units(0, self.query_heads(t), s.latent.nope_dim + s.latent.value_dim)
        if role is Role.O:
            return _units(1, self.query_heads(t, s.kv_heads), s.value_dim)
        return _units(0, self.query_heads(t, s.kv_heads), s.head_dim)

    def _delta_shard(self, role: Role, t: int, d: DeltaSizes) -> Shard:
        """A part of a gated delta net: key heads t, t + 1... with their value heads."""
        if role is not Role.DELTA_QKV:
            rows = {
                Role.DELTA_HEADS: d.value_heads,
                Role.DELTA_BA: 2 * d.value_heads,
                Role.DELTA_QKVZ: 2 * (d.keys + d.values),
            }
            width = rows.get(role, d.values) // self.tp
            return _units(1 if role is Role.DELTA_COLUMNS else 0, [t], width)
        key, value = d.keys // self.tp, d.values // self.tp
        starts = ((t * key, key), (d.keys + t * key, key), (2 * d.keys + t * value, value))
        return _join_ranges(0, [(start, start + width) for start, width in starts])


_EXPERTS = {
    Role.EXPERT_COLUMN: (0, 1),
    Role.EXPERT_ROW: (1, 1),
    Role.EXPERTS_PAIRS: (2, 2),
    Role.EXPERTS_PAIRS_BIAS: (1, 2),
    Role.EXPERTS_ROW: (1, 1),
    Role.EXPERTS_COLUMNS: (2, 1),
}
"""The dimension that tensor parallelism cuts, and its rows or columns for each intermediate unit of
an expert.
"""
_DELTA = (
    *(Role.DELTA_QKV, Role.DELTA_ROWS, Role.DELTA_HEADS, Role.DELTA_COLUMNS),
    *(Role.DELTA_QKVZ, Role.DELTA_BA),
)


def _stage_starts(layers: int, pp: int, cuts: Sequence[int] | None) -> tuple[int, ...]:
    if cuts is None:
        base_size, extra = divmod(layers, pp)
        sizes = [base_size + (p >= pp - extra) for p in range(pp)]
        return tuple(sum(sizes[:p]) for p in range(pp + 1))
    starts = (0, *(c + 1 for c in cuts), layers)
    if len(starts) != pp + 1 or any(a >= b for a, b in pairwise(starts)):
        raise ConfigError(
            f"pipeline cuts {list(cuts)} must be {pp - 1} rising layer numbers below {layers - 1}"
            f" for pp = {pp}",
            code="config.combination",
        )
    return starts


def cuts_of(layers_per_stage: Sequence[int]) -> tuple[int, ...]:
    """The last layer of every stage but the last, of stages with these numbers of layers."""
    return tuple(end - 1 for end in accumulate(layers_per_stage[:-1]))


def uneven(layers: int, pp: int, cuts: Sequence[int] | None) -> tuple[int, ...]:
    """`cuts`, or nothing if even stages have them too."""
    starts = _stage_starts(layers, pp, cuts or None)
    return () if starts == _stage_starts(layers, pp, None) else tuple(cuts or ())


def _units(dim: int, units: Sequence[int], width: int, copies: int = 1) -> Shard:
    """A shard made of `units` of `width` rows or columns each."""
    return _join_ranges(dim, [(u * width, (u + 1) * width) for u in units], copies)


def _join_ranges(dim: int, parts: Sequence[tuple[int, int]], copies: int = 1) -> Shard:
    """A shard of rows or columns (start, stop), neighbours joined into one range."""
    ranges: list[tuple[int, int]] = []
    for start, stop in parts:
        if ranges and ranges[-1][1] == start:
            ranges[-1] = (ranges[-1][0], stop)
        else:
            ranges.append((start, stop))
    return Shard(dim, tuple(ranges), sum(stop - start for start, stop in parts), copies)
