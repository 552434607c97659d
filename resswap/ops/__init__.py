"""The numerics of resswap: pure functions on tensors, each with its plain reference beside it."""

from .depth_attention import depth_attention, depth_attention_reference
from .sinkhorn import sinkhorn, sinkhorn_reference
from .streams import (
    hc_coefficients,
    hc_read,
    mhc_coefficients,
    mhc_read,
    read_streams,
    write_streams,
)

__all__ = [
    "depth_attention",
    "depth_attention_reference",
    "hc_coefficients",
    "hc_read",
    "mhc_coefficients",
    "mhc_read",
    "read_streams",
    "sinkhorn",
    "sinkhorn_reference",
    "write_streams",
]
