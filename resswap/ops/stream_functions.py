"""Reading and writing residual streams with hand-written gradients; see `streams` for the formulas.

Saved for the backward are tensors that are alive anyway (streams, y) and a few numbers per token; everything else is
recomputed. Sums run in float32 over a bounded number of tokens at a time, so no wide copy of all streams exists and,
on a CPU, a span stays in the cache. Inside, shapes are `[T, n, C]`, T the number of tokens.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .plain import Gradients, gradients, needs_plain_backward, plain_backward
from .precision import no_autocast, wide
from .spans import spans
from .stream_formulas import Head, dynamic_read_reference, read_streams_reference, write_streams_reference

# Set on a gradient that `Write` has just made, so that a read's backward may add to it in place.
_FRESH = "_resswap_fresh"


class Write(torch.autograd.Function):
    """`X'_k = sum_j comb_jk X_j + post_k y`."""

    @staticmethod
    def forward(ctx: Any, streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        ctx.save_for_backward(streams, y, post, comb)
        with no_autocast(streams):
            x, y, weights, matrix = _tokens(streams), _row(y), _row(post).mT, _tokens(comb).mT
            out = torch.empty_like(x)
            for s in spans(x):
                total = out[s] if out.dtype == matrix.dtype else torch.empty_like(out[s], dtype=matrix.dtype)
                torch.mul(weights[s], y[s].to(matrix.dtype), out=total)
                _add_product(total, matrix[s], x[s].to(matrix.dtype))
                if total.dtype != out.dtype:
                    out[s] = total
            return out.view(streams.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        if needs_plain_backward(grad):
            return plain_backward(write_streams_reference, ctx.saved_tensors, [grad])
        streams, y, post, comb = ctx.saved_tensors
        need_streams, need_y, need_post, need_comb = ctx.needs_input_grad
        with no_autocast(streams):
            x, g, row, weights, matrix = _tokens(streams), _tokens(grad), _row(y), _row(post), _tokens(comb)
            grad_streams = torch.empty_like(streams, memory_format=torch.contiguous_format)
            setattr(grad_streams, _FRESH, True)
            grad_x = grad_streams.view(x.shape)
            grad_y, grad_post, grad_comb = (
                torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (y, post, comb)
            )
            grad_row, grad_weights, grad_matrix = _row(grad_y), _row(grad_post), _tokens(grad_comb)
            for s in spans(x):
                wide_g = g[s].to(matrix.dtype)
                if need_comb:
                    torch.bmm(x[s].to(matrix.dtype), wide_g.mT, out=grad_matrix[s])
                if need_post:
                    grad_weights.mT[s] = torch.bmm(wide_g, row[s].to(wide_g.dtype).mT)
                if need_y:
                    grad_row[s] = _product(weights[s], wide_g)
                if need_streams:
                    total = grad_x[s] if grad_x.dtype == wide_g.dtype else torch.empty_like(wide_g)
                    _add_product(total, matrix[s], wide_g, beta=0)
                    if total.dtype != grad_x.dtype:
                        grad_x[s] = total
            return (
                grad_streams if need_streams else None,
                grad_y if need_y else None,
                grad_post if need_post else None,
                grad_comb if need_comb else None,
            )


class Read(torch.autograd.Function):
    """`x = sum_j pre_j X_j`, and the streams handed on."""

    @staticmethod
    def forward(ctx: Any, streams: Tensor, pre: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(streams, pre)
        ctx.set_materialize_grads(False)
        with no_autocast(streams):
            x = _read(_tokens(streams), pre.reshape(-1, pre.shape[-1]))
            return x.view(*streams.shape[:-2], streams.shape[-1]), streams

    @staticmethod
    def backward(ctx: Any, grad_x: Tensor | None, grad: Tensor | None) -> Gradients:
        if needs_plain_backward(grad_x, grad):
            return plain_backward(_read_reference, ctx.saved_tensors, [grad_x, grad])
        streams, pre = ctx.saved_tensors
        if grad_x is None:
            return grad, None
        with no_autocast(streams):
            x, grad_x = _tokens(streams), grad_x.reshape(-1, 1, grad_x.shape[-1])
            grad_pre = _dot(x, grad_x).view(pre.shape) if ctx.needs_input_grad[1] else None
            if ctx.needs_input_grad[0]:
                grad = _accumulator(grad, streams)
                weights = pre.reshape(-1, pre.shape[-1], 1)
                for s, total in _totals(grad.view(x.shape)):
                    _add_product(total, weights[s], grad_x[s].to(total.dtype))
            return grad, grad_pre


class DynamicRead(torch.autograd.Function):
    """Coefficients from the streams, x from both, and the streams handed on.

    A row is what fn projects: all streams of a token `[n C]` (mHC) or one of them `[C]` (Hyper-Connections). `head`
    makes the coefficients, tokens last, from the projections of the normalised rows.
    """

    @staticmethod
    def forward(
        ctx: Any, streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, head: Head, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.coefficients = partial(_coefficients, head=head, eps=eps)
        ctx.reference = partial(dynamic_read_reference, head=head, eps=eps)
        with no_autocast(streams):
            x, weight = _tokens(streams), fn.to(wide(streams.dtype))
            outputs, width = weight.shape
            projected = weight.new_empty(x.shape[0], x.shape[1] * x.shape[2] // width, outputs)
            square = weight.new_empty(projected.shape[:2])
            for s in spans(x):
                rows = x[s].to(weight.dtype).view(-1, width)
                torch.mm(rows, weight.t(), out=projected[s].view(-1, outputs))
                torch.linalg.vector_norm(rows, dim=-1, out=square[s].view(-1))
            square.square_().div_(width)
            ctx.save_for_backward(streams, fn, projected, square, scale, base)
            pre, post, comb = ctx.coefficients(projected, square, scale, base)
            shape = streams.shape[:-1]
            branch_input = _read(x, pre).view(*shape[:-1], x.shape[-1])
            return branch_input, streams, post.view(shape), comb.view(*shape, shape[-1])

    @staticmethod
    def backward(
        ctx: Any, grad_x: Tensor | None, grad: Tensor | None, grad_post: Tensor | None, grad_comb: Tensor | None
    ) -> Gradients:
        streams, fn, *small = ctx.saved_tensors
        grads = [grad_x, grad, grad_post, grad_comb]
        if needs_plain_backward(*grads):
            return *plain_backward(ctx.reference, [streams, fn, *small[2:]], grads), None, None
        need_streams, need_fn, need_scale, need_base = ctx.needs_input_grad[:4]
        with no_autocast(streams):
            x, weight = _tokens(streams), fn.to(wide(streams.dtype))
            outputs, width = weight.shape
            grad_x = None if grad_x is None else _row(grad_x)

            # The small part, from the projections on, is left to autograd.
            needs = (need_streams or need_fn, need_streams, need_scale, need_base)
            small = [t.detach().requires_grad_(need) for t, need in zip(small, needs, strict=True)]
            with torch.enable_grad():
                pre, post, comb = ctx.coefficients(*small)
            grad_pre = None if grad_x is None else _dot(x, grad_x)
            grad_projected, grad_square, grad_scale, grad_base = gradients(
                (pre, post, comb), small, (grad_pre, grad_post, grad_comb)
            )

            if need_streams:
                grad = _accumulator(grad, streams)
                weights = pre.detach()[:, :, None]
                for s, total in _totals(grad.view(x.shape)):
                    if grad_x is not None:
                        _add_product(total, weights[s], grad_x[s].to(total.dtype))
                    if grad_projected is not None and grad_square is not None:
                        total.addcmul_(x[s].to(total.dtype), grad_square[s, :, None], value=2 / width)
                        total.view(-1, width).addmm_(grad_projected[s].reshape(-1, outputs), weight)
            grad_fn = None
            if need_fn and grad_projected is not None:
                grad_fn = torch.zeros_like(weight)
                for s in spans(x):
                    grad_fn.addmm_(grad_projected[s].reshape(-1, outputs).t(), x[s].to(weight.dtype).view(-1, width))
                grad_fn = grad_fn.to(fn.dtype)
            return grad, grad_fn, grad_scale, grad_base, None, None


def _read_reference(streams: Tensor, pre: Tensor) -> tuple[Tensor, Tensor]:
    return read_streams_reference(streams, pre), streams


def _coefficients(
    projected: Tensor, square: Tensor, scale: Tensor, base: Tensor, head: Head, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(pre, post `[T, n]`, comb `[T, n, n]`) from the projected rows `[T, R, P]` and their mean squares `[T, R]`."""
    mixes = projected.permute(2, 1, 0).contiguous() * (square.t() + eps).rsqrt()
    pre, post, comb = head(mixes, scale, base)
    return pre.t(), post.t(), comb.permute(2, 0, 1)


