"""A sum over depth with one learned weight per source (DenseFormer, arXiv 2402.02622)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .plain import needs_plain, needs_plain_backward, plain_backward
from .precision import no_autocast, wide
from .spans import spans


def depth_sum(sources: Sequence[Tensor], weights: Tensor) -> Tensor:
    """`x = sum_i w_i v_i`.

    Args:
        sources: the k v_i, each `[..., C]`, all of one shape; the last one gives the dtype.
        weights: `[k]`.

    Returns:
        `[..., C]` in the last source's dtype; the sum is float32 (float64 for float64 sources), rounded once.
    """
    if needs_plain():
        return depth_sum_reference(sources, weights)
    return _DepthSum.apply(weights, *sources)


def depth_sum_reference(sources: Sequence[Tensor], weights: Tensor) -> Tensor:
    """`depth_sum` in plain operations."""
    dtype = wide(sources[-1].dtype)
    with no_autocast(sources[-1]):
        terms = [w * v.to(dtype) for w, v in zip(weights.to(dtype), sources, strict=True)]
        return sum(terms[1:], terms[0]).to(sources[-1].dtype)


class _DepthSum(torch.autograd.Function):
    """Saves the sources and the weights, no wide copy of a source."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, *sources: Tensor) -> Tensor:
        ctx.save_for_backward(weights, *sources)
        last = sources[-1]
        with no_autocast(last):
            w = weights.to(wide(last.dtype))
            flat = [v.reshape(-1, v.shape[-1]) for v in sources]
            x = torch.empty_like(flat[-1], memory_format=torch.contiguous_format)
            for s in spans(x):
                total = flat[0][s].to(w.dtype) * w[0]
                for v, weight in zip(flat[1:], w[1:], strict=True):
                    total.addcmul_(v[s], weight)
                x[s] = total
            return x.view(last.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weights, *sources = ctx.saved_tensors
        if needs_plain_backward(grad):
            return plain_backward(_reference, [weights, *sources], [grad])
        need_weights, *need_sources = ctx.needs_input_grad
        with no_autocast(grad):
            w = weights.to(wide(grad.dtype))
            flat = [v.reshape(-1, v.shape[-1]) for v in sources]
            g = grad.reshape(-1, grad.shape[-1])
            grad_weights = torch.zeros_like(w)
            grads = [
                torch.empty_like(v, memory_format=torch.contiguous_format) if need else None
                for v, need in zip(flat, need_sources, strict=True)
            ]
            for s in spans(g):
                wide_g = g[s].to(w.dtype)
                for i, (v, out) in enumerate(zip(flat, grads, strict=True)):
                    if need_weights:
                        grad_weights[i] += torch.sum(wide_g * v[s])
                    if out is not None:
                        out[s] = wide_g * w[i]
            return (
                grad_weights.to(weights.dtype) if need_weights else None,
                *(None if out is None else out.view(grad.shape) for out in grads),
            )


def _reference(weights: Tensor, *sources: Tensor) -> Tensor:
    return depth_sum_reference(sources, weights)
