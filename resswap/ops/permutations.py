"""mHC-lite: mixing matrices as convex combinations of the permutations (arXiv 2601.05732)."""

from functools import cache, partial
from itertools import permutations
from math import factorial

import torch
from torch import Tensor

from .plain import needs_plain
from .stream_formulas import Coefficients, dynamic_coefficients, dynamic_read_reference
from .streams import dynamic_read


def mhc_lite_coefficients(streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, eps: float) -> Coefficients:
    """The coefficients of mHC-lite: pre and post as mHC's, `comb = sum_r softmax_r(scale_2 m + base) P_r`.

    By the theorem of Birkhoff and von Neumann these are all the doubly stochastic matrices. No rounds of
    Sinkhorn-Knopp are needed: rows and columns sum to 1 to rounding.

    Args:
        streams: `[..., n, C]`.
        fn: `[2 n + n!, n C]`; rows in the order pre (n), post (n), permutations (n!, as `itertools.permutations` has
            them: the r-th sends stream j to stream `p[j]`).
        scale: `[3]`, for pre, post and comb.
        base: `[2 n + n!]`, in the order of fn's rows.
        eps: added to the mean square.

    Returns:
        (pre `[..., n]`, post `[..., n]`, comb `[..., n, n]`), float32 or float64.
    """
    return dynamic_coefficients(streams, fn, scale, base, partial(mhc_lite_head, n=streams.shape[-2]), eps)


def mhc_lite_read(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, eps: float, kernels: str = "auto"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`mhc_lite_coefficients` and `read_streams` in one, as `mhc_read`: (x, streams, post, comb)."""
    if needs_plain():
        return mhc_lite_read_reference(streams, fn, scale, base, eps)
    return dynamic_read(streams, fn, scale, base, partial(mhc_lite_head, n=streams.shape[-2]), eps, kernels)


def mhc_lite_read_reference(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`mhc_lite_read` in plain operations."""
    return dynamic_read_reference(streams, fn, scale, base, partial(mhc_lite_head, n=streams.shape[-2]), eps)


def mhc_lite_head(mixes: Tensor, scale: Tensor, base: Tensor, n: int) -> Coefficients:
    """mHC-lite's coefficients with tokens last, as `mhc_head`, from mixes `[2 n + n!, 1, T]`."""
    scale, base = scale.to(mixes.dtype), base.to(mixes.dtype)
    sizes = [n, n, factorial(n)]
    pre, post, comb = (
        m * s + b[:, None] for m, s, b in zip(mixes[:, 0].split(sizes), scale, base.split(sizes), strict=True)
    )
    # Summed by gathering, not by a matrix product, which TF32 or bfloat16 could round: rows must sum to 1.
    index = torch.tensor(_sending(n), device=mixes.device)
    comb = comb.softmax(0)[index].sum(2)
    # The sums are 1 to 1e-6, which adds up over many connections; now those over j are 1 to the last digit.
    return pre.sigmoid(), 2 * post.sigmoid(), comb / comb.sum(0)


@cache
def _sending(n: int) -> list[list[list[int]]]:
    """`[n][n][(n - 1)!]`: for (j, k), which permutations send stream j to stream k."""
    every = list(enumerate(permutations(range(n))))
    return [[[r for r, p in every if p[j] == k] for k in range(n)] for j in range(n)]
