"""Second derivatives, function transforms and forward mode through the hand-written functions of `ops`."""

from types import SimpleNamespace

import pytest
import torch
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

from resswap.ops import (
    delta_attention,
    delta_attention_reference,
    depth_attention,
    depth_attention_reference,
    depth_sum,
    depth_sum_reference,
    hc_read,
    hc_read_reference,
    mhc_lite_read,
    mhc_lite_read_reference,
    mhc_read,
    mhc_read_reference,
    read_streams,
    read_streams_reference,
    readout_streams,
    readout_streams_reference,
    sinkhorn,
    sinkhorn_reference,
    write_streams,
    write_streams_reference,
)

N, WIDTH, ITERS, EPS = 2, 3, 4, 1e-5
FAST = SimpleNamespace(
    sinkhorn=sinkhorn,
    depth=depth_attention,
    delta=delta_attention,
    sum=depth_sum,
    mhc=mhc_read,
    lite=mhc_lite_read,
    hc=hc_read,
    read=read_streams,
    readout=readout_streams,
    write=write_streams,
)
PLAIN = SimpleNamespace(
    sinkhorn=sinkhorn_reference,
    depth=depth_attention_reference,
    delta=delta_attention_reference,
    sum=depth_sum_reference,
    mhc=mhc_read_reference,
    lite=mhc_lite_read_reference,
    hc=hc_read_reference,
    read=read_streams_reference,
    readout=readout_streams_reference,
    write=write_streams_reference,
)
COEFFICIENTS = (N + 2) * N
STREAMS, ROW = (2, N, WIDTH), (2, WIDTH)

# For each function: the sizes of its tensors, and how to call it.
CALLS = {
    "sinkhorn": ([(2, 3, 3)], lambda ops, x: ops.sinkhorn(x, ITERS)),
    "depth": ([(WIDTH,), (WIDTH,), ROW, ROW, ROW], lambda ops, q, w, *v: ops.depth(v, q, w, EPS)),
    "depth, no weight": ([(WIDTH,), ROW, ROW], lambda ops, q, *v: ops.depth(v, q, None, EPS)),
    "depth, one source twice": (
        [(WIDTH,), (WIDTH,), ROW, ROW],
        lambda ops, q, w, a, b: ops.depth([a, b, a], q, w, EPS),
    ),
    "mhc": (
        [STREAMS, (COEFFICIENTS, N * WIDTH), (3,), (COEFFICIENTS,)],
        lambda ops, *args: ops.mhc(*args, ITERS, EPS),
    ),
    "hc": ([STREAMS, (N + 2, WIDTH), (3,), (COEFFICIENTS,)], lambda ops, *args: ops.hc(*args, True, EPS)),
    "hc, linear": ([STREAMS, (N + 2, WIDTH), (3,), (COEFFICIENTS,)], lambda ops, *args: ops.hc(*args, False, EPS)),
    "hc, static": ([STREAMS, (COEFFICIENTS,)], lambda ops, x, base: ops.hc(x, None, None, base, True, EPS)),
    "delta": (
        [ROW, (WIDTH,), (WIDTH,), (1,), ROW, ROW],
        lambda ops, h, q, w, gate, *v: ops.delta(h, v, q, w, gate, EPS),
    ),
    "delta, no weight": ([ROW, (WIDTH,), (1,), ROW], lambda ops, h, q, gate, *v: ops.delta(h, v, q, None, gate, EPS)),
    "sum": ([(2,), ROW, ROW], lambda ops, w, *v: ops.sum(v, w)),
    "lite": ([STREAMS, (3 * N, N * WIDTH), (3,), (3 * N,)], lambda ops, *args: ops.lite(*args, EPS)),
    "readout": ([STREAMS, (N, N * WIDTH), (1,), (N,)], lambda ops, *args: ops.readout(*args, EPS)),
    "read": ([STREAMS, (2, N)], lambda ops, *args: ops.read(*args)),
    "read, static": ([STREAMS, (N,)], lambda ops, *args: ops.read(*args)),
    "write": ([STREAMS, ROW, (2, N), (2, N, N)], lambda ops, *args: ops.write(*args)),
    "write, static": ([STREAMS, ROW, (N,), (N, N)], lambda ops, *args: ops.write(*args)),
}
EACH = pytest.mark.parametrize("name", CALLS)


def tensors(sizes, seed=0, dtype=torch.float64, grad=True):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(grad) for s in sizes]


def total(outputs):
    """A scalar that depends on every output in an uneven and non-linear way."""
    outputs = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
    return sum(((i + 1) * out).sin().sum() for i, out in enumerate(outputs))


@EACH
def test_gradgradcheck(name):
    sizes, call = CALLS[name]
    assert gradgradcheck(lambda *args: call(FAST, *args), tensors(sizes))


@EACH
def test_gradgradcheck_with_one_input_trained_or_frozen(name):
    sizes, call = CALLS[name]
    for i in range(len(sizes)):
        for trained in ({i}, set(range(len(sizes))) - {i}):
            args = [t.requires_grad_(j in trained) for j, t in enumerate(tensors(sizes))]
            if trained:
                assert gradgradcheck(lambda *args: call(FAST, *args), args)  # noqa: B023


@EACH
def test_first_and_third_derivatives(name):
    """A gradient taken with create_graph=True is the same gradient; and it can be differentiated twice more."""
    sizes, call = CALLS[name]
    args = tensors(sizes)

    def derivatives(ops):
        first = torch.autograd.grad(total(call(ops, *args)), args, create_graph=True)
        second = torch.autograd.grad(total(first), args, create_graph=True)
        return first, second, torch.autograd.grad(total(second), args)

    torch.testing.assert_close(derivatives(FAST), derivatives(PLAIN))
    torch.testing.assert_close(derivatives(FAST)[0], torch.autograd.grad(total(call(FAST, *args)), args))


