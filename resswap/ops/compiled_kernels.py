"""The functions of `eager_kernels`, each one loop over memory once torch.compile has fused it."""

import torch
from torch import Tensor

from .eager_kernels import Kernels
from .precision import wide
from .spans import spans


@torch.compile
def write(x: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    n, streams, row = x.shape[1], x.to(comb.dtype).unbind(1), y[:, 0].to(comb.dtype)
    written = [sum((comb[:, j, k, None] * streams[j] for j in range(n)), start=post[:, k] * row) for k in range(n)]
    return torch.stack(written, 1).to(x.dtype)


@torch.compile
def write_backward(
    x: Tensor, grad: Tensor, y: Tensor, post: Tensor, comb: Tensor, needs: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    n, streams, grads = x.shape[1], x.to(comb.dtype).unbind(1), grad.to(comb.dtype).unbind(1)
    row = y[:, 0].to(comb.dtype)
    need_x, need_y, need_post, need_comb = needs
    grad_x = [sum(comb[:, j, k, None] * grads[k] for k in range(n)) for j in range(n)] if need_x else None
    grad_y = sum(post[:, k] * grads[k] for k in range(n)) if need_y else None
    grad_post = [(grads[k] * row).sum(-1) for k in range(n)] if need_post else None
    grad_comb = [(streams[j] * grads[k]).sum(-1) for j in range(n) for k in range(n)] if need_comb else None
    return (
        None if grad_x is None else torch.stack(grad_x, 1).to(x.dtype),
        None if grad_y is None else grad_y[:, None].to(y.dtype),
        None if grad_post is None else torch.stack(grad_post, 1)[..., None],
        None if grad_comb is None else torch.stack(grad_comb, 1).view(comb.shape),
    )


@torch.compile
def read(x: Tensor, pre: Tensor) -> Tensor:
    streams = x.to(pre.dtype).unbind(1)
    return sum(pre[:, j, None] * stream for j, stream in enumerate(streams)).to(x.dtype)


@torch.compile
def dot(x: Tensor, grad: Tensor) -> Tensor:
    row = grad[:, 0].to(wide(x.dtype))
    return torch.stack([(stream.to(row.dtype) * row).sum(-1) for stream in x.unbind(1)], 1)


@torch.compile
def add_read_gradient(total: Tensor, grad: Tensor, pre: Tensor) -> None:
    total.copy_(total.to(pre.dtype) + pre[:, :, None] * grad.to(pre.dtype))


def add_dynamic_read_gradient(
    total: Tensor,
    x: Tensor,
    grad: Tensor | None,
    pre: Tensor,
    grad_projected: Tensor | None,
    grad_square: Tensor | None,
    weight: Tensor,
) -> None:
    outputs, width = weight.shape
    if grad_projected is None or grad_square is None:
        if grad is not None:
            add_read_gradient(total, grad, pre)
        return
    grad = torch.zeros_like(x[:, :1]) if grad is None else grad
    for s in spans(total):
        product = torch.mm(grad_projected[s].reshape(-1, outputs), weight).view(x[s].shape)
        _add_all(total[s], x[s], grad[s], pre[s], grad_square[s] * (2 / width), product)


@torch.compile
def _add_all(total: Tensor, x: Tensor, grad: Tensor, pre: Tensor, factor: Tensor, product: Tensor) -> None:
    wide_total = total.to(pre.dtype) + pre[:, :, None] * grad.to(pre.dtype)
    total.copy_(wide_total + factor[:, :, None] * x.to(pre.dtype) + product)


@torch.compile
def measure(v: Tensor, probe: Tensor) -> tuple[Tensor, Tensor]:
    wide_v = v.to(probe.dtype)
    return (wide_v * probe).sum(-1), wide_v.square().sum(-1).sqrt()


@torch.compile
def source_dot(v: Tensor, grad: Tensor) -> Tensor:
    return (v.to(wide(v.dtype)) * grad).sum(-1)


@torch.compile
def source_gradient(
    v: Tensor, grad: Tensor, weight: Tensor, shrink: Tensor, grad_product: Tensor, probe: Tensor
) -> Tensor:
    return (weight[:, None] * grad + shrink[:, None] * v + grad_product[:, None] * probe).to(v.dtype)


@torch.compile
def mhc_read_few_compiled(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, sinkhorn_iters: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`mhc_read` for a few tokens without gradients, all in one: (x, post, comb)."""
    shape, n = streams.shape[:-1], streams.shape[-2]
    x = streams.reshape(-1, n, streams.shape[-1]).to(wide(streams.dtype))
    rows, scale, base = x.flatten(1), scale.to(x.dtype), base.to(x.dtype)
    mixes = (rows @ fn.to(x.dtype).t()) * (rows.square().mean(-1, keepdim=True) + eps).rsqrt()
    pre = (mixes[:, :n] * scale[0] + base[:n]).sigmoid()
    post = 2 * (mixes[:, n : 2 * n] * scale[1] + base[n : 2 * n]).sigmoid()
    logits = (mixes[:, 2 * n :] * scale[2] + base[2 * n :]).view(-1, n, n).double()
    # As in few_tokens: the matrices are u K v, each number of u and v a variable of its own. The first round uses
    # logarithms; after it every row and column has a number of 1/n^2 or more, beside which what underflows is nothing.
    k = [row.unbind(-1) for row in logits.log_softmax(-1).softmax(-2).unbind(1)]
    u, v = [torch.ones_like(k[0][0])] * n, [torch.ones_like(k[0][0])] * n
    for _ in range(sinkhorn_iters - 1):
        u = [1 / sum(k[i][j] * v[j] for j in range(n)) for i in range(n)]
        v = [1 / sum(k[i][j] * u[i] for i in range(n)) for j in range(n)]
    comb = torch.stack([torch.stack([u[i] * k[i][j] * v[j] for j in range(n)], -1) for i in range(n)], 1)
    branch_input = (pre[:, :, None] * x).sum(1).to(streams.dtype)
    return branch_input.view(*shape[:-1], -1), post.view(shape), comb.to(x.dtype).view(*shape, n)


COMPILED = Kernels(
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
