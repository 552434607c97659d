"""Manifold-constrained hyper-connections (DeepSeek, arXiv 2512.24880)."""

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from resswap.ops import mhc_coefficients, mhc_read, write_streams

from .base import Add, Connection, Place, ResidualModule, option, register_scheme
from .streams import (
    DoublyStochasticConfig,
    ExpandStreams,
    LearnedReadout,
    MeanReadout,
    StreamsAdd,
    rotating_weights,
)
from .weights import Weights


@register_scheme
@dataclass(frozen=True)
class MHCConfig(DoublyStochasticConfig):
    """Options of the scheme `mhc`: n streams, mixed by a doubly stochastic matrix that depends on the token.

    DeepSeek, arXiv 2512.24880, section 4.2: the coefficients are those of equations 7 and 8, with the Sinkhorn-Knopp
    iteration of equation 9; streams are read, mixed and written as in equation 3.

    Straight after conversion all streams are equal, `pre` sums to 1, `post` is 1 and `comb` is doubly stochastic, so
    the model computes what it did. `pre_peak` makes the streams part once training starts. `comb_diagonal` weighs two
    failures against each other: with a uniform `comb` (1/n) the streams are averaged away, and near the identity its
    gradient vanishes.
    """

    scheme: ClassVar[str] = "mhc"

    sinkhorn_iters: int = option(
        20, "Rounds of Sinkhorn-Knopp (section 4.2 of the paper).", "a whole number from 1", lambda n: n >= 1
    )
    pre_pattern: str = option(
        "connections",
        "Which stream a connection reads with pre_peak at conversion: another one for each connection, for each "
        "layer, or always the first (then the others never part from each other).",
        "'connections', 'layers' or 'first'",
        lambda pattern: pattern in ("connections", "layers", "first"),
    )
    learned_readout: bool = option(
        False,
        "Read the streams out after the last layer by learned weights that depend on the token (as DeepSeek-V4 does), "
        "instead of by their mean.",
        "True or False",
    )
    expansion_scale: bool = option(
        False,
        "Give each stream a learned scale before the first layer, a remedy for streams that stay alike.",
        "True or False",
    )

    def connection(self, place: Place) -> Connection:
        return MHCConnection(place, self)

    def expand(self, hidden_size: int) -> ResidualModule:
        return ExpandStreams(self.num_streams, self.expansion_scale)

    def readout(self, hidden_size: int, num_layers: int) -> ResidualModule:
        if self.learned_readout:
            return LearnedReadout(self.num_streams, hidden_size, self.scale_init, self.eps)
        return MeanReadout()


class MHCConnection(Connection):
    """One mHC connection; parameters as in transformers' `DeepseekV4HyperConnection`.

    Attributes:
        fn: `[(2 + n) * n, n * hidden]`, rows for pre (n), post (n) and comb (n·n, `[j, k]` row by row).
        scale: `[3]`, the gates of pre, post and comb.
        base: `[(2 + n) * n]`, in the order of `fn`'s rows.
    """

    def __init__(self, place: Place, config: MHCConfig) -> None:
        super().__init__(place.index)
        n = config.num_streams
        self.recompute = config.recompute and not place.closes_layer
        self.sinkhorn_iters, self.eps = config.sinkhorn_iters, config.eps
        other = (1 - config.comb_diagonal) / (n - 1)
        comb = torch.eye(n) * math.log(config.comb_diagonal / other)
        self.fn = nn.Parameter(torch.zeros((2 + n) * n, n * place.hidden_size))
        self.scale = nn.Parameter(torch.full((3,), config.scale_init))
        most_read = {"connections": place.index, "layers": place.layer, "first": 0}[config.pre_pattern]
        pre = rotating_weights(n, most_read, config.pre_peak)
        self.base = nn.Parameter(torch.cat([pre, torch.zeros(n), comb.flatten()]))

    def weights(self, streams: Tensor) -> Weights:
        """`pre`, `post` and `comb` for streams `[..., n, hidden]`."""
        return Weights(*mhc_coefficients(streams, self.fn, self.scale, self.base, self.sinkhorn_iters, self.eps))

    def forward(self, streams: Tensor) -> tuple[Tensor, Add]:
        """Streams `[batch, seq, n, hidden]`: the branch reads `pre`; the add mixes by `comb` and writes by `post`."""
        x, streams, post, comb = mhc_read(
            streams, self.fn, self.scale, self.base, self.sinkhorn_iters, self.eps, self.kernels
        )
        write = partial(write_streams, post=post, comb=comb, lend=self.recompute, kernels=self.kernels)
        return x, StreamsAdd(streams, write)
