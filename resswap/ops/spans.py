"""Working through many tokens a few at a time."""

from collections.abc import Iterator

from torch import Tensor

# Elements per span: 2 MiB of float32 stay in a CPU's cache; elsewhere 64 MiB bound what is held besides the result.
CPU_SPAN = 2**19
DEVICE_SPAN = 2**24


def spans(tensor: Tensor) -> Iterator[slice]:
    """Slices over the first dimension, each of a bounded number of elements and of at least one row."""
    size = CPU_SPAN if tensor.device.type == "cpu" else DEVICE_SPAN
    step = max(1, size // max(1, tensor[:1].numel()))
    return (slice(start, start + step) for start in range(0, tensor.shape[0], step))
