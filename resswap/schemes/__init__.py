"""The schemes: one file for each family of connections."""

from .ablations import NoneConfig, PostNormConfig
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
from .delta_attnres import DeltaAttnResConfig
from .denseformer import DenseFormerConfig
from .hc import HCConfig
from .mhc import MHCConfig
from .mhc_lite import MHCLiteConfig
from .residual import ResidualConfig
from .weights import Weights

__all__ = [
    "Add",
    "AttnResConfig",
    "BlockAttnResConfig",
    "Connection",
    "DeltaAttnResConfig",
    "DenseFormerConfig",
    "HCConfig",
    "MHCConfig",
    "MHCLiteConfig",
    "NoneConfig",
    "Place",
    "ResidualConfig",
    "PostNormConfig",
    "ResidualModule",
    "SchemeConfig",
    "Weights",
    "available_schemes",
    "option",
    "register_scheme",
    "scheme_config",
]
