"""Sinkhorn-Knopp: from logits to doubly stochastic matrices (mHC, arXiv 2512.24880, equation 9).

Everything happens in the log domain, where a normalisation is `L' = L - logsumexp(L)`, a log-softmax, and its gradient
`dL = dL' - exp(L') * sum(dL')`: nothing divides, so no size of logits or gradients overflows. (The derivative of a
division squares the divisor; forty of them in a row have been seen to overflow.)

Inside, tokens are last: reducing `[n, n, T]` over n reads whole vectors (5 times faster than `[T, n, n]` on a CPU).
"""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .plain import needs_plain_backward, needs_transformable, plain_backward
from .precision import no_autocast


def sinkhorn_reference(logits: Tensor, iters: int) -> Tensor:
    """`sinkhorn` in plain operations."""
    with no_autocast(logits):
        log = logits
        for _ in range(iters):
            log = log.log_softmax(-1).log_softmax(-2)
        return log.exp()


def sinkhorn(logits: Tensor, iters: int) -> Tensor:
    """Doubly stochastic matrices from logits.

    Softmax over k, normalise over j, then `iters - 1` times: normalise over k, normalise over j. So the sums over j
    are 1 to rounding, those over k as nearly as `iters` allows. Equals transformers' `DeepseekV4HyperConnection` at
    hc_eps=0.

    Args:
        logits: `[..., n, n]` (j, k), float32 or float64.
        iters: number of iterations, at least 1.

    Returns:
        `[..., n, n]` in the dtype of `logits`.
    """
    matrices = sinkhorn_tokens_last(logits.reshape(-1, *logits.shape[-2:]).permute(1, 2, 0), iters)
    return matrices.permute(2, 0, 1).reshape(logits.shape)


def sinkhorn_tokens_last(logits: Tensor, iters: int) -> Tensor:
    """`sinkhorn` for `[n, n, T]`."""
    if needs_transformable():
        return _forward(logits, iters)
    # Traced by torch.compile the chain would cost many seconds per connection, so there it is one opaque operator.
    return _compiled_forward(logits, iters) if torch.compiler.is_compiling() else _Sinkhorn.apply(logits, iters)


class _Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, iters: int) -> Tensor:
        _save_for_backward(ctx, (logits, iters), None)
        return _forward(logits, iters)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        return _differentiate(ctx, grad, _backward)


def _save_for_backward(ctx: Any, inputs: tuple[Tensor, int], output: Tensor | None) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.iters = inputs[1]


def _differentiate(ctx: Any, grad: Tensor, backward: Callable) -> tuple[Tensor | None, None]:
    logits, iters = ctx.saved_tensors[0], ctx.iters
    if needs_plain_backward(grad):
        return *plain_backward(partial(_forward, iters=iters), [logits], [grad]), None
    return backward(logits, grad, iters), None


def _steps(logits: Tensor, iters: int) -> Iterator[tuple[int, Tensor]]:
    """All normalisations but the last: (the dimension, the logarithms after it)."""
    log = logits.contiguous()
    for i in range(2 * iters - 1):
        dim = 1 - i % 2
        log = log.log_softmax(dim)
        yield dim, log


def _forward(logits: Tensor, iters: int) -> Tensor:
    """In plain operations too, so autograd can differentiate it; it only would save every step."""
    with no_autocast(logits):
        for _, log in _steps(logits, iters):
            last = log
        return last.softmax(0)


def _backward(logits: Tensor, grad: Tensor, iters: int) -> Tensor:
    with no_autocast(logits):
        steps = list(_steps(logits, iters))
        grad = torch._softmax_backward_data(grad.contiguous(), steps[-1][1].softmax(0), 0, grad.dtype)
        for dim, log in reversed(steps):
            grad = torch._log_softmax_backward_data(grad, log, dim, grad.dtype)
        return grad


# Named after this file's module, so that a copy shipped with a saved model does not redefine the library's operator.
_NAMESPACE = re.sub(r"\W", "_", __name__)
_compiled_forward = torch.library.custom_op(f"{_NAMESPACE}::forward", _forward, mutates_args=())
_compiled_backward = torch.library.custom_op(f"{_NAMESPACE}::backward", _backward, mutates_args=())


@_compiled_forward.register_fake
def _(logits: Tensor, iters: int) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


@_compiled_backward.register_fake
def _(logits: Tensor, grad: Tensor, iters: int) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


_compiled_forward.register_autograd(
    partial(_differentiate, backward=_compiled_backward), setup_context=_save_for_backward
)
