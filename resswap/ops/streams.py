"""n residual streams: what to read from them, what to write back (Hyper-Connections and mHC).

Shapes: streams X `[..., n, C]`; pre and post `[..., n]`; comb `[..., n, n]`, row j for the stream read, column k for
the stream written. A connection reads `x = sum_j pre_j X_j`, and after the branch `y = f(x)` writes
`X'_k = sum_j comb_jk X_j + post_k y`.

Coefficients are float32 (float64 for float64 streams) whatever the parameters' dtype and autocast; x and X' have the
streams' dtype, rounded once. `*_reference` are the same functions in plain operations.
"""

from functools import partial

import torch
from torch import Tensor

from .precision import no_autocast, wide
from .sinkhorn import sinkhorn_tokens_last
from .stream_functions import DynamicRead, Read, Write

Coefficients = tuple[Tensor, Tensor, Tensor]


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
    with no_autocast(streams):
        mixes = _mixes(streams.flatten(-2), fn, eps)
        mixes = mixes.flatten(0, -2).t()[:, None]
        return _tokens_first(mhc_head(mixes, scale, base, sinkhorn_iters), streams)


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
    n = streams.shape[-2]
    if fn is None:
        pre, post, comb = base.to(wide(streams.dtype)).split([n, n, n * n])
        return pre, post, comb.view(n, n)
    with no_autocast(streams):
        mixes = _mixes(streams, fn, eps)
        mixes = mixes.flatten(0, -3).permute(2, 1, 0)
        return _tokens_first(hc_head(mixes, scale, base, tanh), streams)


def _mixes(rows: Tensor, fn: Tensor, eps: float) -> Tensor:
    """`fn @ row / rms(row)` for rows `[..., K]`: `[..., P]`."""
    rows = rows.to(wide(rows.dtype))
    return (rows @ fn.to(rows.dtype).t()) * (rows.square().mean(-1, keepdim=True) + eps).rsqrt()


def mhc_head(mixes: Tensor, scale: Tensor, base: Tensor, sinkhorn_iters: int) -> Coefficients:
    """mHC's coefficients with tokens last, (`[n, T]`, `[n, T]`, `[n, n, T]`), from mixes `[(2 + n) n, 1, T]`."""
    n = _num_streams(base)
    scale, base = scale.to(mixes.dtype), base.to(mixes.dtype)
    sizes = [n, n, n * n]
    pre, post, comb = (
        m * s + b[:, None] for m, s, b in zip(mixes[:, 0].split(sizes), scale, base.split(sizes), strict=True)
    )
    return pre.sigmoid(), 2 * post.sigmoid(), sinkhorn_tokens_last(comb.unflatten(0, (n, n)), sinkhorn_iters)


def hc_head(mixes: Tensor, scale: Tensor, base: Tensor, tanh: bool) -> Coefficients:
    """Hyper-Connections' coefficients with tokens last, as `mhc_head`, from mixes `[n + 2, n, T]`."""
    n = _num_streams(base)
    scale, base = scale.to(mixes.dtype), base.to(mixes.dtype)
    pre, post, comb = base[:, None].split([n, n, n * n])
    if tanh:
        mixes = mixes.tanh()
    return (
        scale[0] * mixes[0] + pre,
        scale[1] * mixes[1] + post,
        scale[2] * mixes[2:].transpose(0, 1) + comb.unflatten(0, (n, n)),
    )


def _num_streams(base: Tensor) -> int:
    return int((base.numel() + 1) ** 0.5) - 1


def _tokens_first(coefficients: Coefficients, streams: Tensor) -> Coefficients:
    pre, post, comb = coefficients
    shape = streams.shape[:-1]
    return pre.t().reshape(shape), post.t().reshape(shape), comb.permute(2, 0, 1).reshape(*shape, shape[-1])


def read_streams(streams: Tensor, pre: Tensor) -> Tensor:
    """The branch's input `x = sum_j pre_j X_j`.

    Args:
        streams: `[..., n, C]`.
        pre: `[..., n]` or `[n]`, float32 or float64.

    Returns:
        `[..., C]` in the streams' dtype.
    """
    if torch.compiler.is_compiling():
        return read_streams_reference(streams, pre)
    return Read.apply(streams, pre.expand(streams.shape[:-1]))[0]


def read_streams_reference(streams: Tensor, pre: Tensor) -> Tensor:
    """`read_streams` in plain operations."""
    return (pre[..., None] * streams).sum(-2).to(streams.dtype)


def write_streams(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """The new streams `X'_k = sum_j comb_jk X_j + post_k y`.

    Args:
        streams: `[..., n, C]`, as handed on by `mhc_read` or `hc_read`.
        y: the branch's output `[..., C]`, of any floating dtype.
        post: `[..., n]` or `[n]`, float32 or float64.
        comb: `[..., n, n]` or `[n, n]` (j, k), float32 or float64.

    Returns:
        `[..., n, C]` in the streams' dtype.
    """
    if torch.compiler.is_compiling():
        return write_streams_reference(streams, y, post, comb)
    shape = streams.shape[:-1]
    return Write.apply(streams, y, post.expand(shape), comb.expand(*shape, shape[-1]))


def write_streams_reference(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """`write_streams` in plain operations."""
    mixed = (comb[..., None] * streams[..., None, :]).sum(-3)
    return (mixed + post[..., None] * y[..., None, :]).to(streams.dtype)


def mhc_read(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, sinkhorn_iters: int, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`mhc_coefficients` and `read_streams` in one: (x, streams, post, comb), the last three for `write_streams`.

    The streams handed on are the ones given. Writing to them, not to the original, lets the backward add its
    gradient to the writer's in place.
    """
    if torch.compiler.is_compiling():
        return mhc_read_reference(streams, fn, scale, base, sinkhorn_iters, eps)
    return DynamicRead.apply(streams, fn, scale, base, partial(mhc_head, sinkhorn_iters=sinkhorn_iters), eps)


def mhc_read_reference(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, sinkhorn_iters: int, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`mhc_read` in plain operations."""
    pre, post, comb = mhc_coefficients(streams, fn, scale, base, sinkhorn_iters, eps)
    return read_streams_reference(streams, pre), streams, post, comb


def hc_read(
    streams: Tensor, fn: Tensor | None, scale: Tensor, base: Tensor, tanh: bool, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`hc_coefficients` and `read_streams` in one, as `mhc_read`."""
    if torch.compiler.is_compiling():
        return hc_read_reference(streams, fn, scale, base, tanh, eps)
    if fn is not None:
        return DynamicRead.apply(streams, fn, scale, base, partial(hc_head, tanh=tanh), eps)
    pre, post, comb = hc_coefficients(streams, None, scale, base, tanh, eps)
    x, streams = Read.apply(streams, pre.expand(streams.shape[:-1]))
    return x, streams, post, comb


def hc_read_reference(
    streams: Tensor, fn: Tensor | None, scale: Tensor, base: Tensor, tanh: bool, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`hc_read` in plain operations."""
    pre, post, comb = hc_coefficients(streams, fn, scale, base, tanh, eps)
    return read_streams_reference(streams, pre), streams, post, comb
