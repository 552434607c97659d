"""The plain residual stream (He et al., arXiv 1512.03385), in the form of a scheme: what the others are measured by.

`resswap.convert` does not know it: a model with these connections is the model that it was, in every parameter.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from .base import Add, Connection, Place, ResidualModule, SchemeConfig
from .weights import Weights


@dataclass(frozen=True)
class ResidualConfig(SchemeConfig):
    """One stream, which each branch reads and is added to. It has no options."""

    scheme: ClassVar[str] = "residual"

    def expand(self) -> ResidualModule:
        return OneStream()

    def connection(self, place: Place) -> Connection:
        return PlainConnection(place.index)

    def stream_map(self, hidden_size: int, is_norm: bool) -> ResidualModule:
        return OneStream()

    def readout(self, hidden_size: int) -> ResidualModule:
        return OneStream()


class OneStream(ResidualModule):
    """The hidden states `[batch, seq, hidden]` as they are, or what a function makes of them."""

    def forward(self, stream: Tensor, function: Callable[[Tensor], Any] | None = None) -> Any:
        return stream if function is None else function(stream)

    def weights(self, stream: Tensor) -> Weights:
        return Weights(read=torch.ones(1))


class PlainConnection(Connection):
    """`x = h`, then `h' = h + y`; without parameters."""

    def weights(self, stream: Tensor) -> Weights:
        return Weights(read=torch.ones(1), write=torch.ones(1))

    def forward(self, stream: Tensor) -> tuple[Tensor, Add]:
        return stream, Add(stream, torch.add)
