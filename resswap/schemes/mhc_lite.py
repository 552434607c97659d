"""mHC-lite: hyper-connections that mix by convex combinations of permutations (arXiv 2601.05732)."""

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from resswap.ops import mhc_lite_coefficients, mhc_lite_read, write_streams

from .base import Add, Connection, Place, option, register_scheme
from .streams import DoublyStochasticConfig, StreamsAdd, rotating_weights
from .weights import Weights


@register_scheme
@dataclass(frozen=True)
class MHCLiteConfig(DoublyStochasticConfig):
    """Options of the scheme `mhc_lite` (arXiv 2601.05732, by the theorem of Birkhoff and von Neumann).

    As `mhc`, but `comb` is a convex combination of the n! permutations with a softmax for its weights: exactly doubly
    stochastic, without Sinkhorn-Knopp. Straight after conversion the identity weighs most, and the other permutations
    share the rest.
    """

    scheme: ClassVar[str] = "mhc_lite"

    num_streams: int = option(
        4, "How many residual streams; there are num_streams! permutations.", "2 to 5", lambda n: 2 <= n <= 5
    )

    def connection(self, place: Place) -> Connection:
        return MHCLiteConnection(place, self)


class MHCLiteConnection(Connection):
    """One mHC-lite connection.

    Attributes:
        fn: `[2 n + n!, n * hidden]`, rows for pre (n), post (n) and the permutations (n!), in the order of
            `itertools.permutations`, the identity first.
        scale: `[3]`, the gates of pre, post and the permutations.
        base: `[2 n + n!]`, in the order of `fn`'s rows.
    """

    def __init__(self, place: Place, config: MHCLiteConfig) -> None:
        super().__init__(place.index)
        self.recompute = config.recompute and not place.closes_layer
        n, self.eps = config.num_streams, config.eps
        count, fixing = math.factorial(n), math.factorial(n - 1)
        # The diagonal is the identity's weight, and those of the other permutations that leave a stream in its place.
        other = (1 - config.comb_diagonal) / (count - fixing)
        weights = torch.zeros(count)
        weights[0] = math.log((config.comb_diagonal - (fixing - 1) * other) / other)
        self.fn = nn.Parameter(torch.zeros(2 * n + count, n * place.hidden_size))
        self.scale = nn.Parameter(torch.full((3,), config.scale_init))
        self.base = nn.Parameter(
            torch.cat([rotating_weights(n, place.index, config.pre_peak), torch.zeros(n), weights])
        )

    def weights(self, streams: Tensor) -> Weights:
        """`pre`, `post` and `comb` for streams `[..., n, hidden]`."""
        return Weights(*mhc_lite_coefficients(streams, self.fn, self.scale, self.base, self.eps))

    def forward(self, streams: Tensor) -> tuple[Tensor, Add]:
        """Streams `[batch, seq, n, hidden]`: the branch reads `pre`; the add mixes by `comb` and writes by `post`."""
        x, streams, post, comb = mhc_lite_read(streams, self.fn, self.scale, self.base, self.eps, self.kernels)
        write = partial(write_streams, post=post, comb=comb, lend=self.recompute, kernels=self.kernels)
        return x, StreamsAdd(streams, write)
