"""Attention residuals: depth attention over earlier contributions, full and by blocks (Kimi, arXiv 2603.15031)."""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from resswap.ops import depth_attention

from .base import AddBranch, Connection, ResidualModule, SchemeConfig, option, register_scheme


class Sources:
    """The contributions that a depth attention can pick from, each `[batch, seq, hidden]`, the oldest first."""

    def __init__(self, values: tuple[Tensor, ...]) -> None:
        self.values = values

    def to(self, *args: Any, **kwargs: Any) -> "Sources":
        """Each source moved or cast, as Accelerate's hooks ask of an argument."""
        return Sources(tuple(value.to(*args, **kwargs) for value in self.values))


# FSDP and checkpointing look for tensors in arguments and outputs through pytrees.
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
    """

    eps: float = option(
        1e-6, "Added to the mean square of a source before its root.", "a number above 0", lambda e: e > 0
    )

    def expand(self, hidden_size: int, num_connections: int) -> nn.Module:
        return FirstSource()

    def readout(self, hidden_size: int, num_connections: int) -> nn.Module:
        return DepthReadout(hidden_size, self.eps)


@register_scheme
@dataclass(frozen=True)
class AttnResConfig(_DepthAttentionConfig):
    """Options of the scheme `attnres`: the embedding and every sublayer's output are sources (section 3.1)."""

    scheme: ClassVar[str] = "attnres"

    def connection(self, index: int, hidden_size: int, num_connections: int) -> Connection:
        return DepthConnection(index, hidden_size, self.eps, new_source=True)


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

    def connection(self, index: int, hidden_size: int, num_connections: int) -> Connection:
        blocks = min(self.num_blocks, num_connections)
        begins = index == 0 or index * blocks // num_connections > (index - 1) * blocks // num_connections
        return DepthConnection(index, hidden_size, self.eps, new_source=begins)


class FirstSource(nn.Module):
    """Hidden states `[batch, seq, hidden]` → sources, of which they are the first."""

    def forward(self, hidden_states: Tensor) -> Sources:
        return Sources((hidden_states,))


class DepthConnection(Connection):
    """The branch reads `k · Σ_i α_i v_i` with `α = softmax_i(query · RMSNorm(v_i))` over the k sources.

    The first connection has the embedding to read and nothing to choose from, so it has no parameters.

    Attributes:
        query: `[hidden]`.
        key_weight: `[hidden]`, the weight of the keys' RMSNorm.
        new_source: whether the branch's output becomes a source of its own or goes into the last one.
    """

    def __init__(self, index: int, hidden_size: int, eps: float, new_source: bool) -> None:
        super().__init__(index)
        self.eps, self.new_source = eps, new_source
        self.query = nn.Parameter(torch.zeros(hidden_size)) if index > 0 else None
        self.key_weight = nn.Parameter(torch.ones(hidden_size)) if index > 0 else None

    def forward(self, sources: Sources) -> tuple[Tensor, AddBranch]:
        if self.query is None:
            x = sources.values[0]
        else:
            x = depth_attention(sources.values, self.query, self.key_weight, self.eps)
        return x, partial(_append if self.new_source else _accumulate, sources.values)

    def extra_repr(self) -> str:
        return f"new_source={self.new_source}"


class DepthReadout(ResidualModule):
    """One more depth attention over all sources; hidden states go through as they are."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.query = nn.Parameter(torch.zeros(hidden_size))
        self.key_weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self, sources: Sources | Tensor) -> Tensor:
        if isinstance(sources, Tensor):
            return sources
        return depth_attention(sources.values, self.query, self.key_weight, self.eps)


def _append(values: tuple[Tensor, ...], y: Tensor) -> Sources:
    return Sources((*values, y.to(values[0].dtype)))


def _accumulate(values: tuple[Tensor, ...], y: Tensor) -> Sources:
    return Sources((*values[:-1], values[-1] + y.to(values[-1].dtype)))
