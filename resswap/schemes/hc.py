"""Hyper-Connections, static and dynamic (arXiv 2409.19606)."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from resswap.ops import hc_coefficients, hc_read, write_streams

from .base import Add, Connection, Place, option, register_scheme
from .streams import StreamsAdd, StreamsConfig, recompute
from .weights import Weights


@register_scheme
@dataclass(frozen=True)
class HCConfig(StreamsConfig):
    """Options of the scheme `hc`: n streams with unconstrained weights (arXiv 2409.19606, sections 2.1 and 2.2).

    Initialised as in section 2.3: connection l reads stream l mod n, every stream gets the branch's
    output, and the streams are not mixed. The read-out is the mean of the streams where the paper sums them, so that
    the model computes what it did. The paper's normalisation has a weight, which is part of `fn` here.
    """

    scheme: ClassVar[str] = "hc"

    num_streams: int = option(4, "How many residual streams.", "a whole number from 1", lambda n: n >= 1)
    dynamic: bool = option(True, "Let the weights depend on the token (DHC) or not (SHC).", "True or False")
    tanh: bool = option(True, "Bound the part that depends on the token (eq. 11 to 13).", "True or False")
    scale_init: float = option(
        0.01, "Initial gate of the part that depends on the token.", "a number above 0", lambda s: s > 0
    )
    recompute: bool = recompute()
    eps: float = option(
        1e-6, "Added to the mean square of a stream before its root.", "a number above 0", lambda e: e > 0
    )

    def connection(self, place: Place) -> Connection:
        return HCConnection(place, self)


class HCConnection(Connection):
    """One hyper-connection: `x = Σ_j pre_j X_j`, then `X'_k = Σ_j comb[j, k] X_j + post_k y`.

    `pre`, `post` and `comb` are the paper's `A_m`, `B` and `A_r`.

    Attributes:
        base: `[(2 + n) * n]`, the static weights: pre (n), post (n), comb (n·n, `[j, k]` row by row).
        fn: `[2 + n, hidden]`, for each stream on its own: pre (1), post (1), comb to each stream (n); dynamic only.
        scale: `[3]`, the gates of pre, post and comb; dynamic only.
    """

    def __init__(self, place: Place, config: HCConfig) -> None:
        super().__init__(place.index)
        n = config.num_streams
        self.recompute = config.recompute and not place.closes_layer
        self.tanh, self.eps = config.tanh, config.eps
        pre = F.one_hot(torch.tensor(place.index % n), n).float()
        self.base = nn.Parameter(torch.cat([pre, torch.ones(n), torch.eye(n).flatten()]))
        if config.dynamic:
            self.fn = nn.Parameter(torch.zeros(2 + n, place.hidden_size))
            self.scale = nn.Parameter(torch.full((3,), config.scale_init))
        else:
            self.fn = self.scale = None

    def weights(self, streams: Tensor) -> Weights:
        """`pre`, `post` and `comb` for streams `[..., n, hidden]`."""
        return Weights(*hc_coefficients(streams, self.fn, self.scale, self.base, self.tanh, self.eps))

    def forward(self, streams: Tensor) -> tuple[Tensor, Add]:
        """Streams `[batch, seq, n, hidden]`."""
        x, streams, post, comb = hc_read(streams, self.fn, self.scale, self.base, self.tanh, self.eps, self.kernels)
        write = partial(write_streams, post=post, comb=comb, lend=self.recompute, kernels=self.kernels)
        return x, StreamsAdd(streams, write)
