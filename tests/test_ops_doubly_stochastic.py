"""How doubly stochastic Sinkhorn-Knopp's matrices are, and what that is good for: products stay bounded."""

import pytest
import torch

import resswap
from resswap.ops import hc_coefficients, mhc_coefficients, mhc_lite_coefficients, sinkhorn


def normal_logits(scale, count=4096, n=4):
    return scale * torch.randn(count, n, n, generator=torch.Generator().manual_seed(0))


def errors(scale, iters):
    """For each matrix, how far a row or column sum is from 1, at most."""
    matrices = sinkhorn(normal_logits(scale), iters)
    return torch.stack([matrices.sum(-1), matrices.sum(-2)]).sub(1).abs().amax((0, 2))


def test_twenty_rounds_are_enough_at_scale_1():
    assert errors(1.0, 20).max() < 0.004
    assert sinkhorn(normal_logits(3.0), 20).sum(-1).sub(1).abs().mean() < 0.004


def test_the_curve_over_rounds_and_scales():
    """More rounds are better, larger logits are worse; the sums over the streams read are always 1."""
    rounds, scales = [1, 2, 5, 10, 20, 50, 100], [0.5, 1.0, 2.0, 3.0, 5.0]
    table = torch.tensor([[errors(scale, iters).mean() for iters in rounds] for scale in scales])
    print(f"\nmean over matrices of the largest error of a sum; rows: scales {scales}, columns: rounds {rounds}")
    print("\n".join(" ".join(f"{value:9.2e}" for value in row) for row in table))
    floor = 1e-6  # float32
    assert (table[:, 1:] <= table[:, :-1] + floor).all()
    assert (table[1:] >= table[:-1] - floor).all()
    assert sinkhorn(normal_logits(5.0), 1).sum(-2).sub(1).abs().max() < 1e-6


def product(scheme, depth=200, n=4, width=32):
    """The product of the mixing matrices of `depth` random connections, each for other random streams."""
    generator = torch.Generator().manual_seed(0)
    total = torch.eye(n).expand(8, n, n)
    for _ in range(depth):
        streams = torch.randn(8, n, width, generator=generator)
        rows = {"mhc": (2 + n) * n, "mhc_lite": 2 * n + 24, "hc": n + 2}[scheme]
        inputs = width if scheme == "hc" else n * width
        fn = torch.randn(rows, inputs, generator=generator) / inputs**0.5
        base = torch.randn((2 + n) * n if scheme != "mhc_lite" else rows, generator=generator)
        if scheme == "hc":
            base[2 * n :] = torch.eye(n).flatten()
        scale = torch.full((3,), 0.1 if scheme == "hc" else 1.0)
        if scheme == "mhc":
            comb = mhc_coefficients(streams, fn, scale, base, 20, 1e-6)[2]
        elif scheme == "mhc_lite":
            comb = mhc_lite_coefficients(streams, fn, scale, base, 1e-6)[2]
        else:
            comb = hc_coefficients(streams, fn, scale, base, True, 1e-6)[2]
        total = total @ comb
    return total


def gains(total):
    """The largest factor by which a stream can grow on the way forward, and a gradient on the way back."""
    return total.abs().sum(-2).max().item(), total.abs().sum(-1).max().item()


@pytest.mark.parametrize("scheme", ["mhc", "mhc_lite"])
def test_the_product_of_200_matrices_is_bounded(scheme):
    forward, backward = gains(product(scheme))
    assert 0.99 <= forward <= 1.01 and 0.99 <= backward <= 1.01


def test_hyper_connections_are_not():
    """Though each of its matrices is the identity and a tenth of a bounded part."""
    forward, backward = gains(product("hc"))
    assert forward > 2 and backward > 2


@pytest.mark.parametrize("scheme", ["mhc", "mhc_lite"])
@pytest.mark.parametrize("diagonal", [0.25, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("num_streams", [4, 5])
def test_the_matrix_at_conversion_has_the_diagonal_that_was_asked_for(scheme, diagonal, num_streams):
    config = resswap.available_schemes()[scheme](num_streams=num_streams, comb_diagonal=diagonal)
    connection = config.connection(resswap.Place(8, 3, 6, begins=False))
    mixing = connection.weights(torch.randn(2, num_streams, 8)).mixing.detach()
    other = (1 - diagonal) / (num_streams - 1)
    expected = torch.full((num_streams, num_streams), other).fill_diagonal_(diagonal).expand(2, -1, -1)
    torch.testing.assert_close(mixing, expected, rtol=1e-4, atol=1e-6)
