"""The schemes: one file for each family of connections."""

from .attnres import AttnResConfig, BlockAttnResConfig
from .base import (
    Add,
    Connection,
    Place,
    ResidualModule,
    SchemeConfig,
    available_schemes,
    option,
    register_scheme,
    scheme_config,
)
from .hc import HCConfig
from .mhc import MHCConfig
from .residual import ResidualConfig
from .weights import Weights

__all__ = [
    "Add",
    "AttnResConfig",
    "BlockAttnResConfig",
    "Connection",
    "HCConfig",
    "MHCConfig",
    "Place",
    "ResidualConfig",
    "ResidualModule",
    "SchemeConfig",
    "Weights",
    "available_schemes",
    "option",
    "register_scheme",
    "scheme_config",
]
