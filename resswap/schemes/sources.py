"""Sources: the earlier contributions that a branch can pick from, and the options that such schemes share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from resswap.errors import OptionError

from .base import Add, Connection, Place, ResidualModule, SchemeConfig, combined, option
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
class SourcesConfig(SchemeConfig):
    """Base of the schemes whose connections read sources."""

    def expand(self, hidden_size: int) -> ResidualModule:
        return FirstSource()


def key_norm_weight() -> Any:
    """The option whether the norm of the keys has a weight."""
    return option(True, "Whether the RMSNorm of the keys has a weight (the paper) or none.", "True or False")


def block_starts() -> Any:
    """The option that cuts the connections into blocks by a list."""
    return option(
        (),
        "Indices of the connections that begin the second and each later block, instead of num_blocks equal ones.",
        "ascending whole numbers from 1, or none",
        lambda starts: (
            all(type(start) is int for start in starts)
            and all(a < b for a, b in zip((0, *starts), starts, strict=False))
        ),
    )


def begins_block(place: Place, num_blocks: int, starts: tuple[int, ...]) -> bool:
    """Whether a block of connections begins at `place`.

    Args:
        num_blocks: how many runs of equal length the connections are cut into, at most one for each.
        starts: where the second and each later block begins, in place of `num_blocks`.

    Raises:
        OptionError: a start is beyond the last connection.
    """
    if starts:
        if starts[-1] >= place.num_connections:
            raise OptionError(
                f"block_starts={list(starts)}; the model has {place.num_connections} connections, so the largest "
                f"index is {place.num_connections - 1}."
            )
        return place.index in (0, *starts)
    blocks = min(num_blocks, place.num_connections)
    block, last_block = ((place.index - i) * blocks // place.num_connections for i in (0, 1))
    return block > last_block


class PlainSourcesConnection(Connection):
    """The plain residual on sources: the branch reads their sum, and its output becomes a source like any other.

    Attributes:
        new_source: whether the output becomes a source of its own or goes into the last one.
    """

    def __init__(self, index: int, new_source: bool) -> None:
        super().__init__(index)
        self.new_source = new_source

    def forward(self, sources: Sources) -> tuple[Tensor, Add]:
        return sum(sources.values), Add(sources, append if self.new_source else accumulate)

    def weights(self, sources: Sources) -> Weights:
        return Weights(read=torch.full((len(sources.values),), 1 / len(sources.values)))


class FirstSource(ResidualModule):
    """Hidden states `[batch, seq, hidden]` → sources, of which they are the first."""

    def forward(self, hidden_states: Tensor) -> Sources:
        return Sources((hidden_states,))


class SourceMap(ResidualModule):
    """A scale, cast or reshape on the residual path: it applies to each source."""

    def forward(self, sources: Sources, function: Callable[[Tensor], Tensor] | None = None) -> Sources | Tensor:
        return sum(sources.values) if function is None else sources.map(function)


def kept(function: Callable[[Tensor], Tensor], others: Sequence[Tensor], old: Tensor, new: Tensor) -> list[Tensor]:
    """The other sources after a function that applies to the stream alone, and made `new` of `old`.

    They stay; but where it has picked tokens, as models do that go on with the last ones only, it picks theirs too.
    """
    if new.shape == old.shape:
        return list(others)
    picked = [function(other) for other in others]
    return [other[0] if isinstance(other, tuple) else other for other in picked]


def append(sources: Sources, y: Tensor) -> Sources:
    """A branch's output as one more source."""
    return Sources((*sources.values, y.to(sources.values[0].dtype)))


def accumulate(sources: Sources, y: Tensor) -> Sources:
    """A branch's output added to the last source."""
    *before, last = sources.values
    return Sources((*before, last + y.to(last.dtype)))
