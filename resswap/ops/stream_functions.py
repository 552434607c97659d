"""Reading and writing residual streams with hand-written gradients; see `streams` for the formulas.

Saved for the backward are tensors that are alive anyway (streams, y) and a few numbers per token; everything else is
recomputed, the streams too if they were lent. Inside, shapes are `[T, n, C]`, T the number of tokens; the loops over
them are `kernels`.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .eager_kernels import Kernels
from .plain import Gradients, gradients, needs_plain_backward, plain_backward
from .precision import no_autocast, wide
from .spans import spans
from .stream_formulas import Head, dynamic_read_reference, read_streams_reference, write_streams_reference

# Set on a gradient that `Write` has just made, so that a read's backward may add to it in place.
_FRESH = "_resswap_fresh"


class Lent:
    """Streams that are not saved for the backward but written again there, from what their write had saved.

    Attributes:
        inputs: of that write: (streams, y, post, comb).
        again: the streams, from the first backward that needs them to the last.
    """

    def __init__(self, *inputs: Tensor) -> None:
        self.inputs = inputs
        self.again: Tensor | None = None

    def restore(self, inputs: tuple[Tensor, ...], kernels: Kernels, last: bool) -> Tensor:
        """The streams, written again from what is saved; part of a graph where gradients are differentiated."""
        if needs_plain_backward():
            return write_streams_reference(*inputs)
        streams = _write(*inputs, kernels) if self.again is None else self.again
        self.again = None if last else streams
        return streams


class Write(torch.autograd.Function):
    """`X'_k = sum_j comb_jk X_j + post_k y`."""

    @staticmethod
    def forward(
        ctx: Any, streams: Tensor, y: Tensor, post: Tensor, comb: Tensor, lent: Lent | None, kernels: Kernels
    ) -> Tensor:
        ctx.lent, ctx.kernels = lent, kernels
        ctx.save_for_backward(*_kept(streams, lent), y, post, comb)
        return _write(streams, y, post, comb, kernels)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Gradients:
        *kept, y, post, comb = ctx.saved_tensors
        streams = _streams(ctx, kept, last=False)
        if needs_plain_backward(grad):
            return *plain_backward(write_streams_reference, [streams, y, post, comb], [grad]), None, None
        with no_autocast(streams):
            grads = ctx.kernels.write_backward(
                _tokens(streams), _tokens(grad), _row(y), _row(post).mT, _tokens(comb), ctx.needs_input_grad[:4]
            )
            shapes = (streams.shape, y.shape, post.shape, comb.shape)
            outputs = [None if g is None else g.view(shape) for g, shape in zip(grads, shapes, strict=True)]
            if outputs[0] is not None:
                setattr(outputs[0], _FRESH, True)
            return *outputs, None, None


class Read(torch.autograd.Function):
    """`x = sum_j pre_j X_j`, and the streams handed on."""

    @staticmethod
    def forward(ctx: Any, streams: Tensor, pre: Tensor, lent: Lent | None, kernels: Kernels) -> tuple[Tensor, Tensor]:
        ctx.lent, ctx.kernels = lent, kernels
        ctx.save_for_backward(*_kept(streams, lent), pre)
        ctx.set_materialize_grads(False)
        with no_autocast(streams):
            x = kernels.read(_tokens(streams), pre.reshape(-1, pre.shape[-1]))
            return x.view(*streams.shape[:-2], streams.shape[-1]), streams

    @staticmethod
    def backward(ctx: Any, grad_x: Tensor | None, grad: Tensor | None) -> Gradients:
        *kept, pre = ctx.saved_tensors
        if grad_x is None and not needs_plain_backward(grad):
            return grad, None, None, None
        streams = _streams(ctx, kept, last=True)
        if needs_plain_backward(grad_x, grad):
            return *plain_backward(_read_reference, [streams, pre], [grad_x, grad]), None, None
        with no_autocast(streams):
            x, grad_x = _tokens(streams), _row(grad_x)
            grad_pre = ctx.kernels.dot(x, grad_x).view(pre.shape) if ctx.needs_input_grad[1] else None
            if ctx.needs_input_grad[0]:
                grad = _accumulator(grad, streams)
                ctx.kernels.add_read_gradient(grad.view(x.shape), grad_x, pre.reshape(-1, pre.shape[-1]))
            return grad, grad_pre, None, None


class DynamicRead(torch.autograd.Function):
    """Coefficients from the streams, x from both, and the streams handed on.

    A row is what fn projects: all streams of a token `[n C]` (mHC) or one of them `[C]` (Hyper-Connections). `head`
    makes the coefficients, tokens last, from the projections of the normalised rows.
    """

    @staticmethod
    def forward(
        ctx: Any,
        streams: Tensor,
        fn: Tensor,
        scale: Tensor,
        base: Tensor,
        head: Head,
        eps: float,
        lent: Lent | None,
        kernels: Kernels,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.lent, ctx.kernels = lent, kernels
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
            ctx.save_for_backward(*_kept(streams, lent), fn, projected, square, scale, base)
            pre, post, comb = ctx.coefficients(projected, square, scale, base)
            shape = streams.shape[:-1]
            branch_input = kernels.read(x, pre).view(*shape[:-1], x.shape[-1])
            return branch_input, streams, post.view(shape), comb.view(*shape, shape[-1])

    @staticmethod
    def backward(
        ctx: Any, grad_x: Tensor | None, grad: Tensor | None, grad_post: Tensor | None, grad_comb: Tensor | None
    ) -> Gradients:
        *kept, fn, projected, square, scale, base = ctx.saved_tensors
        streams, small = _streams(ctx, kept, last=True), [projected, square, scale, base]
        grads = [grad_x, grad, grad_post, grad_comb]
        if needs_plain_backward(*grads):
            found = plain_backward(ctx.reference, [streams, fn, scale, base], grads)
            return *found, None, None, None, None
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
            grad_pre = None if grad_x is None else ctx.kernels.dot(x, grad_x)
            grad_projected, grad_square, grad_scale, grad_base = gradients(
                (pre, post, comb), small, (grad_pre, grad_post, grad_comb)
            )

            if need_streams:
                grad = _accumulator(grad, streams)
                ctx.kernels.add_dynamic_read_gradient(
                    grad.view(x.shape), x, grad_x, pre.detach(), grad_projected, grad_square, weight
                )
            grad_fn = None
            if need_fn and grad_projected is not None:
                grad_fn = torch.zeros_like(weight)
                for s in spans(x):
                    grad_fn.addmm_(grad_projected[s].reshape(-1, outputs).t(), x[s].to(weight.dtype).view(-1, width))
                grad_fn = grad_fn.to(fn.dtype)
            return grad, grad_fn, grad_scale, grad_base, None, None, None, None


def _kept(streams: Tensor, lent: Lent | None) -> tuple[Tensor, ...]:
    """What to save of the streams: themselves, or what they can be written from again."""
    return (streams,) if lent is None else lent.inputs


def _streams(ctx: Any, kept: list[Tensor], last: bool) -> Tensor:
    return kept[0] if ctx.lent is None else ctx.lent.restore(tuple(kept), ctx.kernels, last)


def _write(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor, kernels: Kernels) -> Tensor:
    with no_autocast(streams):
        return kernels.write(_tokens(streams), _row(y), _row(post).mT, _tokens(comb)).view(streams.shape)


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


def _accumulator(grad: Tensor | None, streams: Tensor) -> Tensor:
    """A contiguous tensor to add the streams' gradient to: the incoming one if nobody else can see it, or a copy."""
    if grad is None:
        return torch.zeros_like(streams, memory_format=torch.contiguous_format)
    if grad.is_contiguous() and getattr(grad, _FRESH, False) and grad._use_count() == 1:  # type: ignore[attr-defined]
        return grad
    return grad.clone(memory_format=torch.contiguous_format)
