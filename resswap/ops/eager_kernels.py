"""The inner loops of the hand-written functions, in single operations. No autograd here.

Streams x are `[T, n, C]`, T the number of tokens, and a source v of a depth attention is `[T, C]`. Sums run in float32
(float64 for float64) over a bounded number of tokens at a time, so no wide copy of all streams exists.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .precision import wide
from .spans import spans


def write(x: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """`[T, n, C]` from x `[T, n, C]`, y `[T, 1, C]`, post `[T, n, 1]` and comb `[T, n, n]` (j, k)."""
    out, matrix = torch.empty_like(x), comb.mT
    for s in spans(x):
        total = out[s] if out.dtype == matrix.dtype else torch.empty_like(out[s], dtype=matrix.dtype)
        torch.mul(post[s], y[s].to(matrix.dtype), out=total)
        add_product(total, matrix[s], x[s].to(matrix.dtype))
        if total.dtype != out.dtype:
            out[s] = total
    return out


def write_backward(
    x: Tensor, grad: Tensor, y: Tensor, post: Tensor, comb: Tensor, needs: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """The gradients for `write`'s inputs, those that are needed, from that for its output."""
    need_x, need_y, need_post, need_comb = needs
    grad_x = torch.empty_like(x) if need_x else None
    grad_y = torch.empty(y.shape, dtype=y.dtype, device=y.device) if need_y else None
    grad_post = torch.empty_like(post, memory_format=torch.contiguous_format) if need_post else None
    grad_comb = torch.empty_like(comb, memory_format=torch.contiguous_format) if need_comb else None
    for s in spans(x):
        wide_grad = grad[s].to(comb.dtype)
        if grad_comb is not None:
            torch.bmm(x[s].to(comb.dtype), wide_grad.mT, out=grad_comb[s])
        if grad_post is not None:
            torch.bmm(wide_grad, y[s].to(comb.dtype).mT, out=grad_post[s])
        if grad_y is not None:
            grad_y[s] = product_of(post[s].mT, wide_grad)
        if grad_x is not None:
            total = grad_x[s] if grad_x.dtype == comb.dtype else torch.empty_like(wide_grad)
            add_product(total, comb[s], wide_grad, beta=0)
            if total.dtype != grad_x.dtype:
                grad_x[s] = total
    return grad_x, grad_y, grad_post, grad_comb


def read(x: Tensor, pre: Tensor) -> Tensor:
    """`[T, C]` from x `[T, n, C]` and pre `[T, n]`, in x's dtype."""
    out = torch.empty_like(x[:, :1], memory_format=torch.contiguous_format)
    for s in spans(x):
        out[s] = product_of(pre[s, None], x[s])
    return out[:, 0]


def dot(x: Tensor, grad: Tensor) -> Tensor:
    """`[T, n]` from x `[T, n, C]` and grad `[T, 1, C]`, wide."""
    out = torch.empty(*x.shape[:2], 1, dtype=wide(x.dtype), device=x.device)
    for s in spans(x):
        torch.bmm(x[s].to(out.dtype), grad[s].to(out.dtype).mT, out=out[s])
    return out[..., 0]


def add_read_gradient(total: Tensor, grad: Tensor, pre: Tensor) -> None:
    """Add `pre_j grad` to `total[:, j]`, for grad `[T, 1, C]` and pre `[T, n]`, in place."""
    for s, wide_total in _totals(total):
        add_product(wide_total, pre[s, :, None], grad[s].to(wide_total.dtype))


def add_dynamic_read_gradient(
    total: Tensor,
    x: Tensor,
    grad: Tensor | None,
    pre: Tensor,
    grad_projected: Tensor | None,
    grad_square: Tensor | None,
    weight: Tensor,
) -> None:
    """Add a dynamic read's gradient for the streams to `total` `[T, n, C]`, in place.

    Args:
        grad: for what was read, `[T, 1, C]`.
        pre: `[T, n]`.
        grad_projected: for the projected rows, `[T, R, P]`.
        grad_square: for their mean squares, `[T, R]`.
        weight: the projection, `[P, n C / R]`.
    """
    outputs, width = weight.shape
    for s, wide_total in _totals(total):
        if grad is not None:
            add_product(wide_total, pre[s, :, None], grad[s].to(wide_total.dtype))
        if grad_projected is not None and grad_square is not None:
            wide_total.addcmul_(x[s].to(wide_total.dtype), grad_square[s, :, None], value=2 / width)
            wide_total.view(-1, width).addmm_(grad_projected[s].reshape(-1, outputs), weight)


