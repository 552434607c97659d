"""Delta attention residuals: the residual stream, and a gated depth attention beside it (arXiv 2605.18855)."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from resswap.errors import OptionError
from resswap.ops import delta_attention, depth_sum

from .attnres import depth_weights
from .base import Add, Connection, Place, ResidualModule, combined, option, register_scheme
from .sources import Sources, SourcesConfig, begins_block, block_starts, kept, key_norm_weight
from .weights import Weights


@register_scheme
@dataclass(frozen=True)
class DeltaAttnResConfig(SourcesConfig):
    """Options of the scheme `delta_attnres`: a branch reads the stream plus a gated attention over earlier deltas.

    Of arXiv 2605.18855. A delta is what a sublayer added to the stream, or the sum over a block of sublayers. The
    stream is that of the plain residual, and with the gate at 0 the model computes what it did. A norm on the residual
    path (post-norm models) applies to the stream, and leaves the deltas as they are.

    The authors' code (github.com/wdlctc/delta-attention-residuals-code) has no gate, which is the formula here with a
    gate of 1; to fine-tune, it adds a source of zeros instead, which is near the plain model but not equal to it.
    """

    scheme: ClassVar[str] = "delta_attnres"

    num_blocks: int = option(
        0,
        "How many blocks the connections are cut into, whose sums are the deltas; 0: each sublayer's output is one.",
        "a whole number from 0",
        lambda n: n >= 0,
    )
    block_starts: tuple = block_starts()
    key_norm_weight: bool = key_norm_weight()
    eps: float = option(
        1e-6, "Added to the mean square of a delta before its root.", "a number above 0", lambda e: e > 0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_starts and self.num_blocks:
            raise OptionError(f"delta_attnres: give num_blocks={self.num_blocks} or block_starts, not both.")

    def connection(self, place: Place) -> Connection:
        return DeltaConnection(place, self, self.num_deltas(place))

    def plain_connection(self, place: Place) -> Connection:
        return DeltaConnection(place, self, 0)

    def stream_map(self, hidden_size: int, is_norm: bool) -> ResidualModule:
        return StreamNormMap() if is_norm else DeltaMap()

    def readout(self, hidden_size: int, num_layers: int) -> ResidualModule:
        return DeltaReadout(hidden_size, self)

    def opens_delta(self, place: Place) -> bool:
        """Whether the output of the branch at `place` is a delta of its own or goes into the last one."""
        by_blocks = self.num_blocks or self.block_starts
        return not by_blocks or begins_block(place, self.num_blocks, self.block_starts)

    def num_deltas(self, place: Place) -> int:
        """How many deltas there are at `place`."""
        return sum(self.opens_delta(replace(place, index=index)) for index in range(place.index))


class _GatedAttention:
    """`x = h + gate · Σ_i α_i v_i`, `α = softmax_i(query · RMSNorm(v_i))`, over sources (h, v_1, ..., v_k).

    Attributes:
        query: `[hidden]`; None where there is one delta at most.
        key_weight: `[hidden]`, the weight of the keys' RMSNorm, or None.
        gate: `[1]`; None: `x = h`.
    """

    def add_parameters(self, hidden_size: int, config: DeltaAttnResConfig, num_deltas: int) -> None:
        """Make the parameters that can make a difference."""
        self.eps = config.eps
        chooses = num_deltas > 1
        self.query = nn.Parameter(torch.zeros(hidden_size)) if chooses else None
        self.key_weight = nn.Parameter(torch.ones(hidden_size)) if chooses and config.key_norm_weight else None
        self.gate = nn.Parameter(torch.zeros(1)) if num_deltas else None

    def weights(self, sources: Sources) -> Weights:
        """1 for the stream, and the gated weights of the deltas."""
        if self.gate is None:
            return Weights(read=F.one_hot(torch.tensor(0), len(sources.values)).float())
        deltas = self.gate.float() * depth_weights(sources.values[1:], self.query, self.key_weight, self.eps)
        return Weights(read=F.pad(deltas, (1, 0), value=1.0))

    def read(self, sources: Sources) -> Tensor:
        """x, `[batch, seq, hidden]`. Where layers are skipped there may be no delta yet."""
        stream, *deltas = sources.values
        if self.gate is None or not deltas:
            return stream
        if self.query is None:
            return depth_sum((*deltas, stream), F.pad(self.gate, (0, 1), value=1.0))
        return delta_attention(stream, deltas, self.query, self.key_weight, self.gate, self.eps, self.kernels)


class DeltaConnection(_GatedAttention, Connection):
    """The branch reads the stream and a gated attention over the deltas; its output goes to the stream and is a delta.

    Before the first sublayer there is no delta, and then just one: the first connection has no parameters, and the
    next ones a gate only.

    Attributes:
        new_delta: whether the output is a delta of its own or goes into the last one.
    """

    def __init__(self, place: Place, config: DeltaAttnResConfig, num_deltas: int) -> None:
        super().__init__(place.index)
        self.new_delta = config.opens_delta(place)
        self.add_parameters(place.hidden_size, config, num_deltas)

    def forward(self, sources: Sources) -> tuple[Tensor, Add]:
        return self.read(sources), Add(sources, _add_delta if self.new_delta else _add_to_delta)

    def extra_repr(self) -> str:
        return f"new_delta={self.new_delta}"


class DeltaReadout(_GatedAttention, ResidualModule):
    """The stream with one more gated attention over all deltas; hidden states go through as they are."""

    def __init__(self, hidden_size: int, config: DeltaAttnResConfig) -> None:
        super().__init__()
        self.add_parameters(hidden_size, config, num_deltas=1 if config.num_blocks == 1 else 2)  # one, or several

    def forward(self, sources: Sources | Tensor) -> Tensor:
        return sources if isinstance(sources, Tensor) else self.read(sources)


class DeltaMap(ResidualModule):
    """A scale, cast or reshape on the residual path: it applies to the stream and to each delta."""

    def forward(self, sources: Sources, function: Callable[[Tensor], Tensor] | None = None) -> Sources | Tensor:
        return sources.values[0] if function is None else sources.map(function)


class StreamNormMap(ResidualModule):
    """A norm on the residual path: it applies to the stream, and leaves the deltas as they are."""

    def forward(self, sources: Sources, function: Callable[[Tensor], Tensor] | None = None) -> Sources | Tensor:
        stream, *deltas = sources.values
        if function is None:
            return stream
        return combined(
            [function(stream)], lambda values: Sources((*values, *kept(function, deltas, stream, *values)))
        )


def _add_delta(sources: Sources, y: Tensor) -> Sources:
    stream, *deltas = sources.values
    y = y.to(stream.dtype)
    return Sources((stream + y, *deltas, y))


def _add_to_delta(sources: Sources, y: Tensor) -> Sources:
    stream, *deltas = sources.values
    y = y.to(stream.dtype)
    return Sources((stream + y, *deltas[:-1], *(delta + y for delta in deltas[-1:])) if deltas else (stream + y, y))
