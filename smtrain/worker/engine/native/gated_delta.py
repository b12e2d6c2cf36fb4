"""Gated delta nets (the linear attention of Qwen3.5 and Qwen3-Next; Yang et al. 2024, arXiv
2412.06464) whose documents stay apart.

A layer's state and its convolution run through the whole row. Here masks stop them between
documents, so a row of any documents has the same shapes: Neuron compiles one graph, and memory does
not depend on the documents. A state is kept as in transformers' own torch form: exact sums within
chunks of 64 tokens, one matrix per head from chunk to chunk. The rule is computed again in the
backward pass, since it would keep about twenty vectors for each token and head. With context
parallelism each rank has all tokens of a part of the heads. On GPUs the kernels of
flash-linear-attention compute the convolution and the rule if they are installed.
"""

from __future__ import annotations

import importlib.util
import logging
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers.activations import ACT2FN

from smtrain.core.model.sizes import DeltaSizes
from smtrain.worker.engine.native.comm import ProcessMesh
from smtrain.worker.engine.native.context_parallel import heads_for_tokens, tokens_for_heads

log = logging.getLogger(__name__)
CHUNK = DeltaSizes.CHUNK
_TOLERANCE = 0.05  # of kernels in 16 bits; wrong ones were 0.5 apart


class RowDocuments(NamedTuple):
    """The documents of packed rows."""

    number: torch.Tensor
    """[B, S] on the device: a number for each document of a row."""
    bounds: torch.Tensor | None
    """int64 [documents + 1] on the device, if it is CUDA: the first tokens of all documents, in
    rows put end to end, and the number of all tokens.
    """


def cut_net(net: Any, tp: int) -> None:
    """Tell a net of transformers that it has only the heads of one of `tp` ranks."""
    net.num_k_heads, net.num_v_heads = net.num_k_heads // tp, net.num_v_heads // tp
    net.key_dim, net.value_dim, net.conv_dim = (
        net.key_dim // tp,
        net.value_dim // tp,
        net.conv_dim // tp,
    )


def keep_apart(net: Any, cut_over: ProcessMesh | None = None) -> None:
    """Let the attention mask of a net of transformers be `RowDocuments`, or None for rows of one
    document.

    `cut_over` is the mesh if its ranks have a part of each row.
    """

    def forward(
        hidden_states: torch.Tensor, attention_mask: RowDocuments | None = None, **_: Any
    ) -> torch.Tensor:
        return _forward(net, hidden_states, attention_mask, cut_over)

    # With gradients, torch 2.13's compiler makes a view of the rule that its strides do not allow.
    net.forward = torch.compiler.disable(forward)  # type: ignore[no-untyped-call]


@cache
def has_kernels() -> bool:
    """Whether flash-linear-attention is installed: Triton kernels for the convolution and the
    rule.
    """
    return importlib.util.find_spec("fla") is not None


class _Sizes(NamedTuple):
    """Sizes of a net, or of the heads of a rank."""

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    activation: str


def _uses_kernels(
    net: Any, qkv: torch.Tensor, taps: torch.Tensor, documents: RowDocuments | None
) -> bool:
    """Whether the kernels compute the heads: their products are of 16 bits, and no one has promised
    that they always give the same bits.
    """
    if (
        not qkv.is_cuda
        or qkv.dtype == torch.float32
        or (documents is not None and documents.bounds is None)
        or torch.are_deterministic_algorithms_enabled()
        or not has_kernels()
    ):
        return False
    sizes = _Sizes(*(getattr(net, name) for name in _Sizes._fields))
    return are_kernels_right(sizes, taps.shape[1], qkv.dtype, qkv.device)


