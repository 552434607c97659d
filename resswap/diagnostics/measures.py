"""What is measured of each connection in one forward pass, and the few numbers that sum it up."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from resswap.ops.precision import wide

TINY = 1e-30  # instead of a division by 0


@dataclass(frozen=True)
class Measures:
    """One connection, or the read-out after the last one. All positions of the batch count, padding too.

    What a scheme does not have is None. Sizes are root mean squares over all elements. A share is the absolute value
    of a weight by the sum of the absolute values.

    Attributes:
        name: the module.
        input_rms: size of what was read: the branch's input, or the hidden states after the last layer.
        output_rms: size of the branch's output.
        stream_rms: size of each stream, or source, before the branch.
        spread: norm of the streams' distance from their mean by the norm of the streams; 0 if all are alike.
        read, write: for each stream its weight in what was read, and the weight with which the branch's output was
            added to it; means over tokens.
        read_entropy, write_entropy: entropy of the shares by that of equal shares, mean over tokens; of 2 streams on.
        read_dominance, write_dominance: the largest share, mean over tokens; of 2 streams on.
        doubly_stochastic_error: how far a row or column sum of a mixing matrix is from 1, at most.
        gain_forward, gain_backward: largest sum of absolute values over the old streams that go into a new one, and
            over the new streams that an old one goes into (the largest row and column sum of the matrix that maps old
            streams to new ones), mean over tokens.
        composite_gain_forward, composite_gain_backward: the same of the product of all mixing matrices up to this
            one (arXiv 2512.24880, section 3.1).
        gradient_norm: norm over the batch of the gradient of the loss by the branch's output.
    """

    name: str
    input_rms: float | None = None
    output_rms: float | None = None
    stream_rms: tuple[float, ...] = ()
    spread: float | None = None
    read: tuple[float, ...] | None = None
    write: tuple[float, ...] | None = None
    read_entropy: float | None = None
    write_entropy: float | None = None
    read_dominance: float | None = None
    write_dominance: float | None = None
    doubly_stochastic_error: float | None = None
    gain_forward: float | None = None
    gain_backward: float | None = None
    composite_gain_forward: float | None = None
    composite_gain_backward: float | None = None
    gradient_norm: float | None = None

    @property
    def size(self) -> float | None:
        """Size of all streams together."""
        return math.hypot(*self.stream_rms) / math.sqrt(len(self.stream_rms)) if self.stream_rms else None


def of_streams(streams: Any, count: int = 1) -> dict[str, Tensor]:
    """Sizes and spread of `[batch, seq, n, hidden]`, `[batch, seq, hidden]`, or of the tensors in a pytree.

    With `count` more than 1, three dimensions are `[tokens, n, hidden]`: some layers (OPT) take all tokens in one row.
    """
    if not isinstance(streams, Tensor):
        tensors = [leaf for leaf in _pytree.tree_leaves(streams) if isinstance(leaf, Tensor)]
        return {"stream_rms": torch.stack([rms(tensor) for tensor in tensors])} if tensors else {}
    if streams.dim() < 4 and count == 1:
        return {"stream_rms": rms(streams)[None]}
    mean = streams.mean(-2, keepdim=True, dtype=wide(streams.dtype))
    distance = torch.stack([norm(stream - mean[..., 0, :]) for stream in streams.unbind(-2)]).norm()
    sizes = torch.stack([rms(stream) for stream in streams.unbind(-2)])
    return {"stream_rms": sizes, "spread": distance / norm(streams).clamp_min(TINY)}


def of_weights(kind: str, weights: Tensor) -> dict[str, Tensor]:
    """Mean, entropy and dominance of weights `[..., k]` with which streams are read or written."""
    weights = weights.float().reshape(-1, weights.shape[-1])
    found = {kind: weights.mean(0)}
    if weights.shape[-1] > 1:
        shares = weights.abs() / weights.abs().sum(-1, keepdim=True).clamp_min(TINY)
        entropy = -(shares * shares.clamp_min(TINY).log()).sum(-1).mean()
        found[f"{kind}_entropy"] = entropy / math.log(weights.shape[-1])
        found[f"{kind}_dominance"] = shares.amax(-1).mean()
    return found


def of_mixing(mixing: Tensor, before: Tensor | None) -> tuple[dict[str, Tensor], Tensor]:
    """Error and gains of mixing matrices `[..., j, i]`, and their product with that of those `before`."""
    mixing = mixing.reshape(-1, *mixing.shape[-2:])
    product = mixing if before is None else before @ mixing
    sums = torch.stack([mixing.sum(-1), mixing.sum(-2)])
    found = {"doubly_stochastic_error": (sums - 1).abs().max()}
    for prefix, matrix in (("", mixing), ("composite_", product)):
        found[f"{prefix}gain_forward"] = matrix.abs().sum(-2).amax(-1).mean()
        found[f"{prefix}gain_backward"] = matrix.abs().sum(-1).amax(-1).mean()
    return found, product


def rms(tensor: Tensor) -> Tensor:
    """Root mean square."""
    return norm(tensor) / math.sqrt(tensor.numel())


def norm(tensor: Tensor) -> Tensor:
    """Euclidean norm, without a float32 copy of the tensor."""
    return torch.linalg.vector_norm(tensor, dtype=wide(tensor.dtype))


def numbers(found: Mapping[str, Any]) -> dict[str, Any]:
    """Tensors as Python numbers, or tuples of them."""
    return {
        key: (tuple(value.tolist()) if value.dim() else value.item()) if isinstance(value, Tensor) else value
        for key, value in found.items()
    }


def summary(measures: Sequence[Measures]) -> dict[str, float]:
    """The few numbers that are worth a curve during training; see `Probe.values`."""
    if not measures:
        return {}
    last = measures[-1]
    outputs = [m.output_rms for m in measures if m.output_rms is not None]
    sizes = [m.size for m in measures if m.size is not None]
    gradients = [m.gradient_norm for m in measures if m.gradient_norm is not None]
    mixing = [m for m in measures if m.composite_gain_forward is not None]
    found = {
        "stream_rms_first": sizes[0] if sizes else None,
        "stream_rms_last": last.size,
        "stream_rms_max": max(sizes, default=None),
        "stream_spread": last.spread,
        "input_rms_max": max((m.input_rms for m in measures[:-1] if m.input_rms is not None), default=None),
        "output_rms_max": max(outputs, default=None),
        "read_entropy": _mean(m.read_entropy for m in measures),
        "read_entropy_last": last.read_entropy,
        "read_dominance": _mean(m.read_dominance for m in measures),
        "write_entropy": _mean(m.write_entropy for m in measures),
        "write_dominance": _mean(m.write_dominance for m in measures),
        "doubly_stochastic_error": max((m.doubly_stochastic_error for m in mixing), default=None),
        "gain_forward": mixing[-1].composite_gain_forward if mixing else None,
        "gain_backward": mixing[-1].composite_gain_backward if mixing else None,
        "gradient_first": gradients[0] if gradients else None,
        "gradient_last": gradients[-1] if gradients else None,
    }
    return {key: value for key, value in found.items() if value is not None}


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
