"""Gated depth attention beside a residual stream (delta attention residuals, arXiv 2605.18855)."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .plain import needs_plain, needs_plain_backward, plain_backward
from .precision import no_autocast, wide
from .spans import spans


def delta_attention(
    stream: Tensor, deltas: Sequence[Tensor], query: Tensor, key_weight: Tensor | None, gate: Tensor, eps: float
) -> Tensor:
    """`x = h + gate sum_i alpha_i v_i`, `alpha = softmax_i(query . RMSNorm(v_i; key_weight))`.

    Args:
        stream: h, `[..., C]`; it gives the dtype.
        deltas: the v_i, each `[..., C]`, at least one, all of the stream's shape.
        query: `[C]`.
        key_weight: `[C]`, the norm's weight. None: ones.
        gate: `[1]`.
        eps: added to the mean square.

    Returns:
        `[..., C]` in the stream's dtype, rounded once; logits, softmax and sum are float32 (float64 for float64).
    """
    if needs_plain():
        return delta_attention_reference(stream, deltas, query, key_weight, gate, eps)
    return _DeltaAttention.apply(query, key_weight, gate, eps, stream, *deltas)


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
        ctx: Any, query: Tensor, key_weight: Tensor | None, gate: Tensor, eps: float, stream: Tensor, *deltas: Tensor
    ) -> Tensor:
        probe = _probe(query, key_weight, stream)
        with no_autocast(probe):
            h, *flat = _tokens(stream, *deltas)
            products = probe.new_empty(len(flat), h.shape[0])
            rstd = torch.empty_like(products)
            for s in spans(h):
                for v, product, norm in zip(flat, products, rstd, strict=True):
                    v = v[s].to(probe.dtype)
                    torch.mv(v, probe, out=product[s])
                    torch.linalg.vector_norm(v, dim=-1, out=norm[s])
            rstd = (rstd.square_() / probe.numel()).add_(eps).rsqrt_()
            weights = ((products * rstd).softmax(0) * gate.to(probe.dtype))[..., None]
            x = torch.empty_like(h, memory_format=torch.contiguous_format)
            for s in spans(x):
                total = h[s].to(probe.dtype, copy=True)
                for v, weight in zip(flat, weights, strict=True):
                    total.addcmul_(v[s], weight[s])
                x[s] = total
            ctx.save_for_backward(query, key_weight, gate, products, rstd, stream, *deltas)
            ctx.eps = eps
            return x.view(stream.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key_weight, gate, products, rstd, stream, *deltas = ctx.saved_tensors
        if needs_plain_backward(grad):
            inputs = [query, key_weight, gate, stream, *deltas]
            grads = plain_backward(partial(_reference, eps=ctx.eps), inputs, [grad])
            return *grads[:3], None, *grads[3:]
        need_query, need_key_weight, _, _, need_stream, *need_deltas = ctx.needs_input_grad
        probe = _probe(query, key_weight, grad)
        with no_autocast(probe):
            g, *flat = _tokens(grad, *deltas)
            alpha = (products * rstd).softmax(0)
            weights = alpha * gate.to(probe.dtype)
            grad_alpha = torch.empty_like(alpha)
            for s in spans(g):
                wide_g = g[s].to(probe.dtype)
                for v, out in zip(flat, grad_alpha, strict=True):
                    torch.sum(wide_g * v[s], -1, out=out[s])
            mean = (alpha * grad_alpha).sum(0)
            grad_logits = weights * (grad_alpha - mean)
            grad_products = grad_logits * rstd
            # through rstd: d rstd / dv = -rstd^3 v / C
            shrink = grad_logits * products * rstd.pow(3) / -probe.numel()

            grad_probe = torch.zeros_like(probe)
            grads: list[Tensor | None] = []
            for i, v in enumerate(flat):
                out = torch.empty_like(v, memory_format=torch.contiguous_format) if need_deltas[i] else None
                for s in spans(g):
                    if need_query or need_key_weight:
                        grad_probe.addmv_(v[s].to(probe.dtype).t(), grad_products[i, s])
                    if out is not None:
                        total = weights[i, s, None] * g[s]
                        total.addcmul_(shrink[i, s, None], v[s]).addcmul_(grad_products[i, s, None], probe)
                        out[s] = total
                grads.append(None if out is None else out.view(grad.shape))
            weight = 1 if key_weight is None else key_weight.to(probe.dtype)
            return (
                (grad_probe * weight).to(query.dtype) if need_query else None,
                (grad_probe * query.to(probe.dtype)).to(key_weight.dtype) if need_key_weight else None,
                mean.sum().to(gate.dtype).reshape(gate.shape),
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