@cache
def are_kernels_right(
    sizes: _Sizes, taps: int, dtype: torch.dtype, device: torch.device, tokens: int = 2048
) -> bool:
    """Whether the kernels give what plain torch gives for two documents, also the gradients; logs
    why not.

    Some releases of Triton compile them wrongly for some GPUs (fla-org/flash-linear-attention#640:
    gradients on Hopper; #913: NaN on Blackwell).
    """
    generator = torch.Generator(device).manual_seed(0)
    keys, values = sizes.num_k_heads * sizes.head_k_dim, sizes.num_v_heads * sizes.head_v_dim
    shapes = (
        (1, tokens, 2 * keys + values),
        (1, tokens, sizes.num_v_heads),
        (1, tokens, sizes.num_v_heads),
        (2 * keys + values, taps),
    )
    leaves = [
        torch.empty(shape, device=device, dtype=dtype).normal_(generator=generator).requires_grad_()
        for shape in shapes
    ]
    params = _Heads(*torch.zeros(2, sizes.num_v_heads, device=device))
    bounds = torch.tensor([0, tokens // 3, tokens], device=device)
    number = (torch.arange(tokens, device=device) >= tokens // 3).int()[None]
    answers = []
    try:
        with torch.enable_grad():
            for rule, documents in ((_heads_of_torch, number), (_heads_of_fla, bounds)):
                qkv, b, a, weight = leaves
                out = rule(sizes, qkv, b, a, weight, params, documents).float()
                answers.append(
                    [out, *torch.autograd.grad((out * out.detach().cos()).sum(), leaves)]
                )
        differences = [
            (fast - plain).detach().float().norm() / plain.detach().float().norm()
            for plain, fast in zip(*answers, strict=True)
        ]
        error = float(torch.stack(differences).max())  # NaN if one is
        reason = "" if error < _TOLERANCE else f"they are {error:.2g} apart from plain torch"
    except Exception as failure:  # whatever a compiler of kernels raises
        reason = f"{type(failure).__name__}: {' '.join(str(failure).split())}"
    if reason:
        log.warning(
            "gated delta nets are computed in plain torch, as flash-linear-attention's kernels fail "
            "on this machine: %s",
            reason,
        )
    return not reason


def _forward(
    net: Any, x: torch.Tensor, documents: RowDocuments | None, mesh: ProcessMesh | None
) -> torch.Tensor:
    qkv, z, b, a = _project(net, x)
    sizes = [net.key_dim, net.key_dim, net.value_dim]
    taps, head_params = net.conv1d.weight.squeeze(1), _Heads(net.A_log, net.dt_bias)
    if mesh is not None:
        heads = b.shape[2] // mesh.cp
        all_tokens = tokens_for_heads([*torch.split(qkv, sizes, 2), b, a], mesh)
        qkv, b, a = torch.split(all_tokens, [all_tokens.shape[2] - 2 * heads, heads, heads], 2)
        # q, k and v are cut by heads one after the other, so the taps of their channels are cut
        # likewise.
        taps = torch.cat(
            [part_taps.chunk(mesh.cp)[mesh.cp_rank] for part_taps in torch.split(taps, sizes)]
        )
        head_params = _Heads(*(x.chunk(mesh.cp)[mesh.cp_rank] for x in head_params))
    # Only these are kept for the backward pass.
    y: torch.Tensor = checkpoint(
        _heads_forward,
        net,
        qkv,
        b,
        a,
        taps,
        head_params,
        documents,
        use_reentrant=False,
        preserve_rng_state=False,
    )
    if mesh is not None:
        y = heads_for_tokens(y.flatten(2), mesh)
    return _output(net, x, y, z)


def _project(
    net: Any, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """q, k and v [B, S, C], the gates z of the values, b and a [B, S, heads]; z is None if
    `_output` computes it.
    """
    if hasattr(net, "in_proj_qkv"):
        return net.in_proj_qkv(x), None, net.in_proj_b(x), net.in_proj_a(x)
    # Rows of Qwen3-Next's products are in groups by key head.
    *qkv, z, b, a = net.fix_query_key_value_ordering(net.in_proj_qkvz(x), net.in_proj_ba(x))
    return torch.cat([part.flatten(2) for part in qkv], 2), z, b, a


def _output(net: Any, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor | None) -> torch.Tensor:
    """The net's output, from its input, from that of its heads, and from their gates."""
    z = (net.in_proj_z(x) if z is None else z).reshape(-1, net.head_v_dim)
    out: torch.Tensor = net.out_proj(
        net.norm(y.reshape(-1, net.head_v_dim), z).reshape(*x.shape[:2], -1)
    )
    return out


class _Heads(NamedTuple):
    """Numbers of the value heads of a net, or of a part of them."""

    a_log: torch.Tensor
    dt_bias: torch.Tensor


def _heads_forward(
    net: Any,
    qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    taps: torch.Tensor,
    head_params: _Heads,
    documents: RowDocuments | None,
) -> torch.Tensor:
    """Outputs [B, S, heads, D] of the heads in `qkv` before their norm; `taps` [C, taps] and
    `head_params` are theirs.
    """
    if _uses_kernels(net, qkv, taps, documents):
        bounds = None if documents is None else documents.bounds
        return _heads_of_fla(net, qkv, b, a, taps, head_params, bounds)
    number = None if documents is None else documents.number
    return _heads_of_torch(net, qkv, b, a, taps, head_params, number)


def _heads_of_torch(
    net: Any,
    qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    taps: torch.Tensor,
    head_params: _Heads,
    number: torch.Tensor | None,
) -> torch.Tensor:
    """`_heads_forward` in plain torch."""
    conv_out = _causal_conv(qkv, taps, number)
    return _rows(delta_rule(*_rule_inputs(net, conv_out, b, a, head_params), number), qkv.dtype)


_Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class NetState(NamedTuple):
    """A net's memory of the tokens before."""

    tail: torch.Tensor
    """[B, taps - 1, C]: the last inputs of the convolution."""
    state: torch.Tensor
    """fp32 [B, heads, K, D]."""


def with_state(
    net: Any, x: torch.Tensor, number: torch.Tensor | None, previous: NetState | None
) -> tuple[torch.Tensor, NetState]:
    """Run a net on the first tokens [B, S] of texts, of which `number` is -1 on padding, or on the
    next one of each.
    """
    qkv, z, b, a = _project(net, x)
    taps = net.conv1d.weight.squeeze(1)
    tail_length, heads = taps.shape[1] - 1, _Heads(net.A_log, net.dt_bias)
    if previous is not None:
        window = torch.cat([previous.tail, qkv], 1)
        y, state = _next(
            *_rule_inputs(net, (window * taps.T).sum(1, keepdim=True), b, a, heads), previous.state
        )
        return _output(net, x, _rows(y, qkv.dtype), z), NetState(window[:, 1:], state)
    padding = (
        -x.shape[1] % CHUNK
    )  # padding comes first: the state after the last chunk is that of the last token
    inputs = _rule_inputs(net, _causal_conv(qkv, taps, number), b, a, heads)
    q, k, v, decay, beta = (_pad(tensor, 2, first=padding) for tensor in inputs)
    masked_qkv = qkv if number is None else qkv * (number >= 0)[..., None].to(qkv.dtype)
    if number is None:
        number = torch.zeros(1, x.shape[1], dtype=torch.int32, device=x.device)
    y, state = _delta_rule_with_state(q, k, v, decay, beta, _pad(number, 1, -1, first=padding))
    tail = (
        _pad(masked_qkv, 1, first=tail_length)[:, -tail_length:]
        if tail_length
        else masked_qkv[:, :0]
    )
    return _output(net, x, _rows(y[:, :, padding:], qkv.dtype), z), NetState(tail, state)


def _next(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`_delta_rule_with_state` of one more token."""
    state = state * decay[..., None].exp()
    state = state + k.transpose(-1, -2) @ ((v - k @ state) * beta[..., None])
    return q * q.shape[-1] ** -0.5 @ state, state


def _rows(heads: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[B, S, heads, D] of [B, heads, S, D]."""
    return heads.transpose(1, 2).to(dtype, memory_format=torch.contiguous_format)


def _rule_inputs(
    net: Any, qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, head_params: _Heads
) -> _Inputs:
    """q, k, v, decay and beta of `delta_rule`, from the output of the convolution; `head_params`
    are those of the heads in it.
    """
    q, k, v = _split_heads(net, ACT2FN[net.activation](qkv), b.shape[2])
    times = net.num_v_heads // net.num_k_heads  # each key head serves some neighbours
    q, k = (x[:, :, :, None].expand(-1, -1, -1, times, -1).flatten(2, 3) for x in (q, k))
    q, k, v = (x.transpose(1, 2).float() for x in (q, k, v))
    beta = b.sigmoid().float().transpose(1, 2)
    return _unit(q), _unit(k), v, _decay(a, head_params).transpose(1, 2), beta


def _heads_of_fla(
    net: Any,
    qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    taps: torch.Tensor,
    head_params: _Heads,
    bounds: torch.Tensor | None,
) -> torch.Tensor:
    """`_heads_forward` by the kernels of flash-linear-attention, which know documents of one long
    row only.
    """
    from fla.modules.causal_conv1d import causal_conv1d
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    rows, is_silu = qkv.shape[:2], net.activation in ("silu", "swish")
    inputs = [qkv, _decay(a, head_params), b.sigmoid()]
    if bounds is not None:
        inputs = [x.flatten(0, 1)[None] for x in inputs]
    qkv, decay, beta = inputs
    conv_out, _ = causal_conv1d(
        qkv, taps, activation="silu" if is_silu else None, cu_seqlens=bounds
    )
    activations = conv_out if is_silu else ACT2FN[net.activation](conv_out)
    q, k, v = _split_heads(net, activations, b.shape[2])
    out, _ = chunk_gated_delta_rule(
        q, k, v, decay, beta, cu_seqlens=bounds, use_qk_l2norm_in_kernel=True
    )
    heads: torch.Tensor = out.view(*rows, *out.shape[2:])
    return heads


def _split_heads(net: Any, activations: torch.Tensor, heads: int) -> list[torch.Tensor]:
    """q and k [B, S, key heads, K] and v [B, S, heads, D]."""
    values = heads * net.head_v_dim
    keys = (activations.shape[2] - values) // 2
    parts = torch.split(activations, [keys, keys, values], -1)
    sizes = (net.head_k_dim, net.head_k_dim, net.head_v_dim)
    return [
        part.reshape(*part.shape[:2], -1, size) for part, size in zip(parts, sizes, strict=True)
    ]


def _decay(a: torch.Tensor, head_params: _Heads) -> torch.Tensor:
    """The logarithm of the decay of each token and head, in fp32."""
    return -head_params.a_log.float().exp() * F.softplus(a.float() + head_params.dt_bias)


def _unit(x: torch.Tensor) -> torch.Tensor:
    # 1e-6 inside the root, as transformers' `l2norm` of these models has it.
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _causal_conv(
    x: torch.Tensor, weight: torch.Tensor, number: torch.Tensor | None
) -> torch.Tensor:
    """Sum `x` [B, S, C] and the tokens before it of its document, times `weight` [C, taps], whose
    last is its own.
    """
    length, (last_tap, *earlier_taps) = x.shape[1], reversed(weight.unbind(1))
    out = x * last_tap
    for distance, tap in enumerate(earlier_taps[: length - 1], start=1):
        earlier = _pad(_first(x, length - distance, 1), 1, first=distance)
        if number is not None:
            same_document = _pad(number[:, : length - distance], 1, -1, first=distance) == number
            earlier = earlier * same_document[..., None].to(x.dtype)
        out = out + earlier * tap
    return out


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    number: torch.Tensor | None = None,
) -> torch.Tensor:
    """Read a state with queries while it decays and learns v for k at the rate beta; returns [B,
    heads, S, D].

    All in fp32: q and k are [B, heads, S, K] of length 1, v is [B, heads, S, D]; `decay` (its
    logarithm, at most 0) and `beta` are [B, heads, S]. The state is emptied when `number` [B, S]
    changes.
    """
    return _delta_rule_with_state(q, k, v, decay, beta, number)[0]


def _delta_rule_with_state(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    number: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`delta_rule`, and the state [B, heads, K, D] after the last chunk."""
    batch, heads, length, _ = v.shape
    padding = -length % CHUNK
    if number is None:
        number = torch.zeros(1, length, dtype=torch.int32, device=v.device)
    q, k, v, decay, beta = (
        _chunks(_pad(x, 2, last=padding))
        for x in (q * q.shape[-1] ** -0.5, k, v, decay[..., None], beta[..., None])
    )
    number = _chunks(
        _pad(number[:, None, :, None], 2, -1, last=padding)
    )  # [B, 1, chunks, CHUNK, 1]
    # -1 numbers padding, and -2 stands before the first chunk: they equal no document and not each
    # other, so no token reads a state that is not its own.
    last = number[..., -1:, :]
    previous_last = _pad(last[:, :, :-1], 2, -2, first=1)  # the last document of the chunk before
    index = torch.arange(CHUNK, dtype=torch.int32, device=v.device)
    is_visible = (number == number.transpose(-1, -2)) & (index[:, None] >= index)
    total = (
        is_visible.float() @ decay
    )  # from the document's or the chunk's beginning; Neuron has no kernel for cumsum
    end = torch.split(total, [CHUNK - 1, 1], -2)[1]
    # Exponents of unseen pairs may be large and positive: masked before exp they are 0, masked
    # after it infinity times 0 would be NaN.
    between = (total - total.transpose(-1, -2)).masked_fill(~is_visible, -torch.inf).exp()
    # Decay of the state of earlier chunks at each token of the document that runs on from them.
    entering = torch.where(number == previous_last, total, -torch.inf).exp()
    # Decay of each token up to the chunk's end, if its document reaches the end.
    leaving = torch.where(number == last, end - total, -torch.inf).exp()
    # Decay of a state over the whole chunk; 0 if another document has begun.
    through = torch.where(last == previous_last, end, -torch.inf).exp()

    # A token's new value lacks what earlier tokens of its chunk have written for its key. This is a
    # triangular system in all values of the chunk (the WY form of Yang et al. 2024).
    inverse = _inverse_by_solver if v.is_cuda else _inverse
    system = inverse((k * beta @ k.transpose(-1, -2)) * between)
    values, keys = system @ (v * beta), system @ (k * beta * entering)
    scores, q, k = (
        (q @ k.transpose(-1, -2)) * between,
        q * entering,
        (k * leaving).transpose(-1, -2),
    )
    state = v.new_zeros(batch * heads, k.shape[-2], v.shape[-1])
    states, deltas = [], []
    # Few operations a chunk: a GPU waits for their launches.
    for values_, keys_, k_, through_ in zip(
        *(x.flatten(0, 1).unbind(1) for x in (values, keys, k, through)), strict=True
    ):
        states.append(state)
        # The delta: values to write, less those that the state holds for the same keys.
        delta = _add_product(values_, keys_, state, -1)
        state = _add_product(state * through_, k_, delta)
        deltas.append(delta)
    state_before, delta = (
        torch.stack(x, 1).reshape(batch, heads, len(x), *x[0].shape[1:]) for x in (states, deltas)
    )
    out = q @ state_before + scores @ delta
    return _first(out.flatten(2, 3), length, 2), state.reshape(batch, heads, *state.shape[1:])


def _add_product(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, sign: int = 1) -> torch.Tensor:
    """`x + sign * a @ b` [B, N, D], in one kernel if the device has one for it."""
    if x.device.type in ("cpu", "cuda"):
        return torch.baddbmm(x, a, b, alpha=sign)
    return x + a @ b if sign > 0 else x - a @ b


def _first(x: torch.Tensor, count: int, dim: int) -> torch.Tensor:
    """The first numbers along a dimension; a slice's gradient is written into a slice, which Neuron
    cannot.
    """
    return torch.split(x, [count, x.shape[dim] - count], dim)[0]


def _pad(x: torch.Tensor, dim: int, value: int = 0, first: int = 0, last: int = 0) -> torch.Tensor:
    """`x` with `value` before and behind it; F.pad writes into a slice."""
    sizes = ((*x.shape[:dim], n, *x.shape[dim + 1 :]) for n in (first, last))
    leading, behind = (x.new_full(size, value) for size in sizes)
    return torch.cat([leading, x, behind], dim) if first or last else x


def _chunks(x: torch.Tensor) -> torch.Tensor:
    """[B, heads, chunks, CHUNK, D] of [B, heads, S, D]."""
    return x.reshape(*x.shape[:2], -1, CHUNK, x.shape[-1])


def _inverse(x: torch.Tensor) -> torch.Tensor:
    """The inverse of 1 + what is below the diagonal of `x` [..., CHUNK, CHUNK].

    By halves, as Neuron has no triangular solver: blocks of 1, 2, 4... on the diagonal are
    inverted, and [[A, 0], [C, B]] has the inverse [[A', 0], [-B' C A', B']].
    """
    size = x.shape[-1]
    inverse, width = torch.ones(*x.shape[:-2], size, 1, 1, dtype=x.dtype, device=x.device), 1
    while width < size:
        pairs = size // width // 2
        lower = (
            x.reshape(*x.shape[:-2], pairs, 2, width, pairs, 2, width).unbind(-5)[1].unbind(-2)[0]
        )
        diagonal = torch.eye(pairs, dtype=x.dtype, device=x.device)[:, None, :, None]
        lower_blocks = (lower * diagonal).sum(-2)
        a, b = inverse.reshape(*inverse.shape[:-3], pairs, 2, width, width).unbind(-3)
        top = torch.cat([a, torch.zeros_like(a)], -1)
        inverse = torch.cat([top, torch.cat([-(b @ lower_blocks @ a), b], -1)], -2)
        width *= 2
    return inverse.squeeze(-3)


def _inverse_by_solver(x: torch.Tensor) -> torch.Tensor:
    """`_inverse` in one kernel."""
    identity = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    inverse: torch.Tensor = torch.linalg.solve_triangular(
        x, identity, upper=False, unitriangular=True
    )
    return inverse
