"""n residual streams: what to read from them, what to write back (Hyper-Connections and mHC).

Shapes: streams X `[..., n, C]`; pre and post `[..., n]`; comb `[..., n, n]`, row j for the stream read, column k for
the stream written. A connection reads `x = sum_j pre_j X_j`, and after the branch `y = f(x)` writes
`X'_k = sum_j comb_jk X_j + post_k y`.

Coefficients are float32 (float64 for float64 streams) whatever the parameters' dtype and autocast; x and X' have the
streams' dtype, rounded once.
"""

from functools import partial

from torch import Tensor

from .plain import needs_plain
from .stream_formulas import (
    hc_coefficients,
    hc_head,
    hc_read_reference,
    mhc_head,
    mhc_read_reference,
    read_streams_reference,
    write_streams_reference,
)
from .stream_functions import DynamicRead, Read, Write


def read_streams(streams: Tensor, pre: Tensor) -> Tensor:
    """The branch's input `x = sum_j pre_j X_j`.

    Args:
        streams: `[..., n, C]`.
        pre: `[..., n]` or `[n]`, float32 or float64.

    Returns:
        `[..., C]` in the streams' dtype.
    """
    if needs_plain():
        return read_streams_reference(streams, pre)
    return Read.apply(streams, pre.expand(streams.shape[:-1]))[0]


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
    if needs_plain():
        return write_streams_reference(streams, y, post, comb)
    shape = streams.shape[:-1]
    return Write.apply(streams, y, post.expand(shape), comb.expand(*shape, shape[-1]))


def mhc_read(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, sinkhorn_iters: int, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`mhc_coefficients` and `read_streams` in one: (x, streams, post, comb), the last three for `write_streams`.

    The streams handed on are the ones given. Writing to them, not to the original, lets the backward add its
    gradient to the writer's in place.
    """
    if needs_plain():
        return mhc_read_reference(streams, fn, scale, base, sinkhorn_iters, eps)
    head = partial(mhc_head, n=streams.shape[-2], sinkhorn_iters=sinkhorn_iters)
    return DynamicRead.apply(streams, fn, scale, base, head, eps)


def hc_read(
    streams: Tensor, fn: Tensor | None, scale: Tensor, base: Tensor, tanh: bool, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`hc_coefficients` and `read_streams` in one, as `mhc_read`."""
    if needs_plain():
        return hc_read_reference(streams, fn, scale, base, tanh, eps)
    if fn is not None:
        return DynamicRead.apply(streams, fn, scale, base, partial(hc_head, tanh=tanh), eps)
    pre, post, comb = hc_coefficients(streams, None, scale, base, tanh, eps)
    x, streams = Read.apply(streams, pre.expand(streams.shape[:-1]))
    return x, streams, post, comb
