"""Attention residuals: depth attention over earlier contributions, full and by blocks (Kimi, arXiv 2603.15031)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from resswap.ops import depth_attention

from .base import Add, Connection, Place, ResidualModule, SchemeConfig, combined, option, register_scheme
from .weights import Weights


@dataclass(frozen=True, eq=False)
class Sources:
    """The contributions that a depth attention can pick from, each `[batch, seq, hidden]`, the oldest first.

    FSDP2 looks for tensors in arguments and outputs through dataclasses, others through pytrees; it is both.
    """

    values: tuple[Tensor, ...]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that all sources have."""
        return self.values[0].dtype

    @property
    def device(self) -> torch.device:
        """The device that all sources are on."""
        return self.values[0].device

    def map(self, function: Callable[[Tensor], Tensor]) -> "Sources":
        """The function applied to each source."""
        return combined([function(value) for value in self.values], lambda values: Sources(tuple(values)))

    def to(self, *args: Any, **kwargs: Any) -> "Sources":
        """Each source moved or cast, as Accelerate's hooks ask of an argument."""
        return self.map(lambda value: value.to(*args, **kwargs))


_pytree.register_pytree_node(
    Sources,
    lambda sources: (list(sources.values), None),
    lambda values, _: Sources(tuple(values)),
    serialized_type_name="resswap.Sources",
)


@dataclass(frozen=True)
class _DepthAttentionConfig(SchemeConfig):
    """What the attention residuals have in common.

    With the query at 0 all sources weigh the same, and the branch's input is their sum: the plain residual stream.
    A norm on the residual path (post-norm models) applies to a depth attention of its own and starts a new list.
    """

    eps: float = option(
        1e-6, "Added to the mean square of a source before its root.", "a number above 0", lambda e: e > 0
    )

    def expand(self) -> ResidualModule:
        return FirstSource()

    def stream_map(self, hidden_size: int, is_norm: bool) -> ResidualModule:
        return DepthNormMap(hidden_size, self.eps) if is_norm else SourceMap()

    def readout(self, hidden_size: int) -> ResidualModule:
        return DepthReadout(hidden_size, self.eps)


@register_scheme
@dataclass(frozen=True)
class AttnResConfig(_DepthAttentionConfig):
    """Options of the scheme `attnres`: the embedding and every sublayer's output are sources (section 3.1)."""

    scheme: ClassVar[str] = "attnres"

    def connection(self, place: Place) -> Connection:
        return DepthConnection(place, self.eps, new_source=True)


@register_scheme
@dataclass(frozen=True)
class BlockAttnResConfig(_DepthAttentionConfig):
    """Options of the scheme `block_attnres`: the embedding, the sum of each block of sublayers, and the running block.

    The connections are cut into `num_blocks` runs of equal length (section 3.2), at most one block for each.
    """

    scheme: ClassVar[str] = "block_attnres"

    num_blocks: int = option(
        8, "How many blocks the connections are cut into.", "a whole number from 1", lambda n: n >= 1
    )

    def connection(self, place: Place) -> Connection:
        blocks = min(self.num_blocks, place.num_connections)
        block, last_block = ((place.index - i) * blocks // place.num_connections for i in (0, 1))
        return DepthConnection(place, self.eps, new_source=place.begins or block > last_block)


class FirstSource(ResidualModule):
    """Hidden states `[batch, seq, hidden]` → sources, of which they are the first."""

    def forward(self, hidden_states: Tensor) -> Sources:
        return Sources((hidden_states,))


class DepthConnection(Connection):
    """The branch reads `k · Σ_i α_i v_i` with `α = softmax_i(query · RMSNorm(v_i))` over the k sources.

    Where the sources begin there is one, and nothing to choose from: such a connection has no parameters.

    Attributes:
        query: `[hidden]`.
        key_weight: `[hidden]`, the weight of the keys' RMSNorm.
        new_source: whether the branch's output becomes a source of its own or goes into the last one.
    """

    def __init__(self, place: Place, eps: float, new_source: bool) -> None:
        super().__init__(place.index)
        self.eps, self.new_source = eps, new_source
        self.query = None if place.begins else nn.Parameter(torch.zeros(place.hidden_size))
        self.key_weight = None if place.begins else nn.Parameter(torch.ones(place.hidden_size))

    def weights(self, sources: Sources) -> Weights:
        """The weights of the depth attention, which sum to 1."""
        return _depth_weights(sources, self.query, self.key_weight, self.eps)

    def forward(self, sources: Sources) -> tuple[Tensor, Add]:
        if self.query is None:
            x = sources.values[0]
        else:
            x = depth_attention(sources.values, self.query, self.key_weight, self.eps, self.kernels)
        return x, Add(sources, _append if self.new_source else _accumulate)

    def extra_repr(self) -> str:
        return f"new_source={self.new_source}"


class DepthReadout(ResidualModule):
    """One more depth attention over all sources; hidden states go through as they are."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.query = nn.Parameter(torch.zeros(hidden_size))
        self.key_weight = nn.Parameter(torch.ones(hidden_size))

    def weights(self, sources: Sources) -> Weights:
        """The weights of the depth attention, which sum to 1."""
        return _depth_weights(sources, self.query, self.key_weight, self.eps)

    def forward(self, sources: Sources | Tensor) -> Tensor:
        if isinstance(sources, Tensor):
            return sources
        return depth_attention(sources.values, self.query, self.key_weight, self.eps, self.kernels)


def _depth_weights(sources: Sources, query: Tensor | None, key_weight: Tensor | None, eps: float) -> Weights:
    if query is None:
        return Weights(read=torch.ones(1))
    probe = query.float() * key_weight.float()
    logits = [(v.float() @ probe) * (v.float().square().mean(-1) + eps).rsqrt() for v in sources.values]
    return Weights(read=torch.stack(logits, dim=-1).softmax(-1))


class DepthNormMap(DepthReadout):
    """A norm on the residual path: it applies to a depth attention, and the result is the new first source."""

    def forward(self, sources: Sources, function: Callable[[Tensor], Tensor] | None = None) -> Sources | Tensor:
        hidden_states = super().forward(sources)
        if function is None:
            return hidden_states
        return combined([function(hidden_states)], lambda values: Sources(tuple(values)))


class SourceMap(ResidualModule):
    """A scale, cast or reshape on the residual path: it applies to each source."""

    def forward(self, sources: Sources, function: Callable[[Tensor], Tensor] | None = None) -> Sources | Tensor:
        return sum(sources.values) if function is None else sources.map(function)


def _append(sources: Sources, y: Tensor) -> Sources:
    return Sources((*sources.values, y.to(sources.values[0].dtype)))


def _accumulate(sources: Sources, y: Tensor) -> Sources:
    *before, last = sources.values
    return Sources((*before, last + y.to(last.dtype)))
