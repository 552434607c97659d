"""Reading a few tokens without gradients, as in decoding, where the number of operations is what counts.

What is left between the big products is a few dozen numbers per token. On a CPU numpy computes them, whose small
operations cost a fraction of torch's.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .eager_kernels import add_product, product_of
from .precision import no_autocast, wide

FEW_TOKENS = 16
# exp of this and of its negative, multiplied by each other and by a few numbers more, are far from float64's limits.
LARGEST_LOGIT = 300.0


def are_few(shape: torch.Size) -> bool:
    """Whether `shape`, the dimensions of a tensor that are tokens, is of a few, and no gradient will be asked for."""
    return shape.numel() <= FEW_TOKENS and not torch.is_grad_enabled()


def mhc_read_few(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, sinkhorn_iters: int, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`mhc_read` for a few tokens on a CPU."""
    n, hidden = streams.shape[-2:]
    with no_autocast(streams):
        x = streams.reshape(-1, n, hidden).to(wide(streams.dtype))
        rows = x.reshape(-1, n * hidden)
        projected = torch.nn.functional.linear(rows, fn.to(rows.dtype)).numpy()
        norm = torch.linalg.vector_norm(rows, dim=-1).numpy()[:, None]
        scale, base = (parameter.detach().to(rows.dtype).numpy() for parameter in (scale, base))
        mixes = projected * scale.repeat([n, n, n * n]) / np.sqrt(norm * norm / rows.shape[1] + eps) + base
        gates = 0.5 + 0.5 * np.tanh(0.5 * mixes[:, : 2 * n])  # sigmoids
        gates[:, n:] *= 2
        comb = _sinkhorn(mixes[:, 2 * n :].reshape(-1, n, n).astype(np.float64), sinkhorn_iters)
        gates, comb = torch.from_numpy(gates), torch.from_numpy(comb.astype(mixes.dtype))
        shape = streams.shape[:-1]
        branch_input = product_of(gates[:, None, :n], x).to(streams.dtype).view(*shape[:-1], hidden)
        return branch_input, streams, gates[:, n:].view(shape), comb.view(*shape, n)


def _sinkhorn(logits: np.ndarray, iters: int) -> np.ndarray:
    """`sinkhorn` for `[T, n, n]`: with K = exp(logits) the matrices are u K v, and a round is u = 1/Kv, v = 1/K'u."""
    matrices = np.exp(np.maximum(logits - logits.max(-1, keepdims=True), -LARGEST_LOGIT))
    transposed = matrices.swapaxes(1, 2)
    v = np.ones((*matrices.shape[:2], 1))
    u = np.empty_like(v)
    for _ in range(iters):
        np.matmul(matrices, v, out=u)
        np.divide(1.0, u, out=u)
        np.matmul(transposed, u, out=v)
        np.divide(1.0, v, out=v)
    return u * matrices * v.swapaxes(1, 2)


def write_few(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """`write_streams` for a few tokens on a CPU."""
    n, hidden = streams.shape[-2:]
    with no_autocast(streams):
        x, row = streams.reshape(-1, n, hidden).to(comb.dtype), y.reshape(-1, 1, hidden).to(comb.dtype)
        written = torch.mul(post.reshape(-1, n, 1), row)
        return add_product(written, comb.reshape(-1, n, n).mT, x).to(streams.dtype).view(streams.shape)


def depth_attention_few(sources: Sequence[Tensor], probe: Tensor, eps: float) -> Tensor:
    """`depth_attention` for a few tokens: on a copy of all sources. `probe` is the query times the key weight."""
    with no_autocast(probe):
        stack = torch.stack(list(sources)).to(probe.dtype)
        rstd = torch.linalg.vector_norm(stack, dim=-1).square_().div_(probe.numel()).add_(eps).rsqrt_()
        weights = (stack @ probe).mul_(rstd).softmax(0).mul_(len(sources))
        return (weights[..., None] * stack).sum(0).to(sources[0].dtype)
