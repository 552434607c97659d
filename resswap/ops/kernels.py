"""Which implementation of the inner loops to use: in single operations or compiled."""

from functools import cache

import torch
from transformers.utils import logging

from .compiled_kernels import COMPILED
from .eager_kernels import EAGER, Kernels

KERNELS = ("auto", "eager", "compile")

logger = logging.get_logger(__name__)


def kernels_for(kernels: str, device: torch.device) -> Kernels:
    """The inner loops for tensors on a device.

    Args:
        kernels: one of `KERNELS`. "auto" compiles on CUDA, where launching single operations costs more than they do,
            and runs single operations elsewhere.
        device: where the tensors are.
    """
    compiled = kernels == "compile" or (kernels == "auto" and device.type == "cuda")
    return COMPILED if compiled and _can_compile(device.type) else EAGER


@cache
def _can_compile(device_type: str) -> bool:
    """Whether torch.compile works here; if not, a warning says so, once."""
    try:
        v = torch.ones(2, 2, device=device_type)
        COMPILED.source_dot(v, v)
    except Exception as error:  # of the compiler, the linker, Triton: many base classes
        logger.warning(
            f'kernels="compile": torch.compile does not work here, single operations are used instead: {error}'
        )
        return False
    return True
