"""The schemes: one file for each family of connections."""

from .attnres import AttnResConfig, BlockAttnResConfig
from .base import Connection, SchemeConfig, available_schemes, option, register_scheme, scheme_config
from .hc import HCConfig
from .mhc import MHCConfig

__all__ = [
    "AttnResConfig",
    "BlockAttnResConfig",
    "Connection",
    "HCConfig",
    "MHCConfig",
    "SchemeConfig",
    "available_schemes",
    "option",
    "register_scheme",
    "scheme_config",
]
