"""Reading from and writing to n residual streams: Hyper-Connections and mHC."""

import torch
from torch import Tensor

from .precision import no_autocast, wide
from .sinkhorn import sinkhorn


def mhc_coefficients(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, sinkhorn_iters: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """mHC's (pre `[..., n]`, post `[..., n]`, comb `[..., n, n]`) for streams `[..., n, C]`."""
    dtype, n = wide(streams.dtype), streams.shape[-2]
    with no_autocast(streams):
        flat = streams.flatten(-2).to(dtype)
        mixes = (flat @ fn.to(dtype).T) * (flat.square().mean(-1, keepdim=True) + eps).rsqrt()
        pre, post, comb = mixes.split([n, n, n * n], dim=-1)
        scale, base = scale.to(dtype), base.to(dtype)
        pre = (pre * scale[0] + base[:n]).sigmoid()
        post = 2 * (post * scale[1] + base[n : 2 * n]).sigmoid()
        comb = (comb * scale[2] + base[2 * n :]).unflatten(-1, (n, n))
        return pre, post, sinkhorn(comb, sinkhorn_iters)


def hc_coefficients(
    streams: Tensor, fn: Tensor | None, scale: Tensor, base: Tensor, tanh: bool, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Hyper-Connections' (pre, post, comb); without token dimensions if `fn` is None (static)."""
    dtype, n = wide(streams.dtype), streams.shape[-2]
    with no_autocast(streams):
        base = base.to(dtype)
        pre, post, comb = base[:n], base[n : 2 * n], base[2 * n :].view(n, n)
        if fn is None:
            return pre, post, comb
        x = streams.to(dtype)
        mixes = (x @ fn.to(dtype).T) * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
        if tanh:
            mixes = mixes.tanh()
        scale = scale.to(dtype)
        pre = scale[0] * mixes[..., 0] + pre
        post = scale[1] * mixes[..., 1] + post
        return pre, post, scale[2] * mixes[..., 2:] + comb


def read_streams(streams: Tensor, pre: Tensor) -> Tensor:
    """The branch's input `x[..., C] = sum_j pre[..., j] * streams[..., j, :]`, in the streams' dtype."""
    with no_autocast(streams):
        x = sum(pre[..., j, None] * streams[..., j, :] for j in range(streams.shape[-2]))
        return x.to(streams.dtype)


def write_streams(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """The new streams `X'_k = sum_j comb[..., j, k] * X_j + post[..., k] * y`, in the streams' dtype."""
    n = streams.shape[-2]
    with no_autocast(streams):
        outs = []
        for k in range(n):
            out = sum(comb[..., j, k, None] * streams[..., j, :] for j in range(n))
            outs.append((out + post[..., k, None] * y).to(streams.dtype))
        return torch.stack(outs, dim=-2)


def mhc_read(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, sinkhorn_iters: int, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x, streams, post, comb): the branch's input, and what `write_streams` needs after the branch."""
    pre, post, comb = mhc_coefficients(streams, fn, scale, base, sinkhorn_iters, eps)
    return read_streams(streams, pre), streams, post, comb


def hc_read(
    streams: Tensor, fn: Tensor | None, scale: Tensor, base: Tensor, tanh: bool, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(x, streams, post, comb), as `mhc_read`."""
    pre, post, comb = hc_coefficients(streams, fn, scale, base, tanh, eps)
    return read_streams(streams, pre), streams, post, comb