def _tokens(tensor: Tensor) -> Tensor:
    """`[..., n, C]` as contiguous `[T, n, C]`."""
    return tensor.reshape(-1, *tensor.shape[-2:]).contiguous()


def _row(tensor: Tensor) -> Tensor:
    """`[..., C]` as `[T, 1, C]`."""
    return tensor.reshape(-1, 1, tensor.shape[-1])


def _totals(tensor: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Spans of a tensor, wide, to be changed in place; then they are put back."""
    for s in spans(tensor):
        total = tensor[s].to(wide(tensor.dtype))
        yield s, total
        if total.dtype != tensor.dtype:
            tensor[s] = total


def _add_product(out: Tensor, weights: Tensor, rows: Tensor, beta: int = 1) -> Tensor:
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


def _read(x: Tensor, pre: Tensor) -> Tensor:
    """`[T, C]` from x `[T, n, C]` and pre `[T, n]`, in x's dtype."""
    out = torch.empty_like(x[:, :1], memory_format=torch.contiguous_format)
    for s in spans(x):
        out[s] = _product(pre[s, None], x[s])
    return out[:, 0]


def _product(weights: Tensor, rows: Tensor) -> Tensor:
    """`weights @ rows`, as in `_add_product`; contiguous, as else baddbmm_ goes through the tokens one by one."""
    out = rows.new_empty(weights.shape[0], weights.shape[1], rows.shape[2], dtype=weights.dtype)
    return _add_product(out, weights.contiguous(), rows.to(weights.dtype), beta=0)


def _dot(x: Tensor, grad_x: Tensor) -> Tensor:
    """`[T, n]` from x `[T, n, C]` and grad_x `[T, 1, C]`, wide."""
    out = torch.empty(*x.shape[:2], 1, dtype=wide(x.dtype), device=x.device)
    for s in spans(x):
        torch.bmm(x[s].to(out.dtype), grad_x[s].to(out.dtype).mT, out=out[s])
    return out[..., 0]


def _accumulator(grad: Tensor | None, streams: Tensor) -> Tensor:
    """A contiguous tensor to add the streams' gradient to: the incoming one if nobody else can see it, or a copy."""
    if grad is None:
        return torch.zeros_like(streams, memory_format=torch.contiguous_format)
    if grad.is_contiguous() and getattr(grad, _FRESH, False) and grad._use_count() == 1:  # type: ignore[attr-defined]
        return grad
    return grad.clone(memory_format=torch.contiguous_format)
