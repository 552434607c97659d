"""Which dtype the arithmetic runs in."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of coefficients, norms and sums for streams of `dtype`: float32, or float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def no_autocast(tensor: Tensor) -> AbstractContextManager:
    """Switch autocast off on the tensor's device, so that every operation keeps the dtype it was written for."""
    device = tensor.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()