def measure(v: Tensor, probe: Tensor) -> tuple[Tensor, Tensor]:
    """(v . probe, the norm of v), each `[T]`, for probe `[C]`."""
    product = probe.new_empty(v.shape[0])
    norm = torch.empty_like(product)
    for s in spans(v):
        wide_v = v[s].to(probe.dtype)
        torch.mv(wide_v, probe, out=product[s])
        torch.linalg.vector_norm(wide_v, dim=-1, out=norm[s])
    return product, norm


def source_dot(v: Tensor, grad: Tensor) -> Tensor:
    """`v . grad` for each token, `[T]`, wide."""
    out = torch.empty(v.shape[0], dtype=wide(v.dtype), device=v.device)
    for s in spans(v):
        torch.sum(v[s].to(out.dtype) * grad[s].to(out.dtype), -1, out=out[s])
    return out


def source_gradient(
    v: Tensor, grad: Tensor, weight: Tensor, shrink: Tensor, grad_product: Tensor, probe: Tensor
) -> Tensor:
    """`weight grad + shrink v + grad_product probe`, `[T, C]`; weight, shrink and grad_product are `[T]`."""
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    for s in spans(v):
        total = out[s] if out.dtype == probe.dtype else torch.empty_like(out[s], dtype=probe.dtype)
        torch.mul(weight[s, None], grad[s].to(probe.dtype), out=total)
        total.addcmul_(shrink[s, None], v[s].to(probe.dtype)).addcmul_(grad_product[s, None], probe)
        if total.dtype != out.dtype:
            out[s] = total
    return out


def _totals(tensor: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Spans of a tensor, wide, to be changed in place; then they are put back."""
    for s in spans(tensor):
        total = tensor[s].to(wide(tensor.dtype))
        yield s, total
        if total.dtype != tensor.dtype:
            tensor[s] = total


def add_product(out: Tensor, weights: Tensor, rows: Tensor, beta: int = 1) -> Tensor:
    """`out = beta * out + weights @ rows`, `[t, p, C]` from `[t, p, q]` and `[t, q, C]`, never in TF32 or bfloat16.

    Rounded weights would no longer sum to 1, and equal streams would drift: so a matrix product is used only where
    nothing can have lowered its precision.
    """
    if rows.shape[1] > 1 and out.device.type == "cpu" and torch.get_float32_matmul_precision() == "highest":
        return out.baddbmm_(weights, rows, beta=beta)
    for q in range(rows.shape[1]):
        weight, row = weights[:, :, q, None], rows[:, q, None]
        if q == 0 and beta == 0:
            torch.mul(weight, row, out=out)
        else:
            out.addcmul_(weight, row)
    return out


def product_of(weights: Tensor, rows: Tensor) -> Tensor:
    """`weights @ rows`, as in `add_product`; contiguous, as else baddbmm_ goes through the tokens one by one."""
    out = rows.new_empty(weights.shape[0], weights.shape[1], rows.shape[2], dtype=weights.dtype)
    return add_product(out, weights.contiguous(), rows.to(weights.dtype), beta=0)


@dataclass(frozen=True)
class Kernels:
    """One implementation of every inner loop; for what they do see the functions of this file."""

    write: Callable
    write_backward: Callable
    read: Callable
    dot: Callable
    add_read_gradient: Callable
    add_dynamic_read_gradient: Callable
    measure: Callable
    source_dot: Callable
    source_gradient: Callable


EAGER = Kernels(
    write=write,
    write_backward=write_backward,
    read=read,
    dot=dot,
    add_read_gradient=add_read_gradient,
    add_dynamic_read_gradient=add_dynamic_read_gradient,
    measure=measure,
    source_dot=source_dot,
    source_gradient=source_gradient,
)
