"""resswap: swap the residual connections of a transformers decoder.

    import resswap
    resswap.convert(model, scheme="mhc", num_streams=4)

Importing it lets transformers' Auto classes load models that were saved after a conversion.
"""

from . import hub as hub
from .conversion import connections, convert, diff, revert
from .errors import CheckpointError, OptionError, ResswapError, UnsupportedModelError
from .publishing import push_to_hub
from .schemes import Connection, SchemeConfig, available_schemes
from .version import __version__ as __version__

__all__ = [
    "CheckpointError",
    "Connection",
    "OptionError",
    "ResswapError",
    "SchemeConfig",
    "UnsupportedModelError",
    "available_schemes",
    "connections",
    "convert",
    "diff",
    "push_to_hub",
    "revert",
]
