"""DenseFormer: after each layer, a learned weighted average over depth (arXiv 2402.02622)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from resswap.errors import OptionError
from resswap.ops import depth_sum

from .base import Add, Connection, Place, ResidualModule, combined, option, register_scheme
from .sources import Sources, SourcesConfig, accumulate, kept
from .weights import Weights


@register_scheme
@dataclass(frozen=True)
class DenseFormerConfig(SourcesConfig):
    """Options of the scheme `denseformer`: after each layer a weighted average over depth.

    `Y_i = Σ_j α_ij X_j` (arXiv 2402.02622, equation 2): X_0 is the embedding and X_i what layer i makes of Y_{i-1}
    by its own plain residuals; α_i is static, one number for each j. At conversion α_ii is 1 and the others are 0. An
    average stands at the first add of the next layer: where `layers` or `sites` leaves that out, there is none.
    """

    scheme: ClassVar[str] = "denseformer"

    dilation: int = option(
        1,
        "Of the earlier outputs, average every how-manyeth, counted back from the newest (section 3.2).",
        "a whole number from 1",
        lambda k: k >= 1,
    )
    period: int = option(
        1, "Average after every how-manyeth layer (section 3.2).", "a whole number from 1", lambda p: p >= 1
    )

    def connection(self, place: Place) -> Connection:
        return DenseConnection(place, self.num_terms(place.layer) if place.opens_layer else 0, self.dilation)

    def plain_connection(self, place: Place) -> Connection:
        return DenseConnection(place, 0, self.dilation)

    def stream_map(self, hidden_size: int, is_norm: bool) -> ResidualModule:
        return RunningMap(is_norm)

    def readout(self, hidden_size: int, num_layers: int) -> ResidualModule:
        if self.period > num_layers:
            raise OptionError(
                f"denseformer: period={self.period}; the model has {num_layers} layers, so there would be no average."
            )
        return DenseReadout(self.num_terms(num_layers), self.dilation)

    def num_terms(self, layer: int) -> int:
        """How many terms the average after `layer` layers has; 0: there is none."""
        return layer // self.dilation + 1 if layer and layer % self.period == 0 else 0


class _Average:
    """A weighted average over the last source and, `dilation` apart, those before it.

    Attributes:
        alpha: `[k]`, the weights, the newest last; None: without an average, the last source goes through.
    """

    def add_parameters(self, num_terms: int, dilation: int) -> None:
        """Make the weights, or none."""
        self.dilation = dilation
        newest = torch.arange(1, num_terms + 1) == num_terms
        self.alpha = nn.Parameter(newest.float()) if num_terms else None

    def weights(self, sources: Sources) -> Weights:
        """Those of the average; where there is none, 1 for the last source."""
        read = torch.zeros(len(sources.values))
        if self.alpha is None:
            read[-1] = 1
        else:
            picked = read[(len(read) - 1) % self.dilation :: self.dilation][-len(self.alpha) :]
            picked.copy_(self.alpha[-len(picked) :])
        return Weights(read=read)

    def average(self, sources: Sources) -> Tensor:
        """`Σ_j α_j X_j`, `[batch, seq, hidden]`. Where layers are skipped, the weights of the oldest are left out."""
        if self.alpha is None:
            return sources.values[-1]
        terms = sources.values[:: -self.dilation][::-1][-len(self.alpha) :]
        return depth_sum(terms, self.alpha[-len(terms) :])


class DenseConnection(_Average, Connection):
    """The first connection of a layer averages what the layers before it gave; the others are plain residuals.

    The sources are X_0, X_1, ..., and within a layer, as the last one, its running stream.
    """

    def __init__(self, place: Place, num_terms: int, dilation: int) -> None:
        super().__init__(place.index)
        self.opens_layer = place.opens_layer
        self.add_parameters(num_terms, dilation)

    def forward(self, sources: Sources) -> tuple[Tensor, Add]:
        if self.opens_layer:
            sources = Sources((*sources.values, self.average(sources)))
        return sources.values[-1], RunningAdd(sources, accumulate)


class DenseReadout(_Average, ResidualModule):
    """The average after the last layer; hidden states go through as they are."""

    def __init__(self, num_terms: int, dilation: int) -> None:
        super().__init__()
        self.add_parameters(num_terms, dilation)

    def forward(self, sources: Sources | Tensor) -> Tensor:
        return sources if isinstance(sources, Tensor) else self.average(sources)


class RunningMap(ResidualModule):
    """What a layer does to the hidden states between two adds: it applies to the running stream.

    A reshape is undone before the layer's end, and the earlier sources keep their shape.
    """

    def __init__(self, is_norm: bool) -> None:
        super().__init__()
        self.is_norm = is_norm

    def forward(self, sources: Sources, function: Callable[[Tensor], Tensor] | None = None) -> Sources | Tensor:
        *before, running = sources.values
        if function is None:
            return running

        def combine(values: list[Tensor]) -> Sources:
            return Sources((*(kept(function, before, running, *values) if self.is_norm else before), *values))

        return combined([function(running)], combine)


class RunningAdd(Add):
    """An add to the running stream."""

    def through(self, function: Callable[[Tensor], Tensor]) -> "RunningAdd":
        *before, running = self.streams.values
        return RunningAdd(Sources((*before, function(running))), self.write)
