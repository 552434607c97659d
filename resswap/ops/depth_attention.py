"""Depth attention: a softmax over earlier residual contributions (attention residuals, arXiv 2603.15031).

A logit is `q . RMSNorm(v; w) = (v . (q * w)) / rms(v)`: one pass over v, no normalised copy, and no stack of sources.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .eager_kernels import Kernels
from .few_tokens import are_few, depth_attention_few, has_numbers
from .kernels import kernels_for
from .plain import needs_plain, needs_plain_backward, plain_backward
from .precision import no_autocast, wide
from .spans import spans


def depth_attention(
    sources: Sequence[Tensor], query: Tensor, key_weight: Tensor | None, eps: float, kernels: str = "auto"
) -> Tensor:
    """`x = k sum_i alpha_i v_i`, `alpha = softmax_i(query . RMSNorm(v_i; key_weight))`, k the number of sources.

    The paper has no factor k; with it a query of zero gives the plain sum of the sources.

    Args:
        sources: the v_i, each `[..., C]`, all of one shape and dtype.
        query: `[C]`.
        key_weight: `[C]`, the norm's weight. None: ones.
        eps: added to the mean square.
        kernels: see `kernels_for`.

    Returns:
        `[..., C]` in the sources' dtype; logits, softmax and sum are float32 (float64 for float64 sources).
    """
    if needs_plain():
        return depth_attention_reference(sources, query, key_weight, eps)
    if are_few((len(sources), *sources[0].shape[:-1])) and has_numbers(sources[0]):
        return depth_attention_few(sources, probe_of(query, key_weight, sources[0]), eps)
    return _DepthAttention.apply(query, key_weight, eps, kernels_for(kernels, sources[0].device), *sources)


def depth_attention_reference(
    sources: Sequence[Tensor], query: Tensor, key_weight: Tensor | None, eps: float
) -> Tensor:
    """`depth_attention` in plain operations."""
    probe = probe_of(query, key_weight, sources[0])
    with no_autocast(probe):
        wider = [v.to(probe.dtype) for v in sources]
        logits = [(v * probe).sum(-1) * (v.square().mean(-1) + eps).rsqrt() for v in wider]
        weights = len(wider) * torch.stack(logits).softmax(0)
        return sum(w[..., None] * v for w, v in zip(weights, wider, strict=True)).to(sources[0].dtype)


class _DepthAttention(torch.autograd.Function):
    """Saves the sources and two numbers per source and token."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key_weight: Tensor | None, eps: float, kernels: Kernels, *sources: Tensor
    ) -> Tensor:
        probe = probe_of(query, key_weight, sources[0])
        with no_autocast(probe):
            flat = _tokens(sources)
            products, rstd = keys(flat, probe, eps, kernels)
            weights = _weights(products * rstd)[..., None]
            x = torch.empty_like(flat[0], memory_format=torch.contiguous_format)
            for s in spans(x):
                total = x[s] if x.dtype == probe.dtype else torch.empty_like(x[s], dtype=probe.dtype)
                torch.mul(weights[0, s], flat[0][s].to(total.dtype), out=total)
                for v, weight in zip(flat[1:], weights[1:], strict=True):
                    total.addcmul_(v[s].to(total.dtype), weight[s])
                if total.dtype != x.dtype:
                    x[s] = total
            ctx.save_for_backward(query, key_weight, products, rstd, *sources)
            ctx.eps, ctx.kernels = eps, kernels
            return x.view(sources[0].shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key_weight, products, rstd, *sources = ctx.saved_tensors
        if needs_plain_backward(grad):
            grads = plain_backward(partial(_reference, eps=ctx.eps), [query, key_weight, *sources], [grad])
            return *grads[:2], None, None, *grads[2:]
        need_query, need_key_weight, _, _, *need_sources = ctx.needs_input_grad
        probe = probe_of(query, key_weight, grad)
        with no_autocast(probe):
            flat, g = _tokens(sources), grad.reshape(-1, grad.shape[-1])
            weights = _weights(products * rstd)
            grad_weights = torch.stack([ctx.kernels.source_dot(v, g) for v in flat])
            mean = (weights * grad_weights).mean(0)
            grad_logits = weights * (grad_weights - mean)
            needs = (need_query or need_key_weight, *need_sources)
            grad_probe, *grads = source_gradients(
                flat, g, weights, grad_logits, products, rstd, probe, needs, ctx.kernels
            )
            return (
                factor_gradient(grad_probe, key_weight, query) if need_query else None,
                factor_gradient(grad_probe, query, key_weight) if need_key_weight else None,
                None,
                None,
                *(None if own is None else own.view(grad.shape) for own in grads),
            )


def keys(sources: Sequence[Tensor], probe: Tensor, eps: float, kernels: Kernels) -> tuple[Tensor, Tensor]:
    """Of k sources `[T, C]`, (v . probe, 1 / rms(v)), each `[k, T]`; their product is the logits."""
    products, norms = map(torch.stack, zip(*(kernels.measure(v, probe) for v in sources), strict=True))
    return products, (norms.square_() / probe.numel()).add_(eps).rsqrt_()


def source_gradients(
    sources: Sequence[Tensor],
    grad: Tensor,
    weights: Tensor,
    grad_logits: Tensor,
    products: Tensor,
    rstd: Tensor,
    probe: Tensor,
    needs: Sequence[bool],
    kernels: Kernels,
) -> list[Tensor | None]:
    """The gradients of `sum_i weights_i v_i`, from that for the sum and for the logits.

    Args:
        sources: k of `[T, C]`.
        grad: for the sum, `[T, C]`.
        weights, grad_logits, products, rstd: `[k, T]`; the latter two from `keys`.
        probe: `[C]`.
        needs: for the probe and each source, whether a gradient is wanted.

    Returns:
        That for the probe `[C]`, then those for the sources; None for the sources that need none.
    """
    grad_products = grad_logits * rstd
    # through rstd: d rstd / dv = -rstd^3 v / C
    shrink = grad_logits * products * rstd.pow(3) / -probe.numel()
    needs_probe, *needs_source = needs
    grad_probe = torch.zeros_like(probe)
    grads: list[Tensor | None] = [grad_probe]
    for v, weight, factor, product, needed in zip(sources, weights, shrink, grad_products, needs_source, strict=True):
        if needs_probe:
            for s in spans(v):
                grad_probe.addmv_(v[s].to(probe.dtype).t(), product[s])
        grads.append(kernels.source_gradient(v, grad, weight, factor, product, probe) if needed else None)
    return grads


def _reference(query: Tensor, key_weight: Tensor | None, *sources: Tensor, eps: float) -> Tensor:
    return depth_attention_reference(sources, query, key_weight, eps)


def probe_of(query: Tensor, key_weight: Tensor | None, like: Tensor) -> Tensor:
    """What a source is multiplied with: the query times the norm's weight, wide."""
    query = query.to(wide(like.dtype))
    return query if key_weight is None else query * key_weight.to(query.dtype)


def factor_gradient(grad_probe: Tensor, factor: Tensor | None, like: Tensor) -> Tensor:
    """The gradient for one factor of the probe, given the other."""
    return (grad_probe if factor is None else grad_probe * factor.to(grad_probe.dtype)).to(like.dtype)


def _weights(logits: Tensor) -> Tensor:
    """k times the softmax over the first dimension; exactly 1 where all logits are equal."""
    weights = (logits - logits.amax(0)).exp_()
    return weights.mul_(len(weights) / weights.sum(0))


def _tokens(tensors: Sequence[Tensor]) -> list[Tensor]:
    """`[..., C]` as `[T, C]`."""
    return [tensor.reshape(-1, tensor.shape[-1]) for tensor in tensors]
