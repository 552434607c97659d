"""`ops.depth_sum`, `ops.delta_attention`, mHC-lite's coefficients and the read-out, against formulas in float64."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from resswap.ops import (
    delta_attention,
    delta_attention_reference,
    depth_sum,
    depth_sum_reference,
    mhc_lite_coefficients,
    mhc_lite_read,
    mhc_lite_read_reference,
    readout_streams,
    readout_streams_reference,
    write_streams,
)

EPS, N, WIDTH = 1e-5, 3, 6


def delta_by_formula(gate, query, key_weight, h, *deltas):
    v = torch.stack(deltas)
    alpha = torch.einsum("c,i...c->i...", query, F.rms_norm(v, v.shape[-1:], key_weight, EPS)).softmax(0)
    return h + gate * torch.einsum("i...,i...c->...c", alpha, v)


def sum_by_formula(weights, *sources):
    return torch.einsum("i,i...c->...c", weights, torch.stack(sources))


def lite_by_formula(streams, fn, scale, base):
    n = streams.shape[-2]
    flat = streams.flatten(-2)
    m = F.linear(F.rms_norm(flat, flat.shape[-1:], eps=EPS), fn)
    pre = (scale[0] * m[..., :n] + base[:n]).sigmoid()
    post = 2 * (scale[1] * m[..., n : 2 * n] + base[n : 2 * n]).sigmoid()
    weights = (scale[2] * m[..., 2 * n :] + base[2 * n :]).softmax(-1)
    every = [torch.eye(n).double()[list(p)] for p in itertools.permutations(range(n))]  # row j has its 1 at p[j]
    comb = torch.einsum("...r,rjk->...jk", weights, torch.stack(every))
    return torch.einsum("...j,...jc->...c", pre, streams), streams, post, comb


def readout_by_formula(streams, fn, scale, base):
    flat = streams.flatten(-2)
    pre = (scale * F.linear(F.rms_norm(flat, flat.shape[-1:], eps=EPS), fn) + base).sigmoid()
    return torch.einsum("...j,...jc->...c", pre, streams)


STREAMS, ROW = (2, 5, N, WIDTH), (2, 5, WIDTH)
OUTPUTS = 2 * N + 6
# For each function: the sizes of its tensors, the function, its plain reference and the formula.
CASES = {
    "delta": (
        [(1,), (WIDTH,), (WIDTH,), *[ROW] * 4],
        lambda g, q, w, h, *v: delta_attention(h, v, q, w, g, EPS),
        lambda g, q, w, h, *v: delta_attention_reference(h, v, q, w, g, EPS),
        delta_by_formula,
    ),
    "delta, no weight": (
        [(1,), (WIDTH,), *[ROW] * 4],
        lambda g, q, h, *v: delta_attention(h, v, q, None, g, EPS),
        lambda g, q, h, *v: delta_attention_reference(h, v, q, None, g, EPS),
        lambda g, q, h, *v: delta_by_formula(g, q, None, h, *v),
    ),
    "sum": (
        [(4,), *[ROW] * 4],
        lambda w, *v: depth_sum(v, w),
        lambda w, *v: depth_sum_reference(v, w),
        sum_by_formula,
    ),
    "lite": (
        [STREAMS, (OUTPUTS, N * WIDTH), (3,), (OUTPUTS,)],
        lambda *args: mhc_lite_read(*args, EPS),
        lambda *args: mhc_lite_read_reference(*args, EPS),
        lite_by_formula,
    ),
    "readout": (
        [STREAMS, (N, N * WIDTH), (1,), (N,)],
        lambda *args: readout_streams(*args, EPS),
        lambda *args: readout_streams_reference(*args, EPS),
        readout_by_formula,
    ),
}
EACH = pytest.mark.parametrize("name", CASES)


def tensors(name, dtype=torch.float64, grad=True, scale=1.0):
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(size, generator=generator, dtype=torch.float64) * scale for size in CASES[name][0]]
    return [tensor.to(dtype).requires_grad_(grad) for tensor in made]


def total(outputs, factor=1.0):
    outputs = (outputs,) if isinstance(outputs, torch.Tensor) else outputs
    return sum(((i + 1) * factor * out.double()).sin().sum() for i, out in enumerate(outputs))


@EACH
@pytest.mark.parametrize("version", [1, 2], ids=["fast", "plain"])
def test_formula(name, version):
    function, formula = CASES[name][version], CASES[name][3]
    args = tensors(name)
    got, expected = function(*args), formula(*args)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad(total(got), args), torch.autograd.grad(total(expected), args), rtol=1e-10, atol=1e-10
    )


@EACH
def test_gradcheck_also_where_an_input_is_used_again(name):
    function = CASES[name][1]
    assert torch.autograd.gradcheck(function, tensors(name))

    def again(*args):
        first = function(*args)
        out = first if isinstance(first, torch.Tensor) else first[0]
        if args[0].shape == STREAMS:  # the streams that went in are written to, and read once more
            mixed = args[0] * 2 + out.unsqueeze(-2).tanh()
            return function(mixed, *args[1:])
        return function(*args[:-1], args[-1] * out.tanh())

    assert torch.autograd.gradcheck(again, tensors(name))


@EACH
def test_frozen_inputs(name):
    function, formula = CASES[name][1], CASES[name][3]
    for frozen in range(len(CASES[name][0])):
        args = tensors(name)
        args[frozen].requires_grad_(False)
        leaves = [tensor for tensor in args if tensor.requires_grad]
        got = torch.autograd.grad(total(function(*args)), leaves)
        torch.testing.assert_close(got, torch.autograd.grad(total(formula(*args)), leaves))


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_dtypes_are_kept_and_rounded_once(name, dtype, autocast):
    args = tensors(name, dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        out = CASES[name][1](*args)
    exact = CASES[name][3](*(tensor.detach().double() for tensor in args))
    if name == "lite":
        assert out[2].dtype == out[3].dtype == torch.float32  # the coefficients
        out, exact = out[0], exact[0]
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), exact, rtol=0.51 * torch.finfo(dtype).eps, atol=2e-5)
    out.sum().backward()
    assert all(tensor.grad is None or tensor.grad.dtype == dtype for tensor in args)


@pytest.mark.parametrize(("name", "compiled"), [*((name, False) for name in CASES), ("delta", True), ("lite", True)])
def test_extreme_logits_and_gradients(name, compiled):
    """Logits up to ±50 and upstream gradients of 1e4 in float32, in eager and by inductor, against float64."""
    args = tensors(name, torch.float32, grad=False)
    with torch.no_grad():
        if name in ("lite", "readout"):
            args[-1].copy_(args[-1].sign() * 50)
        elif name != "sum":
            args[1].mul_(50 / args[1].norm())  # the query
    args = [tensor.requires_grad_() for tensor in args]
    exact = [tensor.detach().double().requires_grad_() for tensor in args]
    function = torch.compile(CASES[name][1], fullgraph=True) if compiled else CASES[name][1]
    got, expected = function(*args), CASES[name][3](*exact)
    got, expected = ((out,) if isinstance(out, torch.Tensor) else out for out in (got, expected))
    upstream = [torch.randn_like(out) * 1e4 for out in got]
    grads = torch.autograd.grad(got, args, upstream)
    expected_grads = torch.autograd.grad(expected, exact, [u.double() for u in upstream])
    for out, reference in zip(got, expected, strict=True):
        torch.testing.assert_close(out.double(), reference, rtol=1e-5, atol=1e-5)
    for grad, reference in zip(grads, expected_grads, strict=True):
        assert grad.isfinite().all()
        torch.testing.assert_close(grad.double(), reference, rtol=1e-4, atol=1e-6 * 1e4)
    torch.compiler.reset()


@EACH
def test_many_tokens_go_through_in_spans(name, monkeypatch):
    args = tensors(name, torch.float32)
    expected = CASES[name][1](*args)
    expected_grads = torch.autograd.grad(total(expected), args)
    monkeypatch.setattr("resswap.ops.spans.CPU_SPAN", 4 * WIDTH)
    got = CASES[name][1](*args)
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(torch.autograd.grad(total(got), args), expected_grads, rtol=1e-5, atol=1e-5)


@EACH
def test_nothing_large_is_saved(name):
    """What is kept for the backward besides the inputs is a few numbers for each token."""
    args = tensors(name, torch.bfloat16)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        CASES[name][1](*args)
    known = {tensor.data_ptr() for tensor in args}
    tokens = 10
    assert sum(t.numel() for t in saved if t.data_ptr() not in known) <= tokens * (OUTPUTS + 2)


def test_permutations_of_two_to_five_streams_are_doubly_stochastic():
    for n in range(2, 6):
        count = len(list(itertools.permutations(range(n))))
        generator = torch.Generator().manual_seed(n)
        streams = torch.randn(50, n, 4, generator=generator)
        fn, base = (torch.randn(size, generator=generator) for size in ((2 * n + count, 4 * n), (2 * n + count,)))
        comb = mhc_lite_coefficients(streams, fn, torch.full((3,), 3.0), base, EPS)[2]
        assert comb.min() >= 0
        torch.testing.assert_close(comb.sum(-1), torch.ones(50, n), rtol=0, atol=1e-5)
        torch.testing.assert_close(comb.sum(-2), torch.ones(50, n), rtol=0, atol=1e-6)
        assert n == 2 or (comb - comb.mT).abs().max() > 0.1


def test_a_permutation_moves_the_streams_as_it_says():
    """All weight on one permutation p: what was stream j is stream p[j] afterwards."""
    streams, y = torch.randn(1, 1, 3, 4), torch.zeros(1, 1, 4)
    for r, p in enumerate(itertools.permutations(range(3))):
        base = torch.zeros(12)
        base[6 + r] = 100
        _, kept, post, comb = mhc_lite_read(streams, torch.zeros(12, 12), torch.ones(3), base, EPS)
        moved = write_streams(kept, y, post, comb)
        for j in range(3):
            torch.testing.assert_close(moved[0, 0, p[j]], streams[0, 0, j])
