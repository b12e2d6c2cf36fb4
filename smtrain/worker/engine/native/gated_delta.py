"""Gated delta nets (the linear attention of Qwen3.5 and Qwen3-Next; Yang et al. 2024, arXiv
2412.06464) whose documents stay apart.

A layer's state and its convolution run through the whole row. Here masks stop them between
documents, so a row of any documents has the same shapes: Neuron compiles one graph, and memory does
not depend on the documents. A state is kept as in transformers' own torch form: exact sums within
chunks of 64 tokens, one matrix per head from chunk to chunk. The rule is computed again in the
backward pass, since it would keep about twenty vectors for each token and head. With context
parallelism each rank has all tokens of a part of the heads. On GPUs the kernels of
flash-linear-attention compute the rule if they are installed.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers.activations import ACT2FN

from smtrain.core.model.sizes import DeltaSizes
from smtrain.worker.engine.native.comm import ProcessMesh
from smtrain.worker.engine.native.context_parallel import heads_for_tokens, tokens_for_heads

CHUNK = DeltaSizes.CHUNK


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
    """Whether flash-linear-attention, whose Triton kernels compute the rule on GPUs, is
    installed.
    """
    return importlib.util.find_spec("fla") is not None


def _uses_kernels(x: torch.Tensor, documents: RowDocuments | None) -> bool:
    """Whether the kernels compute the rule: their products are of 16 bits, and no one has promised
    that they always give the same bits.
    """
    return (
        x.is_cuda
        and x.dtype != torch.float32
        and (documents is None or documents.bounds is not None)
        and not torch.are_deterministic_algorithms_enabled()
        and has_kernels()
    )


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
    number = None if documents is None else documents.number
    conv_out = _causal_conv(qkv, taps, number)
    if _uses_kernels(conv_out, documents):
        bounds = None if documents is None else documents.bounds
        return _rule_of_fla(net, conv_out, b, a, head_params, bounds)
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
    q, k, v = (
        x.transpose(1, 2).float()
        for x in _split_heads(net, ACT2FN[net.activation](qkv), b.shape[2])
    )
    beta = b.sigmoid().float().transpose(1, 2)
    return _unit(q), _unit(k), v, _decay(a, head_params).transpose(1, 2), beta


def _rule_of_fla(
    net: Any,
    qkv: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    head_params: _Heads,
    bounds: torch.Tensor | None,
) -> torch.Tensor:
    """`delta_rule` of `_rule_inputs` by the kernels of flash-linear-attention, as [B, S, heads, D].

    The kernels know documents of one long row only.
    """
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    q, k, v = _split_heads(net, ACT2FN[net.activation](qkv), b.shape[2])
    inputs = [q, k, v, _decay(a, head_params), b.sigmoid()]
    if bounds is not None:
        inputs = [x.flatten(0, 1)[None] for x in inputs]
    rows, _ = chunk_gated_delta_rule(*inputs, cu_seqlens=bounds, use_qk_l2norm_in_kernel=True)
    out: torch.Tensor = rows.view(*qkv.shape[:2], b.shape[2], net.head_v_dim)
    return out


def _split_heads(net: Any, activations: torch.Tensor, heads: int) -> tuple[torch.Tensor, ...]:
    """q and k [B, S, heads, K] and v [B, S, heads, D]; each key head serves some neighbours."""
    times, values = net.num_v_heads // net.num_k_heads, heads * net.head_v_dim
    keys = (activations.shape[2] - values) // 2
    parts = torch.split(activations, [keys, keys, values], -1)
    sizes = ((times, net.head_k_dim), (times, net.head_k_dim), (1, net.head_v_dim))
    return tuple(
        x.reshape(*x.shape[:2], -1, 1, size).expand(-1, -1, -1, repeats, -1).flatten(2, 3)
        for x, (repeats, size) in zip(parts, sizes, strict=True)
    )


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
    length = v.shape[2]
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
    system = _inverse((k * beta @ k.transpose(-1, -2)) * between)
    values, keys = system @ (v * beta), system @ (k * beta * entering)
    scores, q, k = (
        (q @ k.transpose(-1, -2)) * between,
        q * entering,
        (k * leaving).transpose(-1, -2),
    )
    state, out = v.new_zeros(*v.shape[:2], k.shape[-2], v.shape[-1]), []
    chunks = (x.unbind(2) for x in (q, k, scores, values, keys, through))
    for q_, k_, scores_, values_, keys_, through_ in zip(*chunks, strict=True):
        # The delta: values to write, less those that the state holds for the same keys.
        new = values_ - keys_ @ state
        out.append(q_ @ state + scores_ @ new)
        state = state * through_ + k_ @ new
    return _first(torch.cat(out, 2), length, 2), state


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
