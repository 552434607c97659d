"""The numerics of resswap: pure functions on tensors, each with its plain reference beside it.

There are two code paths: in eager mode hand-written autograd functions that save little and recompute the rest; and
under torch.compile, in transforms of torch.func and for second derivatives plain compositions of torch operations,
the references (`plain` decides). `streams` dispatches between `stream_functions` (hand-written) and `stream_formulas`
(plain), while `depth_attention` and `sinkhorn` hold both of theirs.
"""

from .delta_attention import delta_attention, delta_attention_reference
from .depth_attention import depth_attention, depth_attention_reference
from .depth_sum import depth_sum, depth_sum_reference
from .kernels import KERNELS
from .permutations import mhc_lite_coefficients, mhc_lite_read, mhc_lite_read_reference
from .readout import readout_coefficients, readout_streams, readout_streams_reference
from .sinkhorn import sinkhorn, sinkhorn_reference
from .stream_formulas import (
    hc_coefficients,
    hc_read_reference,
    mhc_coefficients,
    mhc_read_reference,
    read_streams_reference,
    write_streams_reference,
)
from .streams import hc_read, mhc_read, read_streams, write_streams

__all__ = [
    "KERNELS",
    "delta_attention",
    "delta_attention_reference",
    "depth_attention",
    "depth_attention_reference",
    "depth_sum",
    "depth_sum_reference",
    "hc_coefficients",
    "hc_read",
    "hc_read_reference",
    "mhc_coefficients",
    "mhc_lite_coefficients",
    "mhc_lite_read",
    "mhc_lite_read_reference",
    "mhc_read",
    "mhc_read_reference",
    "read_streams",
    "read_streams_reference",
    "readout_coefficients",
    "readout_streams",
    "readout_streams_reference",
    "sinkhorn",
    "sinkhorn_reference",
    "write_streams",
    "write_streams_reference",
]
