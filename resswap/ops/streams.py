"""n residual streams: what to read from them, what to write back (Hyper-Connections and mHC).

Shapes: streams X `[..., n, C]`; pre and post `[..., n]`; comb `[..., n, n]`, row j for the stream read, column k for
the stream written. A connection reads `x = sum_j pre_j X_j`, and after the branch `y = f(x)` writes
`X'_k = sum_j comb_jk X_j + post_k y`.

Coefficients are float32 (float64 for float64 streams) whatever the parameters' dtype and autocast; x and X' have the
streams' dtype, rounded once.
"""

from functools import partial

import torch
from torch import Tensor

from .compiled_kernels import COMPILED, mhc_read_few_compiled
from .few_tokens import are_few, has_numbers, mhc_read_few, write_few
from .kernels import kernels_for
from .plain import needs_plain
from .stream_formulas import (
    Head,
    hc_coefficients,
    hc_head,
    hc_read_reference,
    mhc_head,
    mhc_read_reference,
    read_streams_reference,
    write_streams_reference,
)
from .stream_functions import DynamicRead, Lent, Read, Write

# An attribute of streams that the next read and write do not save, but write again in their backward.
_LENT = "_resswap_lent"


def read_streams(streams: Tensor, pre: Tensor, kernels: str = "auto") -> Tensor:
    """The branch's input `x = sum_j pre_j X_j`.

    Args:
        streams: `[..., n, C]`.
        pre: `[..., n]` or `[n]`, float32 or float64.
        kernels: see `kernels_for`.

    Returns:
        `[..., C]` in the streams' dtype.
    """
    if needs_plain():
        return read_streams_reference(streams, pre)
    return _read(streams, pre, kernels)[0]


def write_streams(
    streams: Tensor, y: Tensor, post: Tensor, comb: Tensor, lend: bool = False, kernels: str = "auto"
) -> Tensor:
    """The new streams `X'_k = sum_j comb_jk X_j + post_k y`.

    Args:
        streams: `[..., n, C]`, as handed on by `mhc_read` or `hc_read`.
        y: the branch's output `[..., C]`, of any floating dtype.
        post: `[..., n]` or `[n]`, float32 or float64.
        comb: `[..., n, n]` or `[n, n]` (j, k), float32 or float64.
        lend: whether the read and write that come next are not to save the new streams for their backward; they are
            written again there. Saves `n C` numbers per token for the time of this function.
        kernels: see `kernels_for`.

    Returns:
        `[..., n, C]` in the streams' dtype.
    """
    if needs_plain():
        return write_streams_reference(streams, y, post, comb)
    if comb.dim() > 2 and are_few(comb.shape) and has_numbers(streams):
        return write_few(streams, y, post, comb)
    shape = streams.shape[:-1]
    post, comb = post.expand(shape), comb.expand(*shape, shape[-1])
    written = Write.apply(streams, y, post, comb, getattr(streams, _LENT, None), kernels_for(kernels, streams.device))
    if lend and torch.is_grad_enabled():
        setattr(written, _LENT, Lent(streams, y, post, comb))
    return written


def mhc_read(
    streams: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    sinkhorn_iters: int,
    eps: float,
    kernels: str = "auto",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`mhc_coefficients` and `read_streams` in one: (x, streams, post, comb), the last three for `write_streams`.

    The streams handed on are the ones given. Writing to them, not to the original, lets the backward add its
    gradient to the writer's in place.
    """
    if needs_plain():
        return mhc_read_reference(streams, fn, scale, base, sinkhorn_iters, eps)
    if are_few((*streams.shape[:-1], streams.shape[-2])):
        if has_numbers(streams):
            return mhc_read_few(streams, fn, scale, base, sinkhorn_iters, eps)
        if kernels_for(kernels, streams.device) is COMPILED:
            x, post, comb = mhc_read_few_compiled(streams, fn, scale, base, sinkhorn_iters, eps)
            return x, streams, post, comb
    head = partial(mhc_head, n=streams.shape[-2], sinkhorn_iters=sinkhorn_iters)
    return dynamic_read(streams, fn, scale, base, head, eps, kernels)


def hc_read(
    streams: Tensor, fn: Tensor | None, scale: Tensor, base: Tensor, tanh: bool, eps: float, kernels: str = "auto"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`hc_coefficients` and `read_streams` in one, as `mhc_read`."""
    if needs_plain():
        return hc_read_reference(streams, fn, scale, base, tanh, eps)
    if fn is not None:
        return dynamic_read(streams, fn, scale, base, partial(hc_head, tanh=tanh), eps, kernels)
    pre, post, comb = hc_coefficients(streams, None, scale, base, tanh, eps)
    x, streams = _read(streams, pre, kernels)
    return x, streams, post, comb


def _read(streams: Tensor, pre: Tensor, kernels: str) -> tuple[Tensor, Tensor]:
    lent = getattr(streams, _LENT, None)
    x, handed_on = Read.apply(streams, pre.expand(streams.shape[:-1]), lent, kernels_for(kernels, streams.device))
    return x, _lent(handed_on, lent)


def dynamic_read(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, head: Head, eps: float, kernels: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The read whose coefficients `head` makes, as `mhc_read`."""
    lent = getattr(streams, _LENT, None)
    x, handed_on, post, comb = DynamicRead.apply(
        streams, fn, scale, base, head, eps, lent, kernels_for(kernels, streams.device)
    )
    return x, _lent(handed_on, lent), post, comb


def _lent(streams: Tensor, lent: Lent | None) -> Tensor:
    """The streams, marked as lent if they are."""
    if lent is not None:
        setattr(streams, _LENT, lent)
    return streams
