"""resswap: swap the residual connections of a transformers decoder.

    import resswap
    resswap.convert(model, scheme="mhc", num_streams=4)

Importing it lets transformers' Auto classes load models that were saved after a conversion.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import hub as hub
from .conversion import connections, convert, diff, revert, set_kernels
from .coverage import Support, support
from .errors import CheckpointError, OptionError, ResswapError, UnsupportedModelError
from .publishing import push_to_hub
from .schemes import (
    Add,
    Connection,
    Place,
    ResidualModule,
    SchemeConfig,
    available_schemes,
    option,
    register_scheme,
)
from .training import added_parameters, freeze_base, load_connections, param_groups, save_connections
from .version import __version__ as __version__

if TYPE_CHECKING:
    from .adapters import load_adapter, lora_config
    from .callback import ResidualCallback
    from .diagnostics import Report, inspect

__all__ = [
    "Add",
    "CheckpointError",
    "Connection",
    "OptionError",
    "Report",
    "Place",
    "ResidualCallback",
    "ResidualModule",
    "ResswapError",
    "SchemeConfig",
    "Support",
    "UnsupportedModelError",
    "added_parameters",
    "available_schemes",
    "connections",
    "convert",
    "diff",
    "freeze_base",
    "inspect",
    "load_adapter",
    "load_connections",
    "lora_config",
    "option",
    "param_groups",
    "push_to_hub",
    "register_scheme",
    "revert",
    "save_connections",
    "set_kernels",
    "support",
]

# These import PEFT, the Trainer or rich, which takes time.
_LAZY = {
    "Report": "diagnostics",
    "ResidualCallback": "callback",
    "inspect": "diagnostics",
    "load_adapter": "adapters",
    "lora_config": "adapters",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
