"""`ops.sinkhorn` against a float64 formula written out here."""

import pytest
import torch

from resswap.ops import sinkhorn, sinkhorn_reference


def by_division(logits, iters):
    """The formula itself: exponentiate, then divide rows (k) and columns (j) in turn."""
    matrix = logits.exp()
    for _ in range(iters):
        matrix = matrix / matrix.sum(-1, keepdim=True)
        matrix = matrix / matrix.sum(-2, keepdim=True)
    return matrix


def logits(*shape, dtype=torch.float32, seed=0, low=-3.0, high=3.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(shape, generator=generator, dtype=torch.float64).mul(high - low).add(low).to(dtype)


@pytest.mark.parametrize("function", [sinkhorn, sinkhorn_reference])
@pytest.mark.parametrize("n", range(1, 9))
@pytest.mark.parametrize("iters", [1, 2, 20])
def test_formula(function, n, iters):
    x = logits(5, 2, n, n)
    out = function(x, iters)
    assert out.dtype == torch.float32 and out.shape == x.shape
    torch.testing.assert_close(out.double(), by_division(x.double(), iters), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(out.sum(-2), torch.ones(5, 2, n), rtol=0, atol=3e-7)
    exact = function(x.double(), iters)
    torch.testing.assert_close(exact, by_division(x.double(), iters), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(exact.sum(-2), torch.ones(5, 2, n).double(), rtol=0, atol=1e-15)


def test_the_order_of_the_two_normalisations_matters():
    x = logits(4, 4, dtype=torch.float64)
    assert not torch.allclose(sinkhorn(x, 1), sinkhorn(x.mT, 1).mT)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_gradcheck(n):
    x = logits(3, n, n, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: sinkhorn(x, 6), (x,))


def extremes():
    """Logits between -50 and 50, of exactly +-50, and all but one far below."""
    uniform = logits(64, 4, 4, low=-50, high=50)
    corners = logits(64, 4, 4, seed=1).sign() * 50
    saturated = torch.eye(4).expand(1, 4, 4) * 100 - 50
    return torch.cat([uniform, corners, saturated])


@pytest.mark.parametrize("compiled", [False, True])
def test_extreme_logits_and_gradients(compiled):
    x = extremes().requires_grad_()
    grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(2)) * 1e4
    exact = x.detach().double().requires_grad_()
    expected = by_division(exact, 20)
    expected.backward(grad.double())
    function = torch.compile(sinkhorn, fullgraph=True) if compiled else sinkhorn
    out = function(x, 20)
    out.backward(grad)
    assert out.isfinite().all() and x.grad.isfinite().all()
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-6)
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=0, atol=3e-6 * 1e4)


def test_logits_beyond_the_range_of_exp():
    x = (extremes() * 20).requires_grad_()
    out = sinkhorn(x, 20)
    out.backward(torch.full_like(out, 1e4))
    assert out.isfinite().all() and x.grad.isfinite().all()


def test_layouts_and_empty_batches():
    x = logits(6, 5, 3, 3)
    torch.testing.assert_close(sinkhorn(x.transpose(0, 1), 4), sinkhorn(x, 4).transpose(0, 1))
    torch.testing.assert_close(sinkhorn(x.mT, 4), sinkhorn(x.mT.contiguous(), 4))
    torch.testing.assert_close(sinkhorn(x[0, 0], 4), sinkhorn(x, 4)[0, 0])
    empty = torch.empty(0, 3, 3, requires_grad=True)
    sinkhorn(empty, 4).sum().backward()
    assert empty.grad.shape == empty.shape


def test_autocast_changes_nothing():
    x = logits(7, 4, 4)
    expected = sinkhorn(x, 20)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(sinkhorn(x, 20), expected, rtol=0, atol=0)


def test_no_graph_without_gradients():
    x = logits(2, 4, 4).requires_grad_()
    with torch.no_grad():
        assert sinkhorn(x, 20).grad_fn is None
    assert sinkhorn(x.detach(), 20).grad_fn is None
