"""The learned read-out of n streams, as transformers' `DeepseekV4HyperHead`."""

from torch import Tensor

from .plain import needs_plain
from .stream_formulas import Coefficients, dynamic_coefficients, dynamic_read_reference
from .streams import dynamic_read


def readout_streams(
    streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, eps: float, kernels: str = "auto"
) -> Tensor:
    """`x = sum_j sigmoid(scale m_j + base_j) X_j` with `m = fn @ flatten(X) / rms(flatten(X))`.

    Args:
        streams: `[..., n, C]`.
        fn: `[n, n C]`.
        scale: `[1]`.
        base: `[n]`.
        eps: added to the mean square.

    Returns:
        `[..., C]` in the streams' dtype; the arithmetic is float32 (float64 for float64 streams).
    """
    if needs_plain():
        return readout_streams_reference(streams, fn, scale, base, eps)
    return dynamic_read(streams, fn, scale, base, _head, eps, kernels)[0]


def readout_coefficients(streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, eps: float) -> Tensor:
    """The weights `[..., n]` of `readout_streams`, float32 or float64."""
    return dynamic_coefficients(streams, fn, scale, base, _head, eps)[0]


def readout_streams_reference(streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, eps: float) -> Tensor:
    """`readout_streams` in plain operations."""
    return dynamic_read_reference(streams, fn, scale, base, _head, eps)[0]


def _head(mixes: Tensor, scale: Tensor, base: Tensor) -> Coefficients:
    """The weights `[n, T]`, from mixes `[n, 1, T]`; nothing is written, so what stands for post and comb is unused."""
    weights = (scale.to(mixes.dtype) * mixes[:, 0] + base.to(mixes.dtype)[:, None]).sigmoid()
    return weights, weights, weights.expand(len(weights), *weights.shape)
