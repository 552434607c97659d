"""Find the layers of a model, and read and rewrite their forward. Nothing here knows about schemes."""

from .layer import checks_checkpointing, rewrite_layer
from .rewrite import Rewrite, Site
from .source import (
    Methods,
    MethodSource,
    original_class,
    rewritten_class,
    rewritten_decorator,
    rewritten_methods,
    source_diff,
)
from .stack import EXPAND, MAP, READOUT, Stack, collapses_hidden_states, find_stack

__all__ = [
    "EXPAND",
    "MAP",
    "READOUT",
    "MethodSource",
    "Methods",
    "Rewrite",
    "Site",
    "Stack",
    "checks_checkpointing",
    "collapses_hidden_states",
    "find_stack",
    "original_class",
    "rewrite_layer",
    "rewritten_class",
    "rewritten_decorator",
    "rewritten_methods",
    "source_diff",
]
