"""n residual streams `[batch, seq, n, hidden]`: what the schemes that keep them have in common."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from resswap.errors import OptionError
from resswap.ops import readout_coefficients, readout_streams

from .base import Add, Connection, Place, ResidualModule, SchemeConfig, combined, option
from .weights import Weights


class StreamsConfig(SchemeConfig):
    """Base of the schemes whose connections read and write n streams; a subclass has an option `num_streams`.

    Before the first layer the streams are n copies of the hidden states, and their mean is the read-out.
    """

    num_streams: int

    def plain_connection(self, place: Place) -> Connection:
        return PlainStreamsConnection(place.index)

    def expand(self, hidden_size: int) -> ResidualModule:
        return ExpandStreams(self.num_streams)

    def stream_map(self, hidden_size: int, is_norm: bool) -> ResidualModule:
        return StreamMap()

    def readout(self, hidden_size: int, num_layers: int) -> ResidualModule:
        return MeanReadout()


def recompute() -> Any:
    """The option that saves memory for the backward."""
    return option(
        True,
        "Keep the streams once per layer for the backward, and compute those inside the layer again there (after "
        "section 4.3.2 of arXiv 2512.24880); under torch.compile of the whole model the compiler decides.",
        "True or False",
    )


@dataclass(frozen=True)
class DoublyStochasticConfig(StreamsConfig):
    """Base of the schemes whose streams are mixed by doubly stochastic matrices."""

    num_streams: int = option(4, "How many residual streams.", "a whole number from 2", lambda n: n >= 2)
    comb_diagonal: float = option(
        0.9,
        "Diagonal of the mixing matrix at conversion; 1/num_streams is uniform.",
        "from 1/num_streams to 0.999",
        lambda p: p <= 0.999,
    )
    pre_peak: float = option(
        0.7,
        "Weight at conversion with which a connection reads one stream, each another one; the others share the rest.",
        "greater than 1/num_streams, up to 0.99",
        lambda p: p <= 0.99,
    )
    scale_init: float = option(
        0.01,
        "Initial gate of the part that depends on the token (table 5 of arXiv 2512.24880).",
        "a number above 0",
        lambda s: s > 0,
    )
    recompute: bool = recompute()
    eps: float = option(
        1e-6, "Added to the mean square of the streams before its root.", "a number above 0", lambda e: e > 0
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.comb_diagonal < 1 / self.num_streams:
            raise OptionError(
                f"{self.scheme}: comb_diagonal={self.comb_diagonal}; allowed: from 1/num_streams to 0.999."
            )
        if self.pre_peak <= 1 / self.num_streams:
            raise OptionError(
                f"{self.scheme}: pre_peak={self.pre_peak}; allowed: greater than 1/num_streams (with equal weights "
                "the streams never part), up to 0.99."
            )


class StreamsAdd(Add):
    """How a branch is added to a tensor of n streams `[batch, seq, n, hidden]`."""

    def through(self, function: Callable[[Tensor], Tensor]) -> "StreamsAdd":
        return StreamsAdd(map_streams(function, self.streams), self.write)


def map_streams(function: Callable[[Tensor], Tensor], streams: Tensor) -> Any:
    """Apply a function of hidden states `[batch, seq, hidden]` to each of the streams `[batch, seq, n, hidden]`."""
    return combined([function(stream) for stream in streams.unbind(-2)], lambda parts: torch.stack(parts, dim=-2))


class PlainStreamsConnection(Connection):
    """The plain residual on n streams: the branch reads their mean, and its output is added to each of them.

    So the mean of the streams is the hidden state of a plain model, and what sets them apart passes by.
    """

    def forward(self, streams: Tensor) -> tuple[Tensor, Add]:
        return streams.mean(-2), StreamsAdd(streams, _add_to_each)

    def weights(self, streams: Tensor) -> Weights:
        n = streams.shape[-2]
        return Weights(torch.full((n,), 1 / n), torch.ones(n), torch.eye(n))


def _add_to_each(streams: Tensor, y: Tensor) -> Tensor:
    return streams + y.unsqueeze(-2).to(streams.dtype)


class ExpandStreams(ResidualModule):
    """Hidden states `[batch, seq, hidden]` → n streams `[batch, seq, n, hidden]`, each times a scale of its own.

    Attributes:
        scale: `[n]`, or None: the streams are equal.
    """

    def __init__(self, num_streams: int, has_scale: bool = False) -> None:
        super().__init__()
        self.num_streams = num_streams
        self.scale = nn.Parameter(torch.ones(num_streams)) if has_scale else None

    def forward(self, hidden_states: Tensor) -> Tensor:
        stream = hidden_states.unsqueeze(-2)
        if self.scale is not None:
            return stream * self.scale[:, None].to(stream.dtype)
        return stream.expand(*stream.shape[:-2], self.num_streams, stream.shape[-1])

    def extra_repr(self) -> str:
        return f"num_streams={self.num_streams}"


class StreamMap(ResidualModule):
    """Applies a function of hidden states to each of the streams `[batch, seq, n, hidden]`."""

    def forward(self, streams: Tensor, function: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        return streams.mean(-2) if function is None else map_streams(function, streams)


class MeanReadout(ResidualModule):
    """Streams `[batch, seq, n, hidden]` → their mean `[batch, seq, hidden]`; hidden states go through as they are."""

    def forward(self, streams: Tensor) -> Tensor:
        return streams if streams.dim() == 3 else streams.mean(-2)

    def weights(self, streams: Tensor) -> Weights:
        n = streams.shape[-2]
        return Weights(read=torch.full((n,), 1 / n))


class LearnedReadout(ResidualModule):
    """Streams `[batch, seq, n, hidden]` → `Σ_j pre_j X_j`, with `pre` as that of an mHC connection.

    The formula of transformers' `DeepseekV4HyperHead` (there with the prefix `hc_`). At conversion the weights are
    nearly 1/n, and sum to 1. Hidden states go through as they are.

    Attributes:
        fn: `[n, n * hidden]`.
        scale: `[1]`, the gate of the part that depends on the token.
        base: `[n]`.
    """

    def __init__(self, num_streams: int, hidden_size: int, scale: float, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.fn = nn.Parameter(torch.zeros(num_streams, num_streams * hidden_size))
        self.scale = nn.Parameter(torch.full((1,), scale))
        self.base = nn.Parameter(rotating_weights(num_streams, 0, 1 / num_streams))

    def forward(self, streams: Tensor) -> Tensor:
        if streams.dim() == 3:
            return streams
        return readout_streams(streams, self.fn, self.scale, self.base, self.eps, self.kernels)

    def weights(self, streams: Tensor) -> Weights:
        return Weights(read=readout_coefficients(streams, self.fn, self.scale, self.base, self.eps))


def rotating_weights(num_streams: int, index: int, peak: float) -> Tensor:
    """Logits, float64 `[n]`, whose sigmoids sum to 1 and peak near `peak` at stream `index % n`.

    With equal weights all streams would get equal gradients and never part; these rotate with depth instead. The sum
    is 1 to rounding in float32 and float64, and to 1e-4 after a cast to bfloat16: of the bfloat16 numbers near
    `logit(peak)`, the one is taken for which the other logit comes nearest to a bfloat16 number.
    """
    target = torch.tensor(peak, dtype=torch.float64).logit()
    near = (target + torch.linspace(-0.15, 0.15, 257, dtype=torch.float64)).bfloat16().double()
    rest = ((1 - near.sigmoid()) / (num_streams - 1)).logit()
    off = (near.sigmoid() + (num_streams - 1) * rest.bfloat16().double().sigmoid() - 1).abs()
    best = off.argmin()
    logits = rest[best].repeat(num_streams)
    logits[index % num_streams] = near[best]
    return logits
