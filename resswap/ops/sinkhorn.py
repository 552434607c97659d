"""Sinkhorn-Knopp: from logits to a doubly stochastic matrix (mHC, arXiv 2512.24880, equation 9).

The first normalisation over k and over j happens in the log domain, so logits of any size are safe. After it every
column sums to 1 and every row to at least 1/n^2 (each row of a softmax has an entry of at least 1/n, and a column's
sum is at most n), and so it stays: the later divisions are by numbers between 1/n^2 and n.

The backward works on the logarithms L of the matrices: `L' = L - logsumexp(L)` has the gradient
`dL = dL' - exp(L') * sum(dL')`, which never divides. The derivative of a division would square the divisor.

Inside, tokens are last: matrices `[n, n, T]` are summed over n without a stride-n access (5 times faster on a CPU).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .precision import no_autocast


def sinkhorn_reference(logits: Tensor, iters: int) -> Tensor:
    """`sinkhorn` in plain operations: a chain of log-softmaxes, then exp."""
    with no_autocast(logits):
        log = logits
        for _ in range(iters):
            log = log.log_softmax(-1).log_softmax(-2)
        return log.exp()


def sinkhorn(logits: Tensor, iters: int) -> Tensor:
    """Doubly stochastic matrices from logits.

    Softmax over k, normalise over j, then `iters - 1` times: normalise over k, normalise over j. So sums over j are 1
    to rounding, sums over k as near as `iters` allows. Equals transformers' `DeepseekV4HyperConnection` at hc_eps=0.

    Args:
        logits: `[..., n, n]` (j, k), float32 or float64.
        iters: number of iterations, at least 1.

    Returns:
        `[..., n, n]` in the dtype of `logits`.
    """
    return _Sinkhorn.apply(logits, iters)


class _Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, iters: int) -> Tensor:
        ctx.save_for_backward(logits)
        ctx.iters = iters
        with no_autocast(logits):
            return tokens_first(sinkhorn_steps(tokens_last(logits), iters)[-1], logits.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (logits,) = ctx.saved_tensors
        with no_autocast(logits):
            steps = sinkhorn_steps(tokens_last(logits), ctx.iters)
            return tokens_first(sinkhorn_gradient(tokens_last(grad), steps), logits.shape), None


def tokens_last(matrices: Tensor) -> Tensor:
    """`[..., n, n]` to contiguous `[n, n, T]`."""
    return matrices.flatten(0, -3).permute(1, 2, 0).contiguous()


def tokens_first(matrices: Tensor, shape: torch.Size) -> Tensor:
    """`[n, n, T]` to a view of shape `[..., n, n]`."""
    return matrices.permute(2, 0, 1).view(shape)


def sinkhorn_steps(logits: Tensor, iters: int) -> list[Tensor]:
    """All `2 * iters` normalised matrices for `logits[n, n, T]`, the last one doubly stochastic."""
    log = logits.log_softmax(1)
    steps = [log.exp(), log.softmax(0)]
    for _ in range(iters - 1):
        for dim in (1, 0):
            steps.append(steps[-1] / steps[-1].sum(dim, keepdim=True))
    return steps


def sinkhorn_gradient(grad: Tensor, steps: list[Tensor]) -> Tensor:
    """The gradient for the logits from that for the last of `steps`, both `[n, n, T]`."""
    grad = grad * steps[-1]
    for i in reversed(range(len(steps))):
        dim = 1 if i % 2 == 0 else 0
        grad = torch.addcmul(grad, steps[i], grad.sum(dim, keepdim=True), value=-1)
    return grad
