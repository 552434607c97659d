"""Working through many tokens a few at a time."""

import math
from collections.abc import Iterator

from torch import Tensor

from .precision import wide

# Elements per span. Narrow dtypes are widened span by span: on a CPU 2 MiB of float32 stay in the cache, elsewhere
# 64 MiB bound what is held besides the result. Where nothing is widened, only temporaries of one stream are bounded.
CPU_SPAN = 2**19
DEVICE_SPAN = 2**24
WIDE_FACTOR = 4


def spans(tensor: Tensor) -> Iterator[slice]:
    """Slices over the first dimension, each of a bounded number of elements and of at least one row."""
    size = CPU_SPAN if tensor.device.type == "cpu" else DEVICE_SPAN
    if tensor.dtype == wide(tensor.dtype):
        size *= WIDE_FACTOR
    rows = max(1, size // max(1, tensor[:1].numel()))
    count = math.ceil(tensor.shape[0] / rows)
    step = math.ceil(tensor.shape[0] / max(1, count))  # all about equally long
    return (slice(start, start + step) for start in range(0, tensor.shape[0], max(1, step)))
