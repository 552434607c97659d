"""Gated depth attention beside a residual stream (delta attention residuals, arXiv 2605.18855)."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .eager_kernels import Kernels
from .kernels import kernels_for
from .plain import needs_plain, needs_plain_backward, plain_backward
from .precision import no_autocast, wide
from .spans import spans


def delta_attention(
    stream: Tensor,
    deltas: Sequence[Tensor],
    query: Tensor,
    key_weight: Tensor | None,
    gate: Tensor,
    eps: float,
    kernels: str = "auto",
) -> Tensor:
    """`x = h + gate sum_i alpha_i v_i`, `alpha = softmax_i(query . RMSNorm(v_i; key_weight))`.

    Args:
        stream: h, `[..., C]`; it gives the dtype.
        deltas: the v_i, each `[..., C]`, at least one, all of the stream's shape.
        query: `[C]`.
        key_weight: `[C]`, the norm's weight. None: ones.
        gate: `[1]`.
        eps: added to the mean square.
        kernels: see `kernels_for`.

    Returns:
        `[..., C]` in the stream's dtype, rounded once; logits, softmax and sum are float32 (float64 for float64).
    """
    if needs_plain():
        return delta_attention_reference(stream, deltas, query, key_weight, gate, eps)
    return _DeltaAttention.apply(query, key_weight, gate, eps, kernels_for(kernels, stream.device), stream, *deltas)


def delta_attention_reference(
    stream: Tensor, deltas: Sequence[Tensor], query: Tensor, key_weight: Tensor | None, gate: Tensor, eps: float
) -> Tensor:
    """`delta_attention` in plain operations."""
    probe = _probe(query, key_weight, stream)
    with no_autocast(probe):
        wider = [v.to(probe.dtype) for v in deltas]
        logits = [(v * probe).sum(-1) * (v.square().mean(-1) + eps).rsqrt() for v in wider]
        weights = torch.stack(logits).softmax(0)
        mixed = sum(w[..., None] * v for w, v in zip(weights, wider, strict=True))
        return (stream.to(probe.dtype) + gate.to(probe.dtype) * mixed).to(stream.dtype)


class _DeltaAttention(torch.autograd.Function):
    """Saves the deltas and two numbers per delta and token; the gate's gradient needs no sum of the deltas again."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key_weight: Tensor | None,
        gate: Tensor,
        eps: float,
        kernels: Kernels,
        stream: Tensor,
        *deltas: Tensor,
    ) -> Tensor:
        probe = _probe(query, key_weight, stream)
        with no_autocast(probe):
            h, *flat = _tokens(stream, *deltas)
            products, norms = map(torch.stack, zip(*(kernels.measure(v, probe) for v in flat), strict=True))
            rstd = (norms.square_() / probe.numel()).add_(eps).rsqrt_()
            weights = ((products * rstd).softmax(0) * gate.to(probe.dtype))[..., None]
            x = torch.empty_like(h, memory_format=torch.contiguous_format)
            for s in spans(x):
                total = h[s].to(probe.dtype, copy=True)
                for v, weight in zip(flat, weights, strict=True):
                    total.addcmul_(v[s].to(total.dtype), weight[s])
                x[s] = total
            ctx.save_for_backward(query, key_weight, gate, products, rstd, stream, *deltas)
            ctx.eps, ctx.kernels = eps, kernels
            return x.view(stream.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key_weight, gate, products, rstd, stream, *deltas = ctx.saved_tensors
        if needs_plain_backward(grad):
            inputs = [query, key_weight, gate, stream, *deltas]
            grads = plain_backward(partial(_reference, eps=ctx.eps), inputs, [grad])
            return *grads[:3], None, None, *grads[3:]
        need_query, need_key_weight, _, _, _, need_stream, *need_deltas = ctx.needs_input_grad
        probe = _probe(query, key_weight, grad)
        with no_autocast(probe):
            g, *flat = _tokens(grad, *deltas)
            alpha = (products * rstd).softmax(0)
            weights = alpha * gate.to(probe.dtype)
            grad_alpha = torch.stack([ctx.kernels.source_dot(v, g) for v in flat])
            mean = (alpha * grad_alpha).sum(0)
            grad_logits = weights * (grad_alpha - mean)
            grad_products = grad_logits * rstd
            # through rstd: d rstd / dv = -rstd^3 v / C
            shrink = grad_logits * products * rstd.pow(3) / -probe.numel()

            grad_probe = torch.zeros_like(probe)
            grads: list[Tensor | None] = []
            for v, factor, own_shrink, product, needed in zip(
                flat, weights, shrink, grad_products, need_deltas, strict=True
            ):
                if need_query or need_key_weight:
                    for s in spans(v):
                        grad_probe.addmv_(v[s].to(probe.dtype).t(), product[s])
                own = ctx.kernels.source_gradient(v, g, factor, own_shrink, product, probe) if needed else None
                grads.append(None if own is None else own.view(grad.shape))
            weight = 1 if key_weight is None else key_weight.to(probe.dtype)
            return (
                (grad_probe * weight).to(query.dtype) if need_query else None,
                (grad_probe * query.to(probe.dtype)).to(key_weight.dtype) if need_key_weight else None,
                mean.sum().to(gate.dtype).reshape(gate.shape),
                None,
                None,
                grad if need_stream else None,
                *grads,
            )


def _reference(
    query: Tensor, key_weight: Tensor | None, gate: Tensor, stream: Tensor, *deltas: Tensor, eps: float
) -> Tensor:
    return delta_attention_reference(stream, deltas, query, key_weight, gate, eps)


def _probe(query: Tensor, key_weight: Tensor | None, like: Tensor) -> Tensor:
    """What a delta is multiplied with: the query times the norm's weight, wide."""
    query = query.to(wide(like.dtype))
    return query if key_weight is None else query * key_weight.to(query.dtype)


def _tokens(*tensors: Tensor) -> list[Tensor]:
    """`[..., C]` as `[T, C]`."""
    return [tensor.reshape(-1, tensor.shape[-1]) for tensor in tensors]
