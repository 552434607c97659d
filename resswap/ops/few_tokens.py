"""Reading and writing a few tokens without gradients, as in decoding, where the number of operations is what counts.

Between the big products there are only a few dozen numbers per token. On a CPU they are Python's numbers (float64): a
tensor operation costs as much as dozens of theirs.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from .precision import no_autocast, wide
from .sinkhorn import sinkhorn

FEW_NUMBERS = 256
# exp of this and of its negative, multiplied by each other and by a few numbers more, are far from float64's limits.
LARGEST_SPREAD = 300.0


def are_few(shape: Sequence[int]) -> bool:
    """Whether coefficients of `shape` are a few numbers, and no gradient will be asked for."""
    return math.prod(shape) <= FEW_NUMBERS and not torch.is_grad_enabled()


def has_numbers(tensor: Tensor) -> bool:
    """Whether Python can have a tensor's numbers at no cost: they are in the CPU's memory, and it is no stand-in."""
    return type(tensor) is Tensor and tensor.device.type == "cpu"


def mhc_read_few(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, sinkhorn_iters: int, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`mhc_read` for a few tokens on a CPU."""
    n, hidden = streams.shape[-2:]
    with no_autocast(streams):
        rows = streams.reshape(-1, n * hidden).to(wide(streams.dtype))
        projected = torch.nn.functional.linear(rows, fn.to(rows.dtype)).tolist()
        norms = torch.linalg.vector_norm(rows, dim=-1).tolist()
        gates, bias = scale.tolist(), base.tolist()
        coefficients = []
        for row, norm in zip(projected, norms, strict=True):
            rstd = (norm * norm / (n * hidden) + eps) ** -0.5
            pre, post, comb = (rstd * gate for gate in gates)
            token = [0.5 + 0.5 * math.tanh(0.5 * (pre * m + b)) for m, b in zip(row[:n], bias, strict=False)]
            token += [1 + math.tanh(0.5 * (post * m + b)) for m, b in zip(row[n : 2 * n], bias[n:], strict=False)]
            logits = [comb * m + b for m, b in zip(row[2 * n :], bias[2 * n :], strict=True)]
            coefficients.append(token + _sinkhorn(logits, n, sinkhorn_iters))
        pre, post, comb = torch.tensor(coefficients, dtype=rows.dtype).split([n, n, n * n], dim=-1)
        x = torch.bmm(pre[:, None], rows.view(-1, n, hidden))
        shape = streams.shape[:-1]
        return (
            x.to(streams.dtype).view(*shape[:-1], hidden),
            streams,
            post.reshape(shape),
            comb.reshape(*shape, n),
        )


def _sinkhorn(logits: list[float], n: int, iters: int) -> list[float]:
    """`sinkhorn` of n x n logits, row by row."""
    largest = max(logits)
    if largest - min(logits) > LARGEST_SPREAD:
        return sinkhorn(torch.tensor(logits, dtype=torch.float64).view(n, n), iters).flatten().tolist()
    return _straight_sinkhorn(n)([math.exp(logit - largest) for logit in logits], iters)


@cache
def _straight_sinkhorn(n: int) -> Callable[[list[float], int], list[float]]:
    """A function that makes n x n numbers K, row by row, doubly stochastic.

    The matrix is u K v, and a round is u = 1/Kv, v = 1/K'u. Written out, each number a variable of its own, it takes a
    fifth of the time of loops over lists.
    """
    k = [[f"k{i}_{j}" for j in range(n)] for i in range(n)]
    u, v = [f"u{i}" for i in range(n)], [f"v{j}" for j in range(n)]

    def reciprocals(names: list[str], matrix: Sequence[Sequence[str]], factors: list[str]) -> list[str]:
        sums = [" + ".join(f"{a} * {b}" for a, b in zip(row, factors, strict=True)) for row in matrix]
        return [f"        {name} = 1 / ({total})" for name, total in zip(names, sums, strict=True)]

    source = [
        "def normalise(numbers, iters):",
        f"    {', '.join(sum(k, []))} = numbers",
        f"    {' = '.join(v)} = 1.0",
        "    for _ in range(iters):",
        *reciprocals(u, k, v),
        *reciprocals(v, list(zip(*k, strict=True)), u),
        f"    return [{', '.join(f'u{i} * k{i}_{j} * v{j}' for i in range(n) for j in range(n))}]",
    ]
    namespace: dict[str, Callable] = {}
    exec("\n".join(source), namespace)
    return namespace["normalise"]


def write_few(streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """`write_streams` for a few tokens on a CPU."""
    n, hidden = streams.shape[-2:]
    with no_autocast(streams):
        x, row = streams.reshape(-1, n, hidden).to(comb.dtype), y.reshape(-1, 1, hidden).to(comb.dtype)
        written = (post.reshape(-1, n, 1) * row).baddbmm_(comb.reshape(-1, n, n).mT, x)
        return written.to(streams.dtype).view(streams.shape)


def depth_attention_few(sources: Sequence[Tensor], probe: Tensor, eps: float) -> Tensor:
    """`depth_attention` for a few tokens on a CPU, on a copy of all sources; `probe` is query times key weight."""
    hidden = probe.numel()
    with no_autocast(probe):
        stack = torch.stack(list(sources), dim=-2).to(probe.dtype).view(-1, len(sources), hidden)
        products = (stack @ probe).tolist()
        norms = torch.linalg.vector_norm(stack, dim=-1).tolist()
        weights = []
        for token in zip(products, norms, strict=True):
            logits = [p * (norm * norm / hidden + eps) ** -0.5 for p, norm in zip(*token, strict=True)]
            largest = max(logits)
            exponentials = [math.exp(logit - largest) for logit in logits]
            factor = len(logits) / sum(exponentials)
            weights.append([[factor * e for e in exponentials]])
        x = torch.bmm(torch.tensor(weights, dtype=probe.dtype), stack)
        return x.to(sources[0].dtype).view(sources[0].shape)
