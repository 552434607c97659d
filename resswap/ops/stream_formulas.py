"""The formulas of `streams` in plain operations: the coefficients, and the `*_reference` of every function there."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from .precision import no_autocast, wide
from .sinkhorn import sinkhorn_tokens_last

Coefficients = tuple[Tensor, Tensor, Tensor]
Head = Callable[[Tensor, Tensor, Tensor], Coefficients]


def mhc_coefficients(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, sinkhorn_iters: int, eps: float
) -> Coefficients:
    """The coefficients of mHC (arXiv 2512.24880, equations 7 to 9), as transformers' `DeepseekV4HyperConnection`.

    With `m = fn @ flatten(X) / rms(flatten(X))`: `pre = sigmoid(scale_0 m + base)`,
    `post = 2 sigmoid(scale_1 m + base)`, `comb = sinkhorn(scale_2 m + base)`, each from its own rows of fn and base.

    Args:
        streams: `[..., n, C]`.
        fn: `[(2 + n) n, n C]`; rows in the order pre (n), post (n), comb (n * n, row-major j, k).
        scale: `[3]`, for pre, post and comb.
        base: `[(2 + n) n]`, in the order of fn's rows.
        sinkhorn_iters: iterations of `sinkhorn`.
        eps: added to the mean square.

    Returns:
        (pre `[..., n]`, post `[..., n]`, comb `[..., n, n]`), float32 or float64.
    """
    head = partial(mhc_head, n=streams.shape[-2], sinkhorn_iters=sinkhorn_iters)
    return dynamic_coefficients(streams, fn, scale, base, head, eps)


def hc_coefficients(
    streams: Tensor, fn: Tensor | None, scale: Tensor, base: Tensor, tanh: bool, eps: float
) -> Coefficients:
    """The coefficients of Hyper-Connections (arXiv 2409.19606, sections 2.1 and 2.2), static or dynamic.

    With `t = fn @ X_j / rms(X_j)` for each stream j, through tanh if asked: `pre_j = scale_0 t_0 + base`,
    `post_j = scale_1 t_1 + base`, `comb_jk = scale_2 t_(2 + k) + base`.

    Args:
        streams: `[..., n, C]`.
        fn: `[n + 2, C]`; rows in the order pre (1), post (1), comb (n, over k). None: static.
        scale: `[3]`, for pre, post and comb; unused if static.
        base: `[(2 + n) n]`, in the order pre (n), post (n), comb (n * n, row-major j, k).
        tanh: whether the projections pass through tanh.
        eps: added to the mean square.

    Returns:
        (pre `[..., n]`, post `[..., n]`, comb `[..., n, n]`), float32 or float64; if static `[n]`, `[n]`, `[n, n]`.
    """
    if fn is not None:
        return dynamic_coefficients(streams, fn, scale, base, partial(hc_head, tanh=tanh), eps)
    n = streams.shape[-2]
    pre, post, comb = base.to(wide(streams.dtype)).split([n, n, n * n])
    return pre, post, comb.view(n, n)


def mhc_head(mixes: Tensor, scale: Tensor, base: Tensor, n: int, sinkhorn_iters: int) -> Coefficients:
    """mHC's coefficients with tokens last, (`[n, T]`, `[n, T]`, `[n, n, T]`), from mixes `[(2 + n) n, 1, T]`."""
    scale, base = scale.to(mixes.dtype), base.to(mixes.dtype)
    sizes = [n, n, n * n]
    pre, post, comb = (
        torch.addcmul(b, m, s)
        for m, s, b in zip(mixes[:, 0].split(sizes), scale, base[:, None].split(sizes), strict=True)
    )
    return pre.sigmoid(), 2 * post.sigmoid(), sinkhorn_tokens_last(comb.unflatten(0, (n, n)), sinkhorn_iters)


def hc_head(mixes: Tensor, scale: Tensor, base: Tensor, tanh: bool) -> Coefficients:
    """Hyper-Connections' coefficients with tokens last, as `mhc_head`, from mixes `[n + 2, n, T]`."""
    n = mixes.shape[1]
    scale, base = scale.to(mixes.dtype), base.to(mixes.dtype)
    pre, post, comb = base[:, None].split([n, n, n * n])
    if tanh:
        mixes = mixes.tanh()
    return (
        scale[0] * mixes[0] + pre,
        scale[1] * mixes[1] + post,
        scale[2] * mixes[2:].transpose(0, 1) + comb.unflatten(0, (n, n)),
    )


def dynamic_coefficients(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, head: Head, eps: float
) -> Coefficients:
    """The coefficients that `head` makes of `fn @ row / rms(row)`.

    A row is what fn projects: all streams of a token `[n C]` (mHC) or one of them `[C]` (Hyper-Connections).
    """
    with no_autocast(streams):
        shape, width = streams.shape[:-1], fn.shape[1]
        rows = streams.reshape(-1, shape[-1] * streams.shape[-1] // width, width).to(wide(streams.dtype))
        mixes = (rows @ fn.to(rows.dtype).t()) * (rows.square().mean(-1, keepdim=True) + eps).rsqrt()
        pre, post, comb = head(mixes.permute(2, 1, 0), scale, base)
        return pre.t().reshape(shape), post.t().reshape(shape), comb.permute(2, 0, 1).reshape(*shape, shape[-1])


def dynamic_read_reference(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, head: Head, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`mhc_read` or dynamic `hc_read`, depending on the head."""
    pre, post, comb = dynamic_coefficients(streams, fn, scale, base, head, eps)
    return read_streams_reference(streams, pre), streams, post, comb


def read_streams_reference(streams: Tensor, pre: Tensor) -> Tensor:
    """`read_streams` in plain operations."""
    return (pre[..., None] * streams).sum(-2).to(streams.dtype)


def write_streams_reference(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """`write_streams` in plain operations."""
    mixed = (comb[..., None] * streams[..., None, :]).sum(-3)
    return (mixed + post[..., None] * y[..., None, :]).to(streams.dtype)


def mhc_read_reference(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, sinkhorn_iters: int, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`mhc_read` in plain operations."""
    pre, post, comb = mhc_coefficients(streams, fn, scale, base, sinkhorn_iters, eps)
    return read_streams_reference(streams, pre), streams, post, comb


def hc_read_reference(
    streams: Tensor, fn: Tensor | None, scale: Tensor, base: Tensor, tanh: bool, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`hc_read` in plain operations."""
    pre, post, comb = hc_coefficients(streams, fn, scale, base, tanh, eps)
    return read_streams_reference(streams, pre), streams, post, comb
