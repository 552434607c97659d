"""The numerics of resswap: pure functions on tensors, each with its plain reference beside it."""

from .depth_attention import depth_attention, depth_attention_reference
from .sinkhorn import sinkhorn, sinkhorn_reference
from .streams import (
    hc_coefficients,
    hc_read,
    hc_read_reference,
    mhc_coefficients,
    mhc_read,
    mhc_read_reference,
    read_streams,
    read_streams_reference,
    write_streams,
    write_streams_reference,
)

__all__ = [
    "depth_attention",
    "depth_attention_reference",
    "hc_coefficients",
    "hc_read",
    "hc_read_reference",
    "mhc_coefficients",
    "mhc_read",
    "mhc_read_reference",
    "read_streams",
    "read_streams_reference",
    "sinkhorn",
    "sinkhorn_reference",
    "write_streams",
    "write_streams_reference",
]
