"""Gated depth attention beside a residual stream (delta attention residuals, arXiv 2605.18855)."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .depth_attention import factor_gradient, keys, probe_of, source_gradients
from .eager_kernels import Kernels
from .kernels import kernels_for
from .plain import needs_plain, needs_plain_backward, plain_backward
from .precision import no_autocast
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
    probe = probe_of(query, key_weight, stream)
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
        probe = probe_of(query, key_weight, stream)
        with no_autocast(probe):
            h, *flat = _tokens(stream, *deltas)
            products, rstd = keys(flat, probe, eps, kernels)
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
        probe = probe_of(query, key_weight, grad)
        with no_autocast(probe):
            g, *flat = _tokens(grad, *deltas)
            alpha = (products * rstd).softmax(0)
            weights = alpha * gate.to(probe.dtype)
            grad_alpha = torch.stack([ctx.kernels.source_dot(v, g) for v in flat])
            mean = (alpha * grad_alpha).sum(0)
            grad_logits = weights * (grad_alpha - mean)
            needs = (need_query or need_key_weight, *need_deltas)
            grad_probe, *grads = source_gradients(
                flat, g, weights, grad_logits, products, rstd, probe, needs, ctx.kernels
            )
            return (
                factor_gradient(grad_probe, key_weight, query) if need_query else None,
                factor_gradient(grad_probe, query, key_weight) if need_key_weight else None,
                mean.sum().to(gate.dtype).reshape(gate.shape),
                None,
                None,
                grad if need_stream else None,
                *(None if own is None else own.view(grad.shape) for own in grads),
            )


def _reference(
    query: Tensor, key_weight: Tensor | None, gate: Tensor, stream: Tensor, *deltas: Tensor, eps: float
) -> Tensor:
    return delta_attention_reference(stream, deltas, query, key_weight, gate, eps)


def _tokens(*tensors: Tensor) -> list[Tensor]:
    """`[..., C]` as `[T, C]`."""
    return [tensor.reshape(-1, tensor.shape[-1]) for tensor in tensors]