def test_only_some_outputs_used():
    sizes, call = CALLS["mhc"]
    args = tensors(sizes)
    for i in range(4):
        results = []
        for ops in (FAST, PLAIN):
            first = torch.autograd.grad(call(ops, *args)[i].sin().sum(), args, create_graph=True, allow_unused=True)
            first = [g for g in first if g is not None]
            results.append(torch.autograd.grad(total(first), args, allow_unused=True, materialize_grads=True))
        torch.testing.assert_close(*results)


# Two connections, with y made from x as in a model, so that the inputs of a write depend on one another.

MODEL = [ROW, (COEFFICIENTS, N * WIDTH), (COEFFICIENTS,), (N + 2, WIDTH), (COEFFICIENTS,), (3,), (WIDTH,), (WIDTH,)]


def model(ops, embeds, fn, base, hc_fn, hc_base, scale, query, key_weight):
    streams = embeds[..., None, :].expand(STREAMS)
    x, streams, post, comb = ops.mhc(streams, fn, scale, base, ITERS, EPS)
    streams = ops.write(streams, y := x.tanh() * embeds, post, comb)
    x, streams, post, comb = ops.hc(streams, hc_fn, scale, hc_base, True, EPS)
    streams = ops.write(streams, x.sin(), post, comb)
    return ops.depth([embeds, y, streams.sum(-2)], query, key_weight, EPS).square().sum()


def test_hessian_vector_products():
    """For all inputs at once, against the references and against differences of the ordinary gradient."""
    args, vector = tensors(MODEL), tensors(MODEL, seed=1, grad=False)

    def gradient(ops, args, **options):
        return torch.autograd.grad(model(ops, *args), args, **options)

    def product(ops):
        return torch.autograd.grad(gradient(ops, args, create_graph=True), args, vector)

    step = 1e-5
    moved = [
        gradient(FAST, [(a + sign * step * v).detach().requires_grad_() for a, v in zip(args, vector, strict=True)])
        for sign in (1, -1)
    ]
    differences = tuple((plus - minus) / (2 * step) for plus, minus in zip(*moved, strict=True))
    torch.testing.assert_close(product(FAST), product(PLAIN))
    torch.testing.assert_close(product(FAST), differences, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "wrap", [lambda f, *args: f(*args), lambda f, *args: checkpoint(f, *args, use_reentrant=False)]
)
def test_gradient_penalty_on_the_embeddings(dtype, wrap):
    """The gradient for one tensor only, then a backward through it into the parameters."""
    grads = []
    for ops in (FAST, PLAIN):
        args = tensors(MODEL, dtype=dtype)
        (grad,) = torch.autograd.grad(wrap(lambda *args: model(ops, *args), *args), args[0], create_graph=True)  # noqa: B023
        grad.square().sum().backward()
        assert all(t.grad.dtype == dtype for t in args)
        grads.append([t.grad for t in args])
    tolerance = {} if dtype == torch.float64 else {"rtol": 0.1, "atol": 0.5}
    torch.testing.assert_close(*grads, **tolerance)


def test_gradients_given_are_left_alone():
    sizes, call = CALLS["mhc"]
    args = tensors(sizes)
    outputs = call(FAST, *args)
    grads = [torch.ones_like(out) for out in outputs]
    torch.autograd.grad(outputs, args, grads, create_graph=True)
    assert all((grad == 1).all() and grad._version == 0 for grad in grads)


@EACH
def test_function_transforms(name):
    sizes, call = CALLS[name]
    args, tangents = tensors(sizes, grad=False), tuple(tensors(sizes, seed=1, grad=False))
    everything = tuple(range(len(args)))

    def transformed(ops):
        def loss(*args):
            return total(call(ops, *args))

        batch = [torch.stack([a, a.flip(0), a + 1]) for a in args]
        grad = torch.func.grad(loss, everything)
        return (
            grad(*args),
            torch.vmap(lambda *args: call(ops, *args))(*batch),
            torch.vmap(grad)(*batch),
            torch.func.jvp(grad, tuple(args), tangents),
            torch.func.hessian(loss)(*args),
        )

    torch.testing.assert_close(transformed(FAST), transformed(PLAIN))


def test_batched_gradients_and_forward_mode():
    args = tensors(MODEL)

    def function(*args):
        return model(FAST, *args)

    loop, batched = (torch.autograd.functional.hessian(function, tuple(args), vectorize=v) for v in (False, True))
    torch.testing.assert_close(batched, loop)
    assert gradcheck(function, args, check_forward_ad=True, check_batched_grad=True)
    loss, weights = function(*args), torch.tensor([1.0, 2.0], dtype=torch.float64)
    grads = torch.vmap(lambda w: torch.autograd.grad(loss, args, w, retain_graph=True))(weights)
    for got, expected in zip(grads, torch.autograd.grad(loss, args), strict=True):
        torch.testing.assert_close(got, torch.stack([expected, 2 * expected]))
    with forward_ad.dual_level():
        assert not function(*args).isnan()


def test_transforms_compile():
    args = [t.float() for t in tensors(MODEL, grad=False)]
    grad = torch.func.grad(lambda *args: model(FAST, *args), tuple(range(len(args))))
    torch.testing.assert_close(torch.compile(grad, backend="aot_eager", fullgraph=True)(*args), grad(*args))
