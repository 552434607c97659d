"""Attention residuals: depth attention over earlier contributions, full and by blocks (Kimi, arXiv 2603.15031)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from resswap.errors import OptionError
from resswap.ops import depth_attention

from .base import Add, Connection, Place, ResidualModule, combined, option, register_scheme
from .sources import (
    PlainSourcesConnection,
    SourceMap,
    Sources,
    SourcesConfig,
    accumulate,
    append,
    begins_block,
    block_starts,
    key_norm_weight,
)
from .weights import Weights

DEFAULT_BLOCKS = 8


@dataclass(frozen=True)
class _DepthAttentionConfig(SourcesConfig):
    """What the attention residuals have in common.

    With the query at 0 all sources weigh the same, and the branch's input is their sum: the plain residual stream.
    A norm on the residual path (post-norm models) applies to a depth attention of its own and starts a new list.
    """

    key_norm_weight: bool = key_norm_weight()
    eps: float = option(
        1e-6, "Added to the mean square of a source before its root.", "a number above 0", lambda e: e > 0
    )

    def opens_source(self, place: Place) -> bool:
        """Whether the output of the branch at `place` becomes a source of its own or goes into the last one."""
        raise NotImplementedError

    def connection(self, place: Place) -> Connection:
        return DepthConnection(place, self, self.opens_source(place))

    def plain_connection(self, place: Place) -> Connection:
        return PlainSourcesConnection(place.index, self.opens_source(place))

    def stream_map(self, hidden_size: int, is_norm: bool) -> ResidualModule:
        return DepthNormMap(hidden_size, self) if is_norm else SourceMap()

    def readout(self, hidden_size: int, num_layers: int) -> ResidualModule:
        return DepthReadout(hidden_size, self)


@register_scheme
@dataclass(frozen=True)
class AttnResConfig(_DepthAttentionConfig):
    """Options of the scheme `attnres`: the embedding and every sublayer's output are sources.

    Kimi, arXiv 2603.15031, section 3.1.
    """

    scheme: ClassVar[str] = "attnres"

    def opens_source(self, place: Place) -> bool:
        return True


@register_scheme
@dataclass(frozen=True)
class BlockAttnResConfig(_DepthAttentionConfig):
    """Options of the scheme `block_attnres`: the embedding, the sum of each block of sublayers, and the running block.

    Kimi, arXiv 2603.15031, section 3.2. The connections are cut into `num_blocks` runs of equal length, at most one
    block for each; or where `block_starts` says.
    """

    scheme: ClassVar[str] = "block_attnres"

    num_blocks: int = option(
        DEFAULT_BLOCKS, "How many blocks the connections are cut into.", "a whole number from 1", lambda n: n >= 1
    )
    block_starts: tuple = block_starts()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_starts and self.num_blocks != DEFAULT_BLOCKS:
            raise OptionError(f"block_attnres: give num_blocks={self.num_blocks} or block_starts, not both.")

    def opens_source(self, place: Place) -> bool:
        return begins_block(place, self.num_blocks, self.block_starts) or place.begins


class DepthConnection(Connection):
    """The branch reads `k · Σ_i α_i v_i` with `α = softmax_i(query · RMSNorm(v_i))` over the k sources.

    Where the sources begin there is one, and nothing to choose from: such a connection has no parameters.

    Attributes:
        query: `[hidden]`.
        key_weight: `[hidden]`, the weight of the keys' RMSNorm, or None.
        new_source: whether the branch's output becomes a source of its own or goes into the last one.
    """

    def __init__(self, place: Place, config: _DepthAttentionConfig, new_source: bool) -> None:
        super().__init__(place.index)
        self.eps, self.new_source = config.eps, new_source
        has_key_weight = config.key_norm_weight and not place.begins
        self.query = None if place.begins else nn.Parameter(torch.zeros(place.hidden_size))
        self.key_weight = nn.Parameter(torch.ones(place.hidden_size)) if has_key_weight else None

    def weights(self, sources: Sources) -> Weights:
        """The weights of the depth attention, which sum to 1."""
        return Weights(read=depth_weights(sources.values, self.query, self.key_weight, self.eps))

    def forward(self, sources: Sources) -> tuple[Tensor, Add]:
        if self.query is None:
            x = sources.values[0]
        else:
            x = depth_attention(sources.values, self.query, self.key_weight, self.eps, self.kernels)
        return x, Add(sources, append if self.new_source else accumulate)

    def extra_repr(self) -> str:
        return f"new_source={self.new_source}"


class DepthReadout(ResidualModule):
    """One more depth attention over all sources; hidden states go through as they are."""

    def __init__(self, hidden_size: int, config: _DepthAttentionConfig) -> None:
        super().__init__()
        self.eps = config.eps
        self.query = nn.Parameter(torch.zeros(hidden_size))
        self.key_weight = nn.Parameter(torch.ones(hidden_size)) if config.key_norm_weight else None

    def weights(self, sources: Sources) -> Weights:
        """The weights of the depth attention, which sum to 1."""
        return Weights(read=depth_weights(sources.values, self.query, self.key_weight, self.eps))

    def forward(self, sources: Sources | Tensor) -> Tensor:
        if isinstance(sources, Tensor):
            return sources
        return depth_attention(sources.values, self.query, self.key_weight, self.eps, self.kernels)


def depth_weights(values: Sequence[Tensor], query: Tensor | None, key_weight: Tensor | None, eps: float) -> Tensor:
    """The softmax over k sources, `[..., k]` in float32; `[k]` of 1/k where there is no query, so no choice."""
    if query is None or not values:
        return torch.full((len(values),), 1 / max(1, len(values)))
    probe = query.float() if key_weight is None else query.float() * key_weight.float()
    logits = [(v.float() @ probe) * (v.float().square().mean(-1) + eps).rsqrt() for v in values]
    return torch.stack(logits, dim=-1).softmax(-1)


class DepthNormMap(DepthReadout):
    """A norm on the residual path: it applies to a depth attention, and the result is the new first source."""

    def forward(self, sources: Sources, function: Callable[[Tensor], Tensor] | None = None) -> Sources | Tensor:
        hidden_states = super().forward(sources)
        if function is None:
            return hidden_states
        return combined([function(hidden_states)], lambda values: Sources(tuple(values)))
